"""Charts as inline SVG: one look, text that stays text, lines in the colour of the page's text.

The only module of the report that knows matplotlib's ways of writing files.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "Look", "chart_style", "look_of", "new_figure", "plain_numbers", "to_svg"]

INK = "#0b0c0d"
"""Drawn in this colour, a thing takes that of the page's text: light pages and dark ones."""

# Okabe and Ito, "Color Universal Design" (2008), without black and yellow, which are lost on one of
# the two backgrounds.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2))
MARKERS = ("o", "s", "D", "^", "v")
POINTS_PER_INCH = 72
FONT = "'DejaVu Sans'"
"""Measured with this, shown in the page's."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "path.simplify_threshold": 0.3,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "grid.color"), INK
    ),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


class Look(msgspec.Struct, frozen=True):
    """How one policy's lines are drawn."""

    color: str
    dashes: tuple[float, ...]
    """Lengths on and off in points; none for a solid line."""
    marker: str
    """Matplotlib's name of the shape of dots."""

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line in matplotlib."""
        return {"color": self.color, "linestyle": (0, self.dashes) if self.dashes else "solid"}


def look_of(index: int) -> Look:
    """The looks differ in colour and, for those who see no colours, in dashes and shapes."""
    return Look(
        COLORS[index % len(COLORS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    )


@contextmanager
def chart_style() -> Iterator[None]:
    """Within it, new figures have this module's look."""
    import matplotlib

    with matplotlib.rc_context(rc=STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many points, that belongs to no window."""
    from matplotlib.figure import Figure

    inches = (width / POINTS_PER_INCH, height / POINTS_PER_INCH)
    return Figure(figsize=inches, layout="constrained")


def plain_numbers(axes: Axes, axis: str) -> None:
    """Write the ticks of a logarithmic axis as 0.5, 20, 1,000 at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    chosen = axes.xaxis if axis == "x" else axes.yaxis
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    chosen.set_major_locator(LogLocator(subs=subs, numticks=12))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    chosen.set_minor_formatter(NullFormatter())


def to_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an `<svg>` element to stand in a page. The same figure gives the same text.

    name: unlike that of any other chart on the page.
    label: what it shows, for those who can't see it.
    """
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue()
    text = text[text.index("<svg") :]
    for unwanted in (r"<metadata>.*?</metadata>\s*", r"<!--.*?-->\s*", r"<style.*?</style>\s*"):
        text = re.sub(unwanted, "", text, flags=re.DOTALL)
    width = figure.get_figwidth() * POINTS_PER_INCH
    opening = (
        f'<svg role="img" aria-label="{escape(label)}" style="max-width: {width:.0f}pt" '
        f'viewBox="{_viewbox(text)}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    text = text.replace(INK, "currentColor").replace(f"font-family: {FONT}, sans-serif; ", "")
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(?<=\d\.\d\d)\d+", "", tag[0]), text)
    return _without_idle_ids(text)


def _viewbox(text: str) -> str:
    found = re.search(r'viewBox="([^"]+)"', text)
    return "" if found is None else found[1]


def _without_idle_ids(text: str) -> str:
    """Ids that nothing refers to would come again in the next chart."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
