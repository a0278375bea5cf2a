"""Tool calls as plain JSON: a completion that is a list of calls, or one call,

    [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    {"name": "get_weather", "arguments": {"city": "Oslo"}}

without any mark. No family of models writes this by itself: it is what a schema of calls asks for.
What follows the list, or the call, is content.
"""

from __future__ import annotations

from collections.abc import Callable

from aioserve.text.output_parsers.parts import short_id
from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = ["JsonCallsParser"]


class JsonCallsParser(ToolParser):
    """Parser of such calls. Their ids are such as every template takes."""

    def __init__(self, new_id: Callable[[], str] = short_id) -> None:
        super().__init__(new_id)

    def _read(self) -> Reading[None]:
        raw = yield from self._spaces()
        is_list = bool((yield from self._one_of("[")))
        if is_list:
            raw += "[" + (yield from self._spaces())
        if (yield from self._next()) != "{":
            self._give(raw)
        else:
            while (yield from self._calls_on(raw, is_list=is_list)):
                raw = "," + (yield from self._spaces())
        held = yield from self._give_up_to()
        self._give(held)

    def _calls_on(self, raw: str, *, is_list: bool) -> Reading[bool]:
        """Read a call, and what separates it from the next, if one comes."""
        end = yield from self._call(raw)
        if end is CallEnd.BROKEN:
            yield from self._broken_arguments()
        if end is not CallEnd.WHOLE or not is_list:
            return False
        spaces = yield from self._spaces()
        separator = yield from self._one_of(",", "]")
        if not separator:
            self._give(spaces)
        return separator == ","
