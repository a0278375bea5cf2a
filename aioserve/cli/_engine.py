"""What verbs that run a model share: opening the engine with a progress bar, building a prompt.

Everything heavy is imported inside the functions, so that a verb's `--help` stays cheap.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli.random_models import model_or_random

if TYPE_CHECKING:
    from aioserve import Engine, SamplingParams
    from aioserve.request import Timings, Usage

__all__ = ["loading_bar", "open_engine", "sampling_params", "summary_line"]


@asynccontextmanager
async def open_engine(model: str, **options: Any) -> AsyncIterator[Engine]:
    """A started engine; while it loads, a bar on stderr when that is a terminal.

    `model` may also be a `random:SHAPE`, see `random_models.py`.
    """
    from aioserve import Engine

    path = model_or_random(model)
    async with AsyncExitStack() as stack:
        with leaving_at_once(), loading_bar(model) as progress:
            engine = Engine(path, progress=progress, **options)
            await stack.enter_async_context(engine)
        yield engine


@contextmanager
def loading_bar(model: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback `(done, total)` drawing on stderr; None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {model}", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def sampling_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own defaults with the options that were given in their place."""
    from msgspec.structs import replace

    return replace(engine.default_params, **given)


def summary_line(usage: Usage, timings: Timings, reason: object) -> str:
    """Counts and speed of one answer; tokens/s is the rate after the first token."""
    parts = [f"{usage.prompt_tokens} prompt tokens", f"{usage.completion_tokens} output tokens"]
    if timings.first_token_seconds is not None:
        parts.append(f"first token {timings.first_token_seconds * 1000:.0f} ms")
    if timings.seconds_per_output_token:
        parts.append(f"{1 / timings.seconds_per_output_token:.1f} tokens/s")
    return f"[{' · '.join(parts)} · {reason}]"
