"""What verbs that run a model share: opening the engine with progress bars, building a prompt.

Everything heavy is imported inside the functions, so that a verb's `--help` stays cheap.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.arguments import counted
from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli._models import local_model

if TYPE_CHECKING:
    from aioserve import Engine, SamplingParams, SchedulingPolicy
    from aioserve.request import Timings, Usage

__all__ = [
    "Listeners",
    "Start",
    "chosen_policy",
    "open_engine",
    "print_start",
    "sampling_params",
    "start_bars",
    "summary_line",
]


class Start(NamedTuple):
    """What it took to open an engine, by the clock."""

    seconds: float
    parts: dict[str, float]
    """Some run at the same time."""

    def __str__(self) -> str:
        parts = (f"{part} {seconds:.2f} s" for part, seconds in self.parts.items())
        return f"start {self.seconds:.2f} s: {', '.join(parts)}"


class Listeners(NamedTuple):
    """The options of `Engine` through which it tells how far it has come. None: without a
    terminal."""

    progress: Callable[[int, int], None] | None = None
    capture_progress: Callable[[int, int], None] | None = None


def chosen_policy(text: str) -> str | SchedulingPolicy:
    """What an engine takes for a `--policy`: a name as it is, and of a class of a file an object.

    To be called where no event loop runs, as the file may run one. Raises as `policy_of_file`.
    """
    from aioserve.plugins.files import policy_of_file

    make = policy_of_file(text)
    return text if make is None else make()


@asynccontextmanager
async def open_engine(
    model: str, *, on_start: Callable[[Start], None] | None = None, **options: Any
) -> AsyncIterator[Engine]:
    """A started engine; while it starts, bars on stderr when that is a terminal.

    `model` is what `local_model` takes. `on_start` is told what the start took, without the writing
    or the download of a model.
    """
    from aioserve import Engine

    path = local_model(model)
    async with AsyncExitStack() as stack:
        with leaving_at_once(), start_bars(model) as listeners:
            engine = Engine(path, **listeners._asdict(), **options)
            began = time.perf_counter()
            await stack.enter_async_context(engine)
            seconds = time.perf_counter() - began
        if on_start is not None:
            on_start(Start(seconds, engine.dump()["model"]["loading_seconds"]))
        yield engine


@contextmanager
def start_bars(model: str) -> Iterator[Listeners]:
    """Listeners that draw on stderr, where that is a terminal: a bar for the weights, and one for
    the graphs where there are any."""
    if not sys.stderr.isatty():
        yield Listeners()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        loading = bars.add_task(f"loading {model}", total=None)
        capturing = bars.add_task("capturing graphs", start=False, visible=False)

        def loaded(done: int, total: int) -> None:
            bars.update(loading, completed=done, total=total)

        def captured(done: int, total: int) -> None:
            if done == 0:
                bars.start_task(capturing)
            description = f"capturing graphs, {done} of {total}"
            bars.update(
                capturing, description=description, completed=done, total=total, visible=True
            )

        yield Listeners(loaded, captured)


def print_start(start: Start) -> None:
    print(f"[{start}]", file=sys.stderr, flush=True)


def sampling_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own defaults with the options that were given in their place."""
    from msgspec.structs import replace

    return replace(engine.default_params, **given)


def summary_line(usage: Usage, timings: Timings, reason: object) -> str:
    """Counts and speed of one answer; tokens/s is the rate after the first token."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"{counted(usage.prompt_tokens, 'prompt token')}{cached}",
        counted(usage.completion_tokens, "output token"),
    ]
    if timings.first_token_seconds is not None:
        parts.append(f"first token {timings.first_token_seconds * 1000:.0f} ms")
    if timings.seconds_per_output_token:
        parts.append(f"{1 / timings.seconds_per_output_token:.1f} tokens/s")
    return f"[{' · '.join(parts)} · {reason}]"
