"""Pictures as inline SVG with text of the same size at any width.

A picture is as wide as the page allows. Places along it are in percent. Lines and areas are in an
inner `<svg>` that is stretched, with strokes that aren't. So nothing is measured, nothing is drawn
twice, and a narrow screen shows the same as a wide one.

Policies and parts differ in colour, and also in dashes, shapes and patterns. The page's style sheet
has one set of colours for light pages and one for dark ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

import msgspec

from aioserve.simulation.report.scales import Scale

__all__ = [
    "MARKS",
    "NUM_COLORS",
    "Look",
    "Plot",
    "guides_of",
    "look_of",
    "number",
    "percent",
    "symbols",
]

NUM_COLORS = 6
"""Number of colours: classes `c0` to `c5` of the style sheet."""
MOST_GUIDES = 3
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
    """Lengths on and off in CSS pixels; empty for a solid line."""
    mark: str
    """Id of the symbol of its dots."""


def guides_of(targets: Sequence[float], factor: float) -> list[float]:
    """Return the values of guides for targets in ascending order: all of a few, else the least and
    the largest.
    """
    ends = targets if len(targets) <= MOST_GUIDES else (targets[0], targets[-1])
    return [target * factor for target in ends]


def look_of(index: int) -> Look:
    """Return the look of a policy by its number. Policies of equal colour differ in dashes and
    shapes.
    """
    return Look(f"c{index % NUM_COLORS}", DASHES[index % len(DASHES)], f"mark{index % len(MARKS)}")


def symbols() -> str:
    """Return shapes of the dots, and patterns, once for a page."""
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


INNER_WIDTH = 600
"""Units along an inner `<svg>`: about as many as pixels, so that patterns keep their shape."""

Point = tuple[float, float]


def number(value: float) -> str:
    """Return the text of a number with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".").replace("-0", "0", 1) if value else "0"


def percent(place: float) -> str:
    return f"{number(100 * min(1.0, max(0.0, place)))}%"


