"""A bar on a terminal: how much of some work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aioserve.arguments import counted

__all__ = ["OnProgress", "OnTokens", "bar_on_terminal", "token_bar_on_terminal"]

OnProgress = Callable[[int, int], None]
"""Is called with how much is done, and how much there is."""
OnTokens = Callable[[int, float, int, float], None]
"""Is called with how many are done, these and the parts of others that are known to be done, the
tokens of all, and the seconds that passed."""


@contextmanager
def bar_on_terminal(name: str, total: int | None = None) -> Iterator[OnProgress | None]:
    """A callback `(done, total)` that draws; None where stderr is no terminal. `total`: how much
    there is, if that is known before."""
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
        task = bar.add_task(name, total=total)
        shown = -1

        def update(done: int, total: int) -> None:
            nonlocal shown
            if done != shown:
                shown = done
                bar.update(task, completed=done, total=total)

        yield update


@contextmanager
def token_bar_on_terminal(name: str, total: int) -> Iterator[OnTokens | None]:
    """A bar for `total` completions, drawn at once, with their tokens and tokens per second; None
    where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[counts]}", markup=False),
        TimeElapsedColumn(),
    )
    # Drawing is for a thread of rich's: a terminal that takes nothing must not hold the loop.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total, counts=f"0/{total}")

        def update(done: int, share: float, tokens: int, seconds: float) -> None:
            rate = f" · {tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""
            counts = f"{done}/{total} · {counted(tokens, 'token', form=',')}{rate}"
            bar.update(task, completed=share, counts=counts)

        yield update
