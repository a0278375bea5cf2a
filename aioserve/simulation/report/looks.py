"""Looks that tell policies and parts apart: by colour, and without it by dashes, shapes and
patterns.

The colours themselves are in the page's style sheet, one set for light pages and one for dark ones.
"""

from __future__ import annotations

import msgspec

__all__ = ["MARKS", "NUM_COLORS", "Look", "look_of", "symbols"]

NUM_COLORS = 6
"""Classes `c0` to `c5` of the style sheet."""
DASHES = ("", "7 3", "2.5 2.5", "9 3 2 3")
MARKS = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.5-3.5H3.5V3.5H-3.5Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-4.5L4.6 3.5H-4.6Z",
    "M0 4.5L4.6-3.5H-4.6Z",
)
"""Outlines around 0, 0: circle, square, diamond, triangles that stand on a side and on a corner."""


class Look(msgspec.Struct, frozen=True):
    """Look of one policy."""

    css: str
    """Class in the style sheet, which has the colour."""
    dashes: str
    """Lengths on and off in CSS pixels; none for a solid line."""
    mark: str
    """Id of the symbol of its dots."""


def look_of(index: int) -> Look:
    """Look of a policy by its number. Policies with the same colour differ in dashes and shapes."""
    return Look(f"c{index % NUM_COLORS}", DASHES[index % len(DASHES)], f"mark{index % len(MARKS)}")


def symbols() -> str:
    """Shapes of the dots, and patterns, once for a page."""
    marks = "".join(f'<path id="mark{n}" d="{d}"/>' for n, d in enumerate(MARKS))
    stripes = "".join(
        f'<pattern id="stripes-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" class="under-{name}"/><path class="stripe-{name}" '
        f'd="M-1.5 1.5L1.5-1.5M0 6L6 0M4.5 7.5L7.5 4.5"/></pattern>'
        for name in ("cached", "late")
    )
    dots = (
        '<pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse">'
        '<circle cx="1.5" cy="1.5" r="1" class="dot"/></pattern>'
    )
    return f'<svg class="symbols" aria-hidden="true"><defs>{marks}{stripes}{dots}</defs></svg>'
