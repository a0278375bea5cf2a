"""Engines of verbs that run a model: device options, opening with progress bars, sampling.

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
    """Options for the device and the numbers that a model is computed with."""

    device: str = "auto"
    """Device of the model: cpu; cuda, an NVIDIA GPU; or cuda:1, the second one. With auto, the
    first GPU that can be used, else the CPU.
    """
    architecture: str | None = None
    """Architecture that stands in for an unsupported one: llama, if the model differs from
    Llama only in its name.
    """
    quantization: str | None = None
    """Quantise the weights of linear layers while they are loaded: int8, int4 or fp8."""
    activation_quantization: str = "auto"
    """Numbers in which activations meet integer weights. With auto, what the backend computes: on a
    CPU 8-bit integers. With none, floats.
    """
    graph_sizes: str | None = None
    """Batch sizes, in sequences, at which decodes are captured as CUDA graphs, on a GPU: 1,2,4,
    say, or none for no graphs.
    """
    capture_graphs: Annotated[bool, Parameter(negative="--no-capture-graphs")] = True
    """Capture CUDA graphs at the start, on a GPU. Else each is captured when it is first needed."""

    def of_engine(self) -> dict[str, Any]:
        """Return options of `Engine`, which checks them. Raises `ConfigError` for malformed
        sizes.
        """
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
    """Options for the device of the model and the drafter."""

    speculation: str | None = None
    """Drafter, with options if you like: NAME:OPTION=VALUE,OPTION=VALUE. Or a class of yours:
    FILE.py:CLASS. The tokens are the same with any.
    """
    speculation_max_tokens: int | None = None
    """Most draft tokens of a sequence in one step; 8 when not given."""
    speculation_acceptance: str | None = None
    """Rule by which draft tokens are kept. When not given, match: the tokens are the same as
    without drafts. With rejection, as many tokens of a draft model as rejection sampling keeps.
    """
    speculation_max_branches: int | None = None
    """Most further paths of draft tokens of a sequence in one step, beside the first; 0 when not
    given.
    """

    def of_engine(self) -> dict[str, Any]:
        """Return options of the engine, those of speculation included (`DeviceOptions.of_engine`).

        Raises `ConfigError` for an invalid number of draft tokens, or for one without a drafter.
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
        # A dataclass with slots is a new class, and `super()` refers to the old one.
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
    """Time that opening an engine took, by the clock."""

    seconds: float
    parts: dict[str, float]
    """Seconds of each part; some run at the same time."""

    def __str__(self) -> str:
        parts = (f"{part} {seconds:.2f} s" for part, seconds in self.parts.items())
        return f"start {self.seconds:.2f} s: {', '.join(parts)}"


class Listeners(NamedTuple):
    """Progress callbacks of `Engine`; None without a terminal."""

    progress: Callable[[int, int], None] | None = None
    capture_progress: Callable[[int, int], None] | None = None


@asynccontextmanager
async def open_engine(
    model: str, *, on_start: Callable[[Start], None] | None = None, **options: Any
) -> AsyncIterator[Engine]:
    """Open an engine. While it starts, bars are drawn on stderr if that is a terminal.

    `model` is what `local_model` takes. `on_start` receives the time of the start, without writing
    or downloading a model.
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
    """Yield listeners that draw on stderr if it is a terminal: bars for the weights and for the
    graphs.
    """
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
    """An engine for `run` and `chat`, not opened yet, and the sampling of its completions."""

    model: str
    engine: AbstractAsyncContextManager[Engine]
    given: dict[str, Any]
    """Sampling parameters that replace the model's own."""

    def params(self, engine: Engine) -> SamplingParams:
        return replace(engine.default_params, **self.given)


def given_params(**params: Any) -> dict[str, Any]:
    """Return the parameters that aren't None. A value out of range is refused before the model is
    loaded.
    """
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
    """Return counts and speed of one answer; tokens/s is the rate after the first token."""
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
    """Keep the garbage collector from looking at objects that exist when the block begins.

    Torch brings so many that a pass takes a tenth of a second and more, during which the event loop
    stands still. Use it in a process of the command's own: a library must leave the collector to
    its host process.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
