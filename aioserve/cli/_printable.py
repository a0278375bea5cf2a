"""Text that a terminal shows and does nothing else with."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text with its lines and tabs, and with other characters that aren't printable as Python
    spells them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
