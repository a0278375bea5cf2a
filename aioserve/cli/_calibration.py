"""Measurement of the engine's steps: real requests run through a real engine, in mixes that cover
the grid of a cost table.

A step's time begins at the end of the step before, or at its own launch if that came later. It ends
with the step, as the engine's own loop observes it. So the time includes all that the engine does
for a step, such as planning and delivering, except what the runner hides. The time of a request
before its first step and after its last is measured by `measure_host`, with one request at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from aioserve.cli._engine import Listeners, start_bars
from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli._models import local_model
from aioserve.errors import ConfigError, EngineError
from aioserve.request import SamplingParams
from aioserve.simulation.calibration import StepSample
from aioserve.simulation.cost import HostTimes, StepLoad

if TYPE_CHECKING:
    from aioserve import Engine
    from aioserve.config import EngineConfig
    from aioserve.execution.runner import LoadedModel
    from aioserve.execution.timed_runner import TimedStep

__all__ = [
    "MOST_CONTEXT_TOKENS",
    "MOST_PROMPTS",
    "Grid",
    "Recorder",
    "Round",
    "measure_grid",
    "measure_host",
    "measure_mixes",
    "recorded_engine",
]

LEAST_PREFILL = 16
"""Smallest prompt of a grid, in tokens."""
SHORTEST_PREFILL = 2
"""Shortest prompt of all: one token is computed as a decode is."""

OnProgress = Callable[[], None]

MIDDLE_CONTEXT = 1024
MOST_CONTEXT_TOKENS = 1 << 15
"""Most context of all decoding sequences together, in tokens: their prompts have to be computed
first.
"""
MOST_PROMPTS = 8
"""Prompts sent at once if one alone can't be as long as a step."""

LONE_REQUESTS = 32
LONE_PROMPT = 64
SHORT_PAUSE_SECONDS = 0.002
"""Pause in which the request before finishes its last work."""
IDLE_SECONDS = 0.03
"""Pause after which a processor has turned to other work, or gone idle."""
COMING = 2
"""Requests that arrive while one step runs."""
DELAY_PAIRS = 16
DELAYED_STEP_SECONDS = 0.01

STEPS_BETWEEN = 5
"""Tokens of the answer to each prompt of the grid: most steps have no request that comes or
goes.
"""


