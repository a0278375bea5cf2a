"""Tool calls as Hermes and Qwen write them:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

one after the other. The closing tag may be missing at the end, or before the next call; what stands
between a call and its closing tag is content.
"""

from __future__ import annotations

from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = ["HermesParser"]

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def _read(self) -> Reading[None]:
        held, marks = "", (OPENS,)
        while raw := (yield from self._give_up_to(*marks, held=held)):
            held, marks = "", (OPENS,)
            if raw.endswith(CLOSES):
                self._end_call()
                continue
            raw += yield from self._spaces()
            end = yield from self._call(raw)
            if end is CallEnd.BROKEN:
                yield from self._broken_arguments(CLOSES)
            elif end is CallEnd.WHOLE:
                held = yield from self._spaces()
                if (yield from self._one_of(CLOSES)):
                    held = ""
                else:
                    marks = (OPENS, CLOSES)
