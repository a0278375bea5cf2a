"""Tells reasoning, content and tool calls of one completion apart as its text comes."""

from __future__ import annotations

from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.form_or_calls import FormOrCallsReader
from aioserve.text.output_parsers.parts import Parts
from aioserve.text.output_parsers.reading import Reading, TextReader
from aioserve.text.output_parsers.registry import ReasoningTags
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = ["CompletionReader", "ReasoningReader"]


class CompletionReader:
    """Reader of one completion. Its results, joined, are the same for any pieces of the text.

    `is_open` says that the text begins within reasoning. A form that is None leaves its part in the
    content. Tool calls within reasoning are none. `types` are those of the arguments of calls.
    `or_form`: behind the reasoning are calls alone, or else a form (`FormOrCallsReader`).
    """

    def __init__(
        self,
        tools: type[ToolParser] | None,
        reasoning: ReasoningTags | None,
        *,
        is_open: bool,
        types: ArgumentTypes | None = None,
        or_form: bool = False,
    ) -> None:
        parser = None if tools is None else tools(types=types)
        self._tools = FormOrCallsReader(parser) if parser is not None and or_form else parser
        self._reasoning = None
        if reasoning is not None:
            self._reasoning = ReasoningReader(reasoning.opens, reasoning.closes, is_open=is_open)

    @property
    def may_reason(self) -> bool:
        """Whether more reasoning can come."""
        return self._reasoning is not None and not self._reasoning.has_ended

    def push(self, text: str) -> Parts:
        """Take more text; return what became known."""
        if not text:
            return Parts()
        parts = Parts(text) if self._reasoning is None else self._reasoning.push(text)
        if self._tools is None or not parts.content:
            return parts
        behind = self._tools.push(parts.content)
        return Parts(behind.content, parts.reasoning, behind.tool_calls)

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        parts = Parts() if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return parts
        first, last = self._tools.push(parts.content), self._tools.finish()
        calls = (*first.tool_calls, *last.tool_calls)
        return Parts(first.content + last.content, parts.reasoning, calls)


class ReasoningReader(TextReader):
    """Tells the reasoning at the start of a text from the rest.

    Reasoning begins with the tag `opens`, white space before it aside, or at once where
    `is_open`, and ends with the tag `closes` or with the text. White space beside the tags belongs
    to neither. A tag anywhere else is text.
    """

    def __init__(self, opens: str, closes: str, *, is_open: bool) -> None:
        self._tags = opens, closes
        self._is_open = is_open
        self.is_inside: bool = is_open
        """Whether more text is reasoning, or the tag behind it: known with that tag's end."""
        self.has_ended: bool = False
        """Whether all that follows is content."""
        super().__init__()

    def _read(self) -> Reading[None]:
        opens, closes = self._tags
        spaces = yield from self._spaces()
        if not (yield from self._one_of(opens)) and not self._is_open:
            self._content.append(spaces)
        else:
            self.is_inside = True
            yield from self._spaces()
            held, mark = yield from self._up_to((closes,), self._reasoning.append)
            if not mark:
                self._reasoning.append(held)
            self.is_inside = False
            yield from self._spaces()
        self.has_ended = True
        while (yield from self._next()):
            self._content.append(self._text[self._at :])
            self._at = len(self._text)
