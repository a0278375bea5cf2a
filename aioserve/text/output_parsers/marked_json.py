"""Parsers of tool calls that are JSON behind a mark, for bundled formats and those of plugins."""

from __future__ import annotations

from typing import ClassVar

from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = ["MarkedJsonParser"]


class MarkedJsonParser(ToolParser):
    """Base of the parsers. A call is `mark_before`, an object with a name and arguments, and
    `mark_behind`. That mark may be missing at the end, or before the next call; what stands between
    a call and that mark is content."""

    mark_before: ClassVar[str]
    mark_behind: ClassVar[str] = ""
    """The mark of the end; empty where calls have none."""
    arguments_key: ClassVar[str] = "arguments"
    """The key of arguments in calls that a grammar holds. "parameters" is read as well."""
    in_list: ClassVar[bool] = False
    """True if a list of objects stands behind the mark; one object alone is read as well."""

    def _read(self) -> Reading[None]:
        before, behind = self.mark_before, self.mark_behind
        held, raw, marks = "", "", (before,)
        while raw := raw or (yield from self._give_up_to(*marks, held=held)):
            held, marks = "", (before,)
            if behind and raw.endswith(behind):
                self._end_call()
                raw = ""
                continue
            raw += yield from self._spaces()
            if self.in_list and (yield from self._one_of("[")):
                end, held = yield from self._list(f"{raw}[")
            else:
                end = yield from self._call(raw)
            raw = ""
            if end is CallEnd.BROKEN and behind:
                yield from self._broken_arguments(behind)
            elif end is CallEnd.BROKEN:
                raw = yield from self._broken_arguments(before)
            elif end is CallEnd.WHOLE and behind:
                held += yield from self._spaces()
                if (yield from self._one_of(behind)):
                    held = ""
                else:
                    marks = (before, behind)