class Round(NamedTuple):
    """Measurement of `decode_batch` decoding sequences while prompts of all sizes come. Each
    sequence decodes from `context_tokens` on.
    """

    decode_batch: int
    context_tokens: int


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Mixes of prompt tokens and decoding sequences to measure, and their contexts."""

    prefill_tokens: tuple[int, ...]
    """Sizes of prompts, from 0."""
    decode_batch: tuple[int, ...]
    """Numbers of decoding sequences, from 0."""
    rounds: tuple[Round, ...]
    longest_prompt: int
    """Most tokens of one prompt; more are split into several prompts that come at once."""

    @classmethod
    def up_to(
        cls,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        graphs: bool = False,
        most_context_tokens: int = MOST_CONTEXT_TOKENS,
    ) -> Grid:
        """Return a grid of powers of two, up to what one step of the engine may hold.

        Each batch decodes at a short and a middle context. The smallest and the largest batch also
        decode at the longest context, limited by `most_context_tokens` of all sequences together.

        Set `graphs` if decodes run as CUDA graphs and steps with a prompt don't. A step's time then
        leaps with the first tokens of a prompt. The shortest prompts are measured too, or the leap
        would look like a slope.

        Raises `ConfigError` if the limits leave points of the grid out of reach.
        """
        if max_num_batched_tokens < LEAST_PREFILL:
            raise ConfigError(
                f"max_num_batched_tokens must be at least {LEAST_PREFILL} to be measured, "
                f"got {max_num_batched_tokens}"
            )
        if max_model_len < 2 * LEAST_PREFILL + 1:
            raise ConfigError(
                f"max_model_len must be at least {2 * LEAST_PREFILL + 1} to be measured, "
                f"got {max_model_len}"
            )
        longest_prompt = max_model_len - STEPS_BETWEEN - 1
        most = min(max_num_batched_tokens, MOST_PROMPTS * longest_prompt)
        shortest = (SHORTEST_PREFILL,) if graphs else ()
        prefill = (0, *shortest, *_growing(LEAST_PREFILL, most, 2))
        # The last point is measured by steps between it and the point before, on both axes.
        room = max_num_batched_tokens - prefill[-2]
        if not 1 <= max_num_seqs < room:
            raise ConfigError(
                f"max_num_seqs must be in [1, {room - 1}], so that as many sequences decode beside "
                f"prompts of all sizes in one step of max_num_batched_tokens = "
                f"{max_num_batched_tokens}, got {max_num_seqs}"
            )
        batches = (0, *_growing(1, max_num_seqs, 2))
        # The sequences go on decoding while the prompts come.
        steps = 2 * len(prefill) * (STEPS_BETWEEN + 2)
        longest = max(max_model_len // 2, max_model_len - steps)
        middle = min(MIDDLE_CONTEXT, longest, max(1, most_context_tokens // max_num_seqs))
        rounds = [Round(batch, n) for batch in batches for n in (min(16, middle), middle)]
        rounds += [Round(n, min(longest, most_context_tokens // n)) for n in (1, max_num_seqs)]
        return cls(
            prefill_tokens=prefill,
            decode_batch=batches,
            rounds=tuple(dict.fromkeys(rounds)),
            longest_prompt=longest_prompt,
        )

    @property
    def num_rounds(self) -> int:
        """Rounds of one pass of `measure_grid`."""
        return len(self.rounds)


class Recorder:
    """Loads a model for an engine, and records every step that it runs."""

    def __init__(self, model: str, listeners: Listeners) -> None:
        self.samples: list[StepSample] = []
        self.last: TimedStep | None = None
        self._model = model
        self._listeners = listeners

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        from aioserve.execution import loading
        from aioserve.execution.timed_runner import TimedRunner

        loaded = await loading.load(
            self._model, config, num_slots=num_slots, **self._listeners._asdict()
        )
        return msgspec.structs.replace(loaded, runner=TimedRunner(loaded.runner, self._note))

    def _note(self, step: TimedStep) -> None:
        self.last = step
        self.samples.append(StepSample(StepLoad.of(step.plan), step.seconds))

    def take(self) -> list[StepSample]:
        """Return the steps since the last call."""
        taken = list(self.samples)
        self.samples.clear()
        return taken


@asynccontextmanager
async def recorded_engine(model: str, **options: Any) -> AsyncIterator[tuple[Engine, Recorder]]:
    """Start an engine whose steps are recorded; `model` and `options` are those of `open_engine`.

    It has already run one request, which paid for what is built once.
    """
    from aioserve import Engine

    path = local_model(model)
    with leaving_at_once(), start_bars(model) as listeners:
        recorder = Recorder(path, listeners)
        engine = Engine(recorder, **options)
        await engine.__aenter__()
    async with _leaving(engine):
        await _answer(engine, [0] * (engine.limits.max_model_len // 2), 4)
        recorder.take()
        yield engine, recorder


@asynccontextmanager
async def _leaving(engine: Engine) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await engine.__aexit__(None, None, None)


async def measure_grid(engine: Engine, grid: Grid, seed: int, on_progress: OnProgress) -> None:
    """Measure the grid once, in an order drawn from `seed`.

    For each batch and context, sequences decode while prompts of all sizes come one by one. Some of
    the prompts begin with cached tokens. Calls `on_progress` after each of `grid.num_rounds`
    rounds.
    """
    source = np.random.default_rng(seed)
    vocab_size = engine.limits.vocab_size
    # All rounds use the same prompts, so that their keys and values are computed once.
    shape = max(1, *grid.decode_batch), max(context for _, context in grid.rounds)
    prompts = np.random.default_rng(0).integers(vocab_size, size=shape)
    for batch, context in source.permutation(grid.rounds).tolist():
        starts = [(start, size) for start in (0, context) for size in grid.prefill_tokens[1:]]
        async with _decoding(engine, prompts[:batch, :context].tolist()):
            for start, size in source.permutation(starts).tolist():
                # Take as much of the cached tokens as leaves room for the new ones.
                cached = prompts[0, : min(start, max(0, grid.longest_prompt - size))].tolist()
                parts = _parts(size, grid.longest_prompt)
                await _answer_all(
                    engine,
                    [cached + source.integers(vocab_size, size=part).tolist() for part in parts],
                    STEPS_BETWEEN if len(parts) == 1 else 1,
                )
        on_progress()


def _parts(size: int, most: int) -> list[int]:
    """Split `size` into about equal parts of at most `most`."""
    count = -(-size // most)
    return [size // count + (number < size % count) for number in range(count)]


@asynccontextmanager
async def _decoding(engine: Engine, prompts: Sequence[list[int]]) -> AsyncIterator[None]:
    """Let requests decode during the block. They decode when it begins, and are ended after it."""
    longest = engine.limits.max_model_len
    streams = [engine.stream(prompt, _params(longest - len(prompt))) for prompt in prompts]

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    for stream in streams:
        await stream.started()
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        yield
    finally:
        for stream in streams:
            stream.close()
        await asyncio.gather(*readers)


async def measure_host(engine: Engine, recorder: Recorder, seed: int) -> HostTimes:
    """Measure what requests take outside steps, and what they add to steps.

    Medians of requests of one step, while nothing else runs. Added times are those of a step after
    an idle time, and of a step during which requests arrive.
    """
    source = np.random.default_rng(seed)
    longest = engine.limits.max_model_len - 1
    lone = [
        [
            await _lone(engine, recorder, source, min(LONE_PROMPT, longest), pause)
            for pause in (SHORT_PAUSE_SECONDS, IDLE_SECONDS)
        ]
        for _ in range(LONE_REQUESTS)
    ]
    before, steps, after = (
        median(getattr(warm, name) for warm, _ in lone) for name in _Lone._fields
    )
    return HostTimes(
        before,
        after,
        step_delay_seconds=await _step_delay(engine, recorder, source, steps),
        wake_seconds=max(0.0, median(sum(idle) - sum(warm) for warm, idle in lone)),
    )


class _Lone(NamedTuple):
    """Seconds of one request of one step."""

    before: float
    step: float
    after: float


async def _lone(
    engine: Engine, recorder: Recorder, source: np.random.Generator, length: int, pause: float
) -> _Lone:
    prompt = source.integers(engine.limits.vocab_size, size=length).tolist()
    await asyncio.sleep(pause)
    came = time.perf_counter()
    async for _ in engine.stream(prompt, _params(1)):
        answered = time.perf_counter()
        if (step := recorder.last) is not None:
            return _Lone(step.began - came, step.seconds, answered - step.ended)
    raise EngineError("a request of one token was answered with none")


async def _step_delay(
    engine: Engine, recorder: Recorder, source: np.random.Generator, lone_seconds: float
) -> float:
    """Measure the seconds that a request adds to a step by arriving during it; at least 0.

    The step computes a prompt while a few requests arrive one by one. It is compared with steps of
    the same prompt alone, in turns, and the median counts. Parameter `lone_seconds` is the time of
    a step of `LONE_PROMPT` tokens. The prompt is long enough for a step of `DELAYED_STEP_SECONDS`,
    or as long as one step allows.
    """
    vocab_size, longest = engine.limits.vocab_size, engine.limits.max_model_len - 1
    budget = engine.dump()["config"]["max_num_batched_tokens"]
    wanted = math.ceil(LONE_PROMPT * max(1.0, DELAYED_STEP_SECONDS / max(lone_seconds, 1e-6)))
    length = min(longest, budget, wanted)

    async def step_seconds(coming: int, apart: float) -> float:
        prompts = [
            source.integers(vocab_size, size=min(size, longest)).tolist()
            for size in (length, *[LONE_PROMPT] * coming)
        ]
        await asyncio.sleep(SHORT_PAUSE_SECONDS)
        recorder.take()
        streams = [engine.stream(prompts[0], _params(1))]
        for prompt in prompts[1:]:
            await asyncio.sleep(apart)
            streams.append(engine.stream(prompt, _params(1)))
        for stream in streams:
            async for _ in stream:
                pass
        return recorder.take()[0].seconds

    more = []
    for _ in range(DELAY_PAIRS):
        alone = await step_seconds(0, 0.0)
        more.append(await step_seconds(COMING, alone / (COMING + 2)) - alone)
    return max(0.0, median(more) / COMING)


async def measure_mixes(
    engine: Engine, num_requests: int, concurrency: int, seed: int, on_progress: OnProgress
) -> None:
    """Run random requests, `concurrency` at once, so that steps are mixed as they come.

    Calls `on_progress` after each request.
    """
    source = np.random.default_rng(seed)
    limits = engine.limits
    lengths = 2 ** source.uniform(2, math.log2(limits.max_model_len // 2), num_requests)
    outputs = source.integers(1, min(64, limits.max_model_len // 2), num_requests)
    queue = zip(lengths.astype(int), outputs.tolist(), strict=True)

    async def worker() -> None:
        for length, output in queue:
            await _answer(engine, source.integers(limits.vocab_size, size=length).tolist(), output)
            on_progress()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


async def _answer(engine: Engine, prompt: list[int], output_tokens: int) -> None:
    await _answer_all(engine, [prompt], output_tokens)


async def _answer_all(engine: Engine, prompts: list[list[int]], output_tokens: int) -> None:
    """Read the completions of prompts that come at the same moment."""
    # Submit all requests before the first step is planned.
    streams = [engine.stream(prompt, _params(output_tokens)) for prompt in prompts]
    for stream in streams:
        async for _ in stream:
            pass


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return `first`, then each value times `factor`, and `last`."""
    counts = itertools.takewhile(
        lambda count: count * factor <= last,
        (first * factor**power for power in itertools.count()),
    )
    return (*counts, last)
