"""Tool calls as Mistral's models write them: a list of objects, or name by name,

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...

where an id may stand before the arguments: [CALL_ID]VvvODy9mT[ARGS]. What follows the list, or the
arguments, is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aioserve.text.output_parsers.parts import short_id
from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = ["MistralParser"]

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_WORD_CHARS = 256
"""Longest name of a function, or id."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


class MistralParser(ToolParser):
    def __init__(self, new_id: Callable[[], str] = short_id) -> None:
        super().__init__(new_id)

    def _read(self) -> Reading[None]:
        held = raw = ""
        while raw := raw or (yield from self._give_up_to(CALLS, held=held)):
            held = ""
            raw += yield from self._spaces()
            following = yield from self._next()
            if following == "[":
                self._at += 1
                end, held = yield from self._list(f"{raw}[")
            elif following == "{":
                end = yield from self._call(raw)
            else:
                end = yield from self._named(raw)
            raw = ""
            if end is CallEnd.BROKEN:
                raw = yield from self._broken_arguments(CALLS)

    def _list(self, raw: str) -> Reading[tuple[CallEnd, str]]:
        """Read a list; return how it ended, and white space behind what is taken."""
        raw += yield from self._spaces()
        while True:
            end = yield from self._call(raw)
            if end is not CallEnd.WHOLE:
                return end, ""
            raw = yield from self._spaces()
            if not (separator := (yield from self._one_of(",", "]"))):
                return end, raw
            if separator == "]":
                return end, ""
            raw += separator + (yield from self._spaces())

    def _named(self, raw: str) -> Reading[CallEnd]:
        name, call_id = (yield from self._word()), ""
        raw += name
        if name and (mark := (yield from self._one_of(CALL_ID))):
            call_id = yield from self._word()
            raw += mark + call_id
        raw += yield from self._one_of(ARGS)
        raw += yield from self._spaces()
        if not name or (yield from self._next()) != "{":
            self._give(raw)
            return CallEnd.NO_CALL
        self._begin_call(name, call_id)
        return (yield from self._arguments())

    def _word(self) -> Reading[str]:
        word = ""
        while (yield from self._next()) and len(word) <= MAX_WORD_CHARS:
            found = _WORD.match(self._text, self._at, self._at + MAX_WORD_CHARS - len(word))
            if found is None:
                break
            word += found[0]
            self._at = found.end()
        return word
