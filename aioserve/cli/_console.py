"""Console output on which text of files, servers and models can't control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from aioserve.cli._printable import printable

__all__ = ["plain_console"]


class _PlainConsole(Console):
    """Writes control characters of what it prints as Python escapes."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def plain_console(**options: Any) -> Console:
    """Return a console on stdout that reads no markup. `options` are those of rich."""
    return _PlainConsole(file=sys.stdout, markup=False, **options)
