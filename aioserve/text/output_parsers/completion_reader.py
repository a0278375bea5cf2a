"""Reader that separates reasoning, content and tool calls of one completion as its text comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.form_or_calls import FormOrCallsReader
from aioserve.text.output_parsers.harmony import HarmonyChannels, HarmonyParser
from aioserve.text.output_parsers.parts import Parts
from aioserve.text.output_parsers.reasoning import ReasoningReader
from aioserve.text.output_parsers.registry import ReasoningFormat
from aioserve.text.output_parsers.tool_parser import ToolParser
from aioserve.text.output_parsers.typed_marks import TypedMarks

__all__ = ["CompletionReader"]


class CompletionReader:
    """Reader of one completion. Its results, joined, are the same for any pieces of the text.

    - `opened` is the part of the completion that the prompt has written (`opened_by` of the format
      of reasoning).
    - A `tools` or `reasoning` of None leaves that part in the content. Tool calls within reasoning
      don't count.
    - `types` are those of the arguments of calls.
    - With `alone`, only calls follow the reasoning, or only a form (`FormOrCallsReader`, except for
      harmony).
    - Marks among `exact` are special tokens: the same characters typed in ordinary tokens are text.
    """

    def __init__(
        self,
        tools: type[ToolParser] | None,
        reasoning: ReasoningFormat | None,
        *,
        opened: str = "",
        types: ArgumentTypes | None = None,
        alone: bool = False,
        exact: Collection[str] = (),
    ) -> None:
        self._typed = TypedMarks(exact) if exact else None
        self._reasoning: ReasoningReader | HarmonyParser | None = None
        if isinstance(reasoning, HarmonyChannels):
            tells_calls = tools is HarmonyParser
            self._reasoning = reasoning.reader(
                opened, types, tells_calls=tells_calls, has_heads=alone
            )
            tools = None if tells_calls else tools
        elif reasoning is not None:
            self._reasoning = reasoning.reader(opened)
        self._tools: FormOrCallsReader | ToolParser | None = None
        if tools is HarmonyParser:  # it tells the kind of each message
            self._tools = HarmonyParser(types=types, has_heads=alone)
        elif tools is not None:
            parser = tools(types=types)
            self._tools = FormOrCallsReader(parser) if alone else parser

    @property
    def may_reason(self) -> bool:
        """True if more reasoning can come."""
        return self._reasoning is not None and not self._reasoning.has_ended

    def push(self, text: str, marks: Sequence[int] = ()) -> Parts:
        """Read more text, in which special tokens begin at the indices `marks`; return the new
        parts.
        """
        if not text:
            return Parts()
        if self._typed is None:
            return self._read(text)
        return self._typed.unescaped(self._read(self._typed.escaped(text, marks)))

    def _read(self, text: str) -> Parts:
        parts = Parts(text) if self._reasoning is None else self._reasoning.push(text)
        if self._tools is None or not parts.content:
            return parts
        behind = self._tools.push(parts.content)
        return Parts(behind.content, parts.reasoning, behind.tool_calls)

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        parts = self._ended()
        return parts if self._typed is None else self._typed.unescaped(parts)

    def _ended(self) -> Parts:
        parts = Parts() if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return parts
        first, last = self._tools.push(parts.content), self._tools.finish()
        calls = (*first.tool_calls, *last.tool_calls)
        return Parts(first.content + last.content, parts.reasoning, calls)
