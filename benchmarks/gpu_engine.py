"""Engine of aioserve that is watched while it serves: its requests, steps, device and event loop.

The device's time comes from events around each step (`CudaRunner.time_steps`). Without a GPU it is
the time at which the event loop learned of steps. The least time of steps comes from measured
limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gpu_workloads import Request

from aioserve import Engine, EngineStats, SamplingParams
from aioserve.cli._load import LoopLag, figures, host_share
from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.timing import StepTime
from aioserve.execution.runner import LoadedModel, ModelSource, Runner
from aioserve.execution.timed_runner import TimedRunner, TimedStep
from aioserve.request import Usage
from aioserve.simulation.roofline import RooflineCost
from aioserve.timings import Timings

__all__ = ["WatchedEngine", "WatchedModel", "served", "watched_engine"]


class WatchedModel:
    """Loads a model for an engine, by `source` if that is given, and records the times of its
    steps.
    """

    def __init__(self, path: Path, source: ModelSource | None = None) -> None:
        self.steps: list[TimedStep] = []
        self.times: list[StepTime] | None = None
        """Times of the device for the same steps; None if nothing times them."""
        self._path = path
        self._source = source
        self._runner: Runner | None = None

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        if self._source is None:
            loaded = await loading.load(str(self._path), config, num_slots=num_slots)
        else:
            loaded = await self._source.load(config, num_slots=num_slots)
        self._runner = loaded.runner
        return msgspec.structs.replace(loaded, runner=TimedRunner(loaded.runner, self.steps.append))

    def begin(self) -> None:
        """Record from here on. No step may be in flight."""
        self.steps.clear()
        self.times = self._runner.time_steps() if isinstance(self._runner, CudaRunner) else None


class WatchedEngine:
    """Started engine; `run` measures it."""

    def __init__(self, engine: Engine, model: WatchedModel, cost: RooflineCost | None) -> None:
        self.engine = engine
        self._model = model
        self._cost = cost

    @property
    def vocab_size(self) -> int:
        return self.engine.limits.vocab_size

    async def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Serve the requests, each sent when it is due; return the results, ready for JSON."""
        engine, model = self.engine, self._model
        await at_rest(engine)
        before = engine.stats()
        model.begin()
        async with LoopLag() as lag:
            began = time.perf_counter()
            answers = await served(engine, requests)
            seconds = time.perf_counter() - began
        await at_rest(engine)
        after = engine.stats()
        return {
            "seconds": seconds,
            **figures(answers, seconds),
            "prompt_tokens_cached": after.tokens_cached_total - before.tokens_cached_total,
            "preemptions": after.preemptions_total - before.preemptions_total,
            "loop_lag_milliseconds": spread(lag.samples),
            "host": host_share(before, after),
            "device": device_use(model.steps, model.times),
            "floor": None if self._cost is None else floor(model.steps, self._cost, seconds),
        }


@asynccontextmanager
async def watched_engine(
    path: Path, cost: RooflineCost | None, source: ModelSource | None = None, **options: Any
) -> AsyncIterator[WatchedEngine]:
    """Yield an engine with these options. Nothing has warmed it up."""
    model = WatchedModel(path, source)
    async with Engine(model, **options) as engine:
        yield WatchedEngine(engine, model, cost)


async def at_rest(engine: Engine) -> None:
    """Wait until no request is left and no step is in flight."""
    while is_busy(engine.stats()):  # noqa: ASYNC110  (an engine tells nobody of it)
        await asyncio.sleep(0.001)


def is_busy(stats: EngineStats) -> bool:
    return stats.num_running + stats.num_waiting > 0 or stats.step_age_seconds > 0


async def served(engine: Engine, requests: Sequence[Request]) -> list[tuple[Usage, Timings]]:
    """Return the answers' usage and timings; their times count from when they were due.

    Raises RuntimeError for an answer that is shorter than it should be.
    """
    began = asyncio.get_running_loop().time()
    clock = asyncio.get_running_loop().time

    async def answer(request: Request) -> tuple[Usage, Timings]:
        due = began + request.due_seconds
        if request.due_seconds:
            await asyncio.sleep(due - clock())
        late = clock() - due
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        async with engine.stream(request.prompt, params) as stream:
            async for _ in stream:
                pass
            usage, timings = stream.usage, stream.timings
        if usage.completion_tokens != request.output_tokens:
            raise RuntimeError(
                f"{usage.completion_tokens} tokens came instead of {request.output_tokens}"
            )
        return usage, later(timings, late)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(request)) for request in requests]
    except BaseExceptionGroup as failures:
        # The first failure cancelled the others; only that one matters.
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def later(timings: Timings, seconds: float) -> Timings:
    """Return the timings, counted from so much earlier."""

    def shifted(came: float | None) -> float | None:
        return None if came is None else came + seconds

    return msgspec.structs.replace(
        timings,
        first_token_seconds=shifted(timings.first_token_seconds),
        total_seconds=timings.total_seconds + seconds,
        encoding_seconds=shifted(timings.encoding_seconds),
        queued_seconds=shifted(timings.queued_seconds),
    )


# -- times of the steps


def device_use(steps: Sequence[TimedStep], times: Sequence[StepTime] | None) -> dict[str, Any]:
    """Return how long the device computed steps, and how long it was idle, from first to last."""
    found = times_of(steps) if times is None else times
    busy = sum(time.seconds for time in found)
    idle = sum(time.idle_seconds or 0.0 for time in found)
    graphs = [time for time in found if time.graph_size is not None]
    return {
        "clock": "event loop" if times is None else "device",
        "steps": len(found),
        "graph_steps": len(graphs),
        "busy_seconds": busy,
        "idle_seconds": idle,
        "idle_share": idle / (busy + idle),
        "idle_milliseconds": spread([time.idle_seconds or 0.0 for time in found]),
        "graph_milliseconds": spread([time.seconds for time in graphs]),
        "eager_milliseconds": spread([t.seconds for t in found if t.graph_size is None]),
    }


def times_of(steps: Sequence[TimedStep]) -> list[StepTime]:
    """Return step times as the event loop saw them, if nothing else times steps."""
    ends = [None, *(step.ended for step in steps)]
    return [
        StepTime(step.plan.step, step.seconds, None if end is None else step.began - end, None)
        for step, end in zip(steps, ends, strict=False)
    ]


def floor(steps: Sequence[TimedStep], cost: RooflineCost, seconds: float) -> dict[str, Any]:
    """Return the least time of the steps: of all, and of those with and without prompts."""
    kinds = {"decodes": (0, 0.0, 0.0), "with_prompts": (0, 0.0, 0.0)}
    for step in steps:
        is_decode = all(item.count == 1 and item.rows for item in step.plan.items)
        kind = "decodes" if is_decode else "with_prompts"
        count, least, taken = kinds[kind]
        kinds[kind] = count + 1, least + cost.step_seconds(step.plan), taken + step.seconds
    least = sum(entry[1] for entry in kinds.values())
    return {
        "seconds": least,
        "share": least / seconds,
        **{
            kind: {"steps": count, "floor_seconds": least, "seconds": taken}
            for kind, (count, least, taken) in kinds.items()
        },
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles in milliseconds; None without values."""
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1000
    names = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: float(np.percentile(values, rank)) for name, rank in names.items()}
