"""Text for a terminal that can't control it."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return the text with unprintable characters as Python escapes; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
