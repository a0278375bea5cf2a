"""Readers of text in pieces, written as if all text were there.

A reader is a generator that yields when it needs more. Its results depend on the text alone, and
never on where the pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from aioserve.text.output_parsers.parts import Parts, ToolCallDelta

__all__ = ["Reading", "TextReader"]

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that finally returns a `T`."""

_SPACES = re.compile(r"\s*")


class TextReader:
    """Base of readers of one completion. A subclass has `_read`, which ends with the text."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._text = ""
        self._at = 0
        self._is_whole = False
        self._run = self._read()
        next(self._run)

    def _read(self) -> Reading[None]:
        raise NotImplementedError

    def push(self, text: str) -> Parts:
        """Read more text; return the new parts."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._run)
        return self._taken()

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        self._is_whole = True
        next(self._run, None)
        return self._taken()

    def _taken(self) -> Parts:
        taken = Parts("".join(self._content), "".join(self._reasoning), tuple(self._deltas))
        for parts in (self._content, self._reasoning, self._deltas):
            parts.clear()
        return taken

    # -- for `_read`

    def _next(self) -> Reading[str]:
        """Return the next character without taking it; empty at the end."""
        while self._at == len(self._text) and not self._is_whole:
            yield
        return self._text[self._at : self._at + 1]

    def _spaces(self) -> Reading[str]:
        """Take white space."""
        taken: list[str] = []
        while True:
            found = _SPACES.match(self._text, self._at)
            if found is not None:
                taken.append(found[0])
                self._at = found.end()
            if self._at < len(self._text) or self._is_whole:
                return "".join(taken)
            yield

    def _one_of(self, *literals: str) -> Reading[str]:
        """Take the literal that is next; empty if none is."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    self._at += len(literal)
                    return literal
            if self._is_whole or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def _some(self, marks: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Take text without a mark, and the mark after it, if there is one.

        Both are empty only at the end.
        """
        while True:
            found = min(
                ((at, mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0),
                default=None,
            )
            if found is not None:
                at, mark = found
                text = self._text[self._at : at]
                self._at = at + len(mark)
                return text, mark
            end = len(self._text) if self._is_whole else self._safe_end(marks)
            if end > self._at or self._is_whole:
                text, self._at = self._text[self._at : end], end
                return text, ""
            yield

    def _up_to(
        self, marks: tuple[str, ...], give: Callable[[str], None], held: str = ""
    ) -> Reading[tuple[str, str]]:
        """Take text up to the next mark, and the mark. Pass the text to `give`, without trailing
        white space.

        Return that white space and the mark, which is empty at the end of the text. `held` is white
        space that came before.
        """
        spaces, mark = [held], ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(marks)
            kept = text.rstrip()
            if kept:
                give("".join(spaces) + kept)
                spaces.clear()
            spaces.append(text[len(kept) :])
        return "".join(spaces), mark

    def _put_back(self, text: str) -> None:
        """Put back what was taken last, to be read again."""
        self._text, self._at = text + self._text[self._at :], 0

    def _safe_end(self, marks: tuple[str, ...]) -> int:
        """Return the index of the longest end of the text that may begin a mark."""
        longest = max(map(len, marks), default=1) - 1
        for at in range(max(len(self._text) - longest, self._at), len(self._text)):
            if any(mark.startswith(self._text[at:]) for mark in marks):
                return at
        return len(self._text)
