"""Escapes for marks that a model types in ordinary tokens, so that they aren't read as marks.

    tokens    <|channel|>  final  <|message|>  <  |  call  |>
    read      <|channel|>final<|message|><|call|·>            ·  an escape, which no token spells

A model that quotes a message, such as a tool's result, may type what looks like a call. If the
tokenizer has a mark as a special token, only that token is the mark. Otherwise there is only text,
and nothing tells who meant it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from aioserve.text.output_parsers.parts import Parts, ToolCallDelta

__all__ = ["TypedMarks"]

_ESCAPE = "\udfff"
"""Half a surrogate pair: no text that is decoded from bytes has one."""


class TypedMarks:
    """Escapes text of one completion that looks like one of `marks` and isn't one.

    The escape stands before the last character of the mark, so no text is held back. All `marks`
    must be special tokens, and none may begin within another.
    """

    def __init__(self, marks: Collection[str]) -> None:
        named = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
        self._pattern = re.compile(f"(?=({named}))")
        self._last_chars = frozenset([mark[-1] for mark in marks])
        self._num_kept = max(map(len, marks)) - 1
        self._before = ""
        """End of the text so far, which a mark may begin in."""
        self._real: set[int] = set()
        """Indices in it at which special tokens begin."""
        self._has_escaped = False

    def escaped(self, text: str, places: Sequence[int]) -> str:
        """Return the next text with escapes. Special tokens begin at the indices `places`."""
        start, whole = len(self._before), self._before + text
        real = self._real.union([start + place for place in places])
        ends: list[int] = []
        if not self._last_chars.isdisjoint(text):
            ends += [
                found.end(1) - 1
                for found in self._pattern.finditer(whole)
                if found.start() not in real and found.end(1) > start
            ]
        cut = max(len(whole) - self._num_kept, 0)
        self._before = whole[cut:]
        self._real = {place - cut for place in real if place >= cut}
        if not ends:
            return text
        self._has_escaped = True
        pieces: list[str] = []
        for end in ends:
            pieces += (whole[start:end], _ESCAPE)
            start = end
        return "".join([*pieces, whole[start:]])

    def unescaped(self, parts: Parts) -> Parts:
        """Return parts of the text as the model typed them."""
        if not self._has_escaped:
            return parts
        calls = [
            ToolCallDelta(
                call.index, call.id, call.name and _bare(call.name), _bare(call.arguments)
            )
            for call in parts.tool_calls
        ]
        return Parts(_bare(parts.content), _bare(parts.reasoning), tuple(calls))


def _bare(text: str) -> str:
    return text.replace(_ESCAPE, "")