class Plot:
    """One picture in the making."""

    def __init__(self, x: Scale, y: Scale, *, height: int = 170, css: str = "") -> None:
        """Begin a picture. `height` is that of the space between the axes, in CSS pixels."""
        self.x = x
        self.y = y
        self.height = height
        self._css = css
        self._inner: list[str] = []
        self._over: list[str] = []
        self._hits: list[str] = []

    def line(self, points: Iterable[Point], look: Look) -> None:
        """Draw a line from point to point."""
        dashes = f' stroke-dasharray="{look.dashes}"' if look.dashes else ""
        self._path(points, f'class="line {look.css}"{dashes}')

    def band(
        self, edges: Sequence[float], low: Sequence[float], high: Sequence[float], css: str
    ) -> None:
        """Fill between two values over each span between `edges`, if they differ."""
        steps = list(zip(pairwise(edges), low, high, strict=True))
        there = [n for n, (_, bottom, top) in enumerate(steps) if top > bottom]
        parts: list[str] = []
        begin = 0
        for n, where in enumerate(there):
            if n + 1 < len(there) and there[n + 1] == where + 1:
                continue
            stretch = [steps[at] for at in there[begin : n + 1]]
            upper = [p for (a, b), _, top in stretch for p in ((a, top), (b, top))]
            lower = [
                p for (a, b), bottom, _ in reversed(stretch) for p in ((b, bottom), (a, bottom))
            ]
            parts.append(self._d([*upper, *lower]) + "Z")
            begin = n + 1
        if parts:
            self._inner.append(f'<path class="{css}" d="{"".join(parts)}"/>')

    def bar(self, x: Point, y: Point, css: str, tip: str = "") -> None:
        """Draw a box from `x[0]` to `x[1]` and from `y[0]` to `y[1]`."""
        left, right = (self.x.at(value) for value in x)
        top, bottom = sorted(1 - self.y.at(value) for value in y)
        box = (
            f'<rect x="{percent(left)}" y="{percent(top)}" width="{percent(right - left)}" '
            f'height="{percent(bottom - top)}" class="'
        )
        self._over.append(f'{box}{css}"/>')
        if tip:
            self._hits.append(f'{box}hit"><title>{escape(tip)}</title></rect>')

    def mark(self, point: Point, look: Look, tip: str = "") -> None:
        """Draw a dot, with a tip if there is one."""
        x, y = percent(self.x.at(point[0])), percent(1 - self.y.at(point[1]))
        self._over.append(f'<use href="#{look.mark}" x="{x}" y="{y}" class="mark {look.css}"/>')
        if tip:
            title = f"<title>{escape(tip)}</title>"
            self._hits.append(f'<circle cx="{x}" cy="{y}" r="11" class="hit">{title}</circle>')

    def dots(self, points: Iterable[Point], look: Look) -> None:
        """Draw small dots without tips."""
        for x, y in points:
            place = f'cx="{percent(self.x.at(x))}" cy="{percent(1 - self.y.at(y))}"'
            self._over.append(f'<circle {place} r="2" class="seed {look.css}"/>')

    def over(self, x: Point, tip: str) -> None:
        """Set the tip of everything between two places of the x axis."""
        left, right = (min(1.0, max(0.0, self.x.at(value))) for value in x)
        self._hits.append(
            f'<rect x="{percent(left)}" width="{percent(right - left)}" height="100%" '
            f'class="hit"><title>{escape(tip)}</title></rect>'
        )

    def row(self, y: Point, tip: str) -> None:
        """Set the tip of everything between two places of the y axis."""
        top, bottom = sorted(1 - self.y.at(value) for value in y)
        self._hits.append(
            f'<rect y="{percent(top)}" width="100%" height="{percent(bottom - top)}" '
            f'class="hit"><title>{escape(tip)}</title></rect>'
        )

    def guide(self, text: str, *, y: float) -> None:
        """Draw a dotted line across, with its meaning."""
        at = percent(1 - self.y.at(y))
        offset = -5 if self.y.at(y) < 0.85 else 14
        self._over.append(f'<line class="guide" x2="100%" y1="{at}" y2="{at}"/>')
        self._over.append(
            f'<text class="note lx" x="100%" y="{at}" dy="{offset}">{escape(text)}</text>'
        )

    def diagonal(self, text: str) -> None:
        """Draw a dotted line through the points with two equal values, with its meaning."""
        end = min(self.x.high, self.y.high)
        self._path(((0.0, 0.0), (end, end)), 'class="outline guide"')
        x, y = percent(self.x.at(0.8 * end)), percent(1 - self.y.at(0.8 * end))
        on_the_left = self.x.at(end) > 0.6
        side = 'dx="-10" text-anchor="end"' if on_the_left else 'dx="12"'
        self._over.append(f'<text class="note" x="{x}" y="{y}" {side}>{escape(text)}</text>')

    def note(self, point: Point, text: str) -> None:
        """Write text that begins at a point."""
        x, y = percent(self.x.at(point[0])), percent(1 - self.y.at(point[1]))
        self._over.append(f'<text class="note" x="{x}" y="{y}" dy=".35em">{escape(text)}</text>')

    def nothing(self, text: str) -> None:
        """Write why nothing is drawn."""
        self._over.append(f'<text class="note tx" x="50%" y="50%">{escape(text)}</text>')

    def svg(
        self,
        key: str,
        title: str,
        description: str,
        *,
        x_label: str = "",
        y_names: Sequence[tuple[float, str]] | None = None,
    ) -> str:
        """Return the finished element.

        - `key` is an id that no other picture of the page has.
        - `title` and `description` say what it shows, for readers who can't see it.
        - `y_names` are texts beside the y axis, in place of its numbers.
        """
        inner = (
            f'<svg width="100%" height="100%" viewBox="0 0 {INNER_WIDTH} {self.height}" '
            f'preserveAspectRatio="none">{"".join(self._inner)}</svg>'
        )
        return (
            f'<svg class="plot {self._css}" height="{self.height}" role="img" '
            f'aria-labelledby="{key}-t" aria-describedby="{key}-d">'
            f'<title id="{key}-t">{escape(title)}</title>'
            f'<desc id="{key}-d">{escape(description)}</desc>'
            f"{self._axes(x_label, y_names)}{inner}{''.join(self._over)}"
            f'<g class="hits">{"".join(self._hits)}</g></svg>'
        )

    # -- parts

    def _path(self, points: Iterable[Point], attributes: str) -> None:
        d = self._d(points)
        if d:
            self._inner.append(f'<path {attributes} d="{d}"/>')

    def _d(self, points: Iterable[Point]) -> str:
        placed = [
            f"{number(self.x.at(x) * INNER_WIDTH)} {number((1 - self.y.at(y)) * self.height)}"
            for x, y in points
        ]
        return f"M{'L'.join(placed)}" if placed else ""

    def _axes(self, x_label: str, y_names: Sequence[tuple[float, str]] | None) -> str:
        drawn: list[str] = []
        for value, text in self.y.ticks() if y_names is None else y_names:
            at = percent(1 - self.y.at(value))
            if y_names is None:
                drawn.append(f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>')
            drawn.append(f'<text class="ty" x="-7" y="{at}" dy=".35em">{escape(text)}</text>')
        for value, text in self.x.ticks():
            at = percent(self.x.at(value))
            drawn.append(f'<line class="grid" x1="{at}" x2="{at}" y2="100%"/>')
            drawn.append(f'<text class="tx" x="{at}" y="100%" dy="16">{escape(text)}</text>')
        if x_label:
            label = escape(x_label)
            drawn.append(f'<text class="lx" x="100%" y="100%" dy="33">{label}</text>')
        drawn.append('<line class="axis" x2="100%" y1="100%" y2="100%"/>')
        return "".join(drawn)
