"""Tool calls as Llama 3 writes them: the completion is the call,

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

maybe with the token <|python_tag|> before it, behind which a call may also be where content came
first. Several have a semicolon, a comma or white space between them.
"""

from __future__ import annotations

from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = ["Llama3JsonParser"]

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    def _read(self) -> Reading[None]:
        held = yield from self._spaces()
        if (yield from self._next()) == "{":
            held = yield from self._calls(held)
        while raw := (yield from self._give_up_to(TAG, held=held)):
            raw += yield from self._spaces()
            if (yield from self._next()) == "{":
                held = yield from self._calls(raw)
            else:
                self._give(raw)
                held = ""

    def _calls(self, raw: str) -> Reading[str]:
        """Read one call after the other; return white space behind the last."""
        while True:
            end = yield from self._call(raw)
            if end is CallEnd.BROKEN:
                yield from self._broken_arguments()
            if end is not CallEnd.WHOLE:
                return ""
            raw = yield from self._spaces()
            if separator := (yield from self._one_of(";", ",")):
                raw += separator + (yield from self._spaces())
            if (yield from self._next()) != "{":
                if not separator:
                    return raw
                self._give(raw)
                return ""
