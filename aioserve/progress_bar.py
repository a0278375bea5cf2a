"""A bar on a terminal: how much of some work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["OnProgress", "bar_on_terminal"]

OnProgress = Callable[[int, int], None]
"""Is called with how much is done, and how much there is."""


@contextmanager
def bar_on_terminal(name: str) -> Iterator[OnProgress | None]:
    """A callback `(done, total)` that draws; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        shown = -1

        def update(done: int, total: int) -> None:
            nonlocal shown
            if done != shown:
                shown = done
                bar.update(task, completed=done, total=total)

        yield update
