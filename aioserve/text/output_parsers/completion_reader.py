"""Tells reasoning, content and tool calls of one completion apart as its text comes."""

from __future__ import annotations

from aioserve.text.output_parsers.forms import ReasoningForm, ToolForm
from aioserve.text.output_parsers.parts import Parts
from aioserve.text.output_parsers.reasoning import ReasoningReader

__all__ = ["CompletionReader"]


class CompletionReader:
    """Reader of one completion. Its results, joined, are the same for any pieces of the text.

    `is_open` says that the text begins within reasoning. A form that is None leaves its part in the
    content. Tool calls within reasoning are none.
    """

    def __init__(
        self, tools: ToolForm | None, reasoning: ReasoningForm | None, *, is_open: bool
    ) -> None:
        self._tools = None if tools is None else tools.parser()
        self._reasoning = None
        if reasoning is not None:
            self._reasoning = ReasoningReader(reasoning.opens, reasoning.closes, is_open=is_open)

    def push(self, text: str) -> Parts:
        """Take more text; return what became known."""
        if not text:
            return Parts()
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        if self._tools is None or not content:
            return Parts(content, reasoning)
        parts = self._tools.push(content)
        return Parts(parts.content, reasoning, parts.tool_calls)

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return Parts(content, reasoning)
        first, last = self._tools.push(content), self._tools.finish()
        return Parts(first.content + last.content, reasoning, (*first.tool_calls, *last.tool_calls))
