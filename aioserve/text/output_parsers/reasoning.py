"""Reads reasoning that a model writes before its content, between tags."""

from __future__ import annotations

from aioserve.text.output_parsers.reading import Reading, TextReader

__all__ = ["ReasoningReader"]


class ReasoningReader(TextReader):
    """Tells the reasoning at the start of a text from the rest.

    Reasoning begins with the tag `opens`, white space before it aside, or at once where
    `is_open`, and ends with the tag `closes` or with the text. White space beside the tags belongs
    to neither. A tag anywhere else is text.
    """

    def __init__(self, opens: str, closes: str, *, is_open: bool) -> None:
        self._tags = opens, closes
        self._is_open = is_open
        self._reasoning = ""
        self._content = ""
        super().__init__()

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return more reasoning, and more of the rest."""
        self._push(text)
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """End the text; return what was held back."""
        self._end()
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = self._reasoning, self._content
        self._reasoning = self._content = ""
        return taken

    def _reason(self, text: str) -> None:
        self._reasoning += text

    def _read(self) -> Reading[None]:
        opens, closes = self._tags
        spaces = yield from self._spaces()
        if not (yield from self._one_of(opens)) and not self._is_open:
            self._content += spaces
        else:
            yield from self._spaces()
            held, mark = yield from self._up_to((closes,), self._reason)
            if not mark:
                self._reason(held)
            yield from self._spaces()
        while (yield from self._next()):
            self._content += self._text[self._at :]
            self._at = len(self._text)
