"""Reasoning between two tags, at the start of a completion."""

from __future__ import annotations

import msgspec

from aioserve.text.output_parsers.reading import Reading, TextReader

__all__ = ["ReasoningReader", "ReasoningTags"]

MAX_BEGUN_CHARS = 2**20
"""Most characters searched, so that a long message doesn't hold the event loop."""


class ReasoningReader(TextReader):
    """Separates the reasoning at the start of a text from the rest.

    Reasoning begins with the tag `opens`, white space before it aside, or at once if `is_open`. It
    ends with the tag `closes` or with the text. White space beside the tags belongs to neither. A
    tag anywhere else is text.
    """

    def __init__(self, opens: str, closes: str, *, is_open: bool) -> None:
        self._tags = opens, closes
        self._is_open = is_open
        self.is_inside: bool = is_open
        """True if more text is reasoning, or the tag after it: known with that tag's end."""
        self.has_ended: bool = False
        """True if only content follows."""
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


class ReasoningTags(msgspec.Struct, frozen=True):
    """The tags around reasoning."""

    opens: str
    closes: str
    is_open: bool
    """True if a completion begins with reasoning, whatever the prompt ends with."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, self.closes)

    def is_open_after(self, prompt_end: str, begun: str) -> bool:
        """Return true if a completion goes on with reasoning.

        The prompt's end, `prompt_end`, may have opened the tag. The message that the completion
        continues, `begun`, is read as its start. Reasoning at its start is open until a tag closes
        it. Tags are searched in its first and last `MAX_BEGUN_CHARS` characters.
        """
        is_open = self.is_open or begun[:MAX_BEGUN_CHARS].lstrip().startswith(self.opens)
        if is_open and self.closes not in begun[-MAX_BEGUN_CHARS:]:
            return True
        return prompt_end.rstrip().endswith(self.opens)

    def opened_by(self, prompt_end: str, begun: str) -> str:
        """Return what precedes the completion of its reasoning: the tag, or nothing."""
        return self.opens if self.is_open_after(prompt_end, begun) else ""

    def reader(self, opened: str) -> ReasoningReader:
        """Return a reader of one completion that `opened` precedes."""
        return ReasoningReader(self.opens, self.closes, is_open=bool(opened))
