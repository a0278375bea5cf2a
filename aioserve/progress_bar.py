"""Progress bars on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aioserve.arguments import counted

__all__ = ["OnProgress", "OnTokens", "bar_on_terminal", "token_bar_on_terminal"]

OnProgress = Callable[[int, int], None]
"""Called with the amount done and the total."""
OnTokens = Callable[[int, float, int, float], None]
"""Called with the completions done, the same with parts of unfinished ones, the tokens of all, and
the seconds that passed.
"""


@contextmanager
def bar_on_terminal(name: str, total: int | None = None) -> Iterator[OnProgress | None]:
    """Draw a bar; yields the callback `(done, total)` that updates it, or None if stderr is no
    terminal.

    `total` is the amount of work, if it is known before.
    """
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
    """Draw a bar for `total` completions with their tokens and tokens per second.

    Yields its callback, or None if stderr is no terminal.
    """
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
    # A thread of rich's draws: a terminal that takes nothing must not hold the loop.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total, counts=f"0/{total}")

        def update(done: int, share: float, tokens: int, seconds: float) -> None:
            rate = f" · {tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""
            counts = f"{done}/{total} · {counted(tokens, 'token', form=',')}{rate}"
            bar.update(task, completed=share, counts=counts)

        yield update
