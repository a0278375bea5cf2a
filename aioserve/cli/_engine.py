"""Engines of verbs that run a model: where they compute, opening them with progress bars, sampling.

Everything heavy is imported inside the functions, so that a verb's `--help` stays cheap.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from msgspec.structs import replace

from aioserve.arguments import counted
from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli._models import local_model
from aioserve.config import Speculation
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.request import SamplingParams, Usage
from aioserve.timings import Timings

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = [
    "DeviceOptions",
    "Listeners",
    "Opening",
    "RunOptions",
    "Start",
    "frozen_heap",
    "given_params",
    "open_engine",
    "opening",
    "print_start",
    "start_bars",
    "summary_line",
]

SIZES = re.compile(r"[0-9]{1,20}(,[0-9]{1,20})*")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Where the model runs, as what, and in how many bits."""

    device: str = "auto"
    """cpu; cuda, an NVIDIA GPU, or cuda:1, the second one; auto: the first GPU that can be used,
    else the CPU."""
    architecture: str | None = None
    """What a model is computed as whose own architecture isn't supported: llama, where it differs
    from Llama in nothing but its name."""
    quantization: str | None = None
    """Round the weights of linear layers while they are loaded: int8, int4 or fp8."""
    activation_quantization: str = "auto"
    """In which numbers activations meet weights of integers: auto, what the backend computes, on a
    CPU integers of 8 bits; none, floats, which takes the memory of float weights."""
    graph_sizes: str | None = None
    """On a GPU: numbers of sequences at which decodes are captured as CUDA graphs, as 1,2,4; none
    for no graphs."""
    capture_graphs: Annotated[bool, Parameter(negative="--no-capture-graphs")] = True
    """On a GPU: capture them at the start, or each when it is first needed."""

    def of_engine(self) -> dict[str, Any]:
        """Options of `Engine`, which checks them. Raises `ConfigError` for sizes that are none."""
        return {
            "device": self.device,
            "architecture": self.architecture,
            "quantization": self.quantization,
            "activation_quantization": self.activation_quantization,
            "graph_sizes": _sizes(self.graph_sizes),
            "capture_graphs": self.capture_graphs,
        }


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(DeviceOptions):
    """The device of the model, and the drafter of its tokens."""

    speculation: str | None = None
    """The drafter, or one with options: NAME:OPTION=VALUE,OPTION=VALUE; or a
    class of yours as FILE.py:CLASS. The tokens are the same with any."""
    speculation_max_tokens: int | None = None
    """Most draft tokens of a sequence in one step; 8 when not given."""
    speculation_acceptance: str | None = None
    """Rule by which draft tokens are kept; match when not given, and the tokens are the same as
    without any. rejection: as many of a draft model's as rejection sampling keeps."""
    speculation_max_branches: int | None = None
    """Most paths of draft tokens beside the first one of a sequence in one step; 0 when not
    given."""

    def of_engine(self) -> dict[str, Any]:
        """Options of the engine, with those of speculation (`DeviceOptions.of_engine`).

        Raises `ConfigError` for a number of draft tokens that is none, or that nothing makes.
        """
        try:
            speculation = Speculation.of(
                self.speculation,
                max_tokens=self.speculation_max_tokens,
                acceptance=self.speculation_acceptance,
                max_branches=self.speculation_max_branches,
            )
        except ConfigError as error:
            argument = str(error.argument).replace("_", "-")
            flag = "" if argument == "drafter" else f"-{argument}"
            raise ConfigError(
                f"--speculation{flag}: {error}",
                argument=error.argument,
                value=error.value,
                limit=error.limit,
            ) from error
        # A dataclass with slots is made anew, and `super()` knows the old one.
        return DeviceOptions.of_engine(self) | {"speculation": speculation}


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "none":
        return ()
    if not SIZES.fullmatch(text):
        raise ConfigError(
            f"graph_sizes must be whole numbers with commas between them, such as 1,2,4, or none; "
            f"got {shown(text)}",
            argument="graph_sizes",
            value=text,
        )
    return tuple(map(int, text.split(",")))


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


class Opening(NamedTuple):
    """An engine for `run` and `chat`, not opened yet, and how its completions are sampled."""

    model: str
    engine: AbstractAsyncContextManager[Engine]
    given: dict[str, Any]
    """Sampling parameters that were given, in place of the model's own."""

    def params(self, engine: Engine) -> SamplingParams:
        return replace(engine.default_params, **self.given)


def given_params(**params: Any) -> dict[str, Any]:
    """Parameters that were given. A value out of range is refused before the model is loaded."""
    given = {name: value for name, value in params.items() if value is not None}
    SamplingParams(**given)
    return given


def opening(
    model: str,
    given: dict[str, Any],
    on: RunOptions | None,
    chat_template: str | None,
    verbose: bool,
) -> Opening:
    engine = open_engine(
        model,
        on_start=print_start if verbose else None,
        chat_template=chat_template,
        **(on or RunOptions()).of_engine(),
    )
    return Opening(model, engine, given)


def summary_line(usage: Usage, timings: Timings, reason: object) -> str:
    """Counts and speed of one answer; tokens/s is the rate after the first token."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    drafted = f"{usage.accepted_draft_tokens} of {counted(usage.drafted_tokens, 'draft token')}"
    right = f" ({drafted} right)" if usage.drafted_tokens else ""
    parts = [
        f"{counted(usage.prompt_tokens, 'prompt token')}{cached}",
        f"{counted(usage.completion_tokens, 'output token')}{right}",
    ]
    if timings.first_token_seconds is not None:
        parts.append(f"first token {timings.first_token_seconds * 1000:.0f} ms")
    if timings.seconds_per_output_token:
        parts.append(f"{1 / timings.seconds_per_output_token:.1f} tokens/s")
    return f"[{' · '.join(parts)} · {reason}]"


@contextmanager
def frozen_heap() -> Iterator[None]:
    """While entered, the collector doesn't look at what is there now, torch above all: a pass over
    that takes a tenth of a second and more, in which the event loop stands still. For a process of
    the command's own: a library must leave the collector to its host, as it is the whole process's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
