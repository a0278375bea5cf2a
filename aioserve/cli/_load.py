"""Load of `aioserve bench`: its options, and a run of random prompts that measures the engine and
the event loop.

Knows only the public API of `Engine`, like any program that embeds it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from aioserve.cli._engine import RunOptions, Start, frozen_heap, open_engine
from aioserve.cli._streams import check_output
from aioserve.cli.doctor import compute_facts
from aioserve.errors import ConfigError
from aioserve.request import SamplingParams, Usage
from aioserve.timings import Timings

if TYPE_CHECKING:
    from aioserve import Engine, EngineStats

__all__ = [
    "BenchOptions",
    "LoopLag",
    "figures",
    "host_share",
    "measure",
    "random_prompts",
    "run_requests",
]

MAX_NUM_PROMPTS = 65_536
"""Most prompts of a run: as many as an engine runs at once."""
MAX_PROMPT_TOKENS = 10_000_000
"""Most tokens of all prompts together, which are drawn before the clock starts."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RunOptions):
    """Options for what to run."""

    num_prompts: int = 32
    """Number of requests."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens of each answer; end-of-sequence tokens are ignored. Policies see it as max_tokens."""
    shared_prefix_len: int = 0
    """First tokens that are the same in every prompt."""
    concurrency: int | None = None
    """Requests at once. Not given: all for throughput, 1 for latency."""
    dtype: str = "auto"
    """Type of activations and KV: float32, bfloat16, on a GPU float16, or auto (what the model
    directory says).
    """
    policy: str = "fcfs"
    """Scheduling policy, with options if you like: NAME:OPTION=VALUE,OPTION=VALUE. Or a class of
    yours: FILE.py:CLASS.
    """
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one engine step."""
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True
    """Plan the next step while one runs."""
    prefix_caching: Annotated[bool, Parameter(negative="--no-prefix-caching")] = True
    """Start requests from their cached prefixes."""
    partial_page_reuse: Annotated[bool, Parameter(negative="--no-partial-page-reuse")] = True
    """Copy the valid part of a cached page."""
    eviction: str = "lru"
    """Cached pages that go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    num_host_pages: int = 0
    """Pages in the host's memory for evicted and swapped-out KV."""
    preemption: str = "auto"
    """Treatment of preempted requests: auto, recompute or swap."""
    seed: int = 0
    """Key of the random prompts."""
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """File to write the result to, beside the tables; "-" prints JSON alone."""

    def check(self) -> None:
        """Raise `ConfigError` for a count that makes no sense or is beyond bounds."""
        if not 1 <= self.num_prompts <= MAX_NUM_PROMPTS:
            raise ConfigError(
                f"num_prompts must be in [1, {MAX_NUM_PROMPTS}], got {self.num_prompts}"
            )
        for name, least in (("input_len", 1), ("output_len", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.num_prompts * self.input_len > MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"num_prompts * input_len must be at most {MAX_PROMPT_TOKENS}, "
                f"got {self.num_prompts} * {self.input_len}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.concurrency is not None and self.concurrency > self.num_prompts:
            raise ConfigError(
                f"concurrency must be at most num_prompts = {self.num_prompts}, "
                f"got {self.concurrency}"
            )
        if self.json not in (None, "-"):
            check_output("json", Path(self.json))
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be in [0, input_len={self.input_len}], "
                f"got {self.shared_prefix_len}"
            )


TICK_SECONDS = 0.001
STARTED_AT_ONCE = 32
"""Requests that are submitted before the event loop's other tasks get their turn."""

Answer = tuple[Usage, Timings]


class LoopLag:
    """Task that sleeps 1 ms at a time and records how late it wakes, in seconds.

    It sees what any other task of the host program would see while the engine works.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.samples.append(max(0.0, now - before - TICK_SECONDS))
            before = now


def random_prompts(
    count: int, length: int, shared: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Return `count` prompts of `length` ids below `vocab_size`; the first `shared` ids are the
    same in all.
    """
    source = random.Random(seed)
    prefix = [source.randrange(vocab_size) for _ in range(shared)]
    return [
        prefix + [source.randrange(vocab_size) for _ in range(length - shared)]
        for _ in range(count)
    ]


async def measure(model: str, options: BenchOptions, concurrency: int) -> dict[str, Any]:
    """Run the requests, at most `concurrency` at once, and return JSON-ready results.

    Raises `ConfigError` if a prompt and its answer are together longer than the model's context.
    """
    starts: list[Start] = []
    async with open_engine(
        model,
        on_start=starts.append,
        **options.of_engine(),
        dtype=options.dtype,
        policy=options.policy,
        page_size=options.page_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=max(256, concurrency),
        max_waiting=max(1024, options.num_prompts),
        overlap=options.overlap,
        prefix_caching=options.prefix_caching,
        partial_page_reuse=options.partial_page_reuse,
        eviction=options.eviction,
        num_host_pages=options.num_host_pages,
        preemption=options.preemption,
    ) as engine:
        vocab_size, length = engine.limits.vocab_size, options.input_len
        if length + options.output_len > engine.limits.max_model_len:
            raise ConfigError(
                f"input_len + output_len must be at most max_model_len = "
                f"{engine.limits.max_model_len} of {Path(model).name}, "
                f"got {length} + {options.output_len}"
            )
        # The first request pays for what is built once: thread pool, choice of kernels, page
        # faults. It shares nothing with the others, which find an empty prefix cache.
        (first,) = random_prompts(1, length, 0, vocab_size, options.seed + 1)
        await _answer(engine, first, min(2, options.output_len))
        before = engine.stats()
        with frozen_heap():  # as in a server
            prompts = random_prompts(
                options.num_prompts, length, options.shared_prefix_len, vocab_size, options.seed
            )
            async with LoopLag() as lag:
                started = time.perf_counter()
                answers = await run_requests(engine, prompts, options.output_len, concurrency)
                seconds = time.perf_counter() - started
        after = engine.stats()
        facts = engine.dump()["model"]
        machine = compute_facts() | {name: facts[name] for name in ("device", "dtype")}
    return {
        "model": model,
        "options": dataclasses.asdict(options),
        "concurrency": concurrency,
        "machine": machine,
        "start": starts[0]._asdict(),
        "seconds": seconds,
        **figures(answers, seconds),
        "loop_lag_milliseconds": _spread(lag.samples),
        "host": host_share(before, after),
        "stats": _growth(before, after),
    }


def _growth(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Return counters of a run, as differences between two snapshots."""
    return {
        "steps": after.steps_total - before.steps_total,
        "preemptions": after.preemptions_total - before.preemptions_total,
        "tokens_prefilled": after.tokens_prefilled_total - before.tokens_prefilled_total,
        "tokens_cached": after.tokens_cached_total - before.tokens_cached_total,
        "tokens_drafted": _grown(before.tokens_drafted_total, after.tokens_drafted_total),
        "tokens_accepted": _grown(before.tokens_accepted_total, after.tokens_accepted_total),
        "pages_total": after.pages_total,
        "pages_held_at_end": after.pages_held_by_requests,
    }


def _grown(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return draft tokens by their place since `before`, which may have fewer places."""
    return [late - early for early, late in zip_longest(before, after, fillvalue=0)]


async def run_requests(
    engine: Engine, prompts: Sequence[list[int]], output_len: int, concurrency: int
) -> list[Answer]:
    """Return answers of `output_len` tokens to all prompts, at most `concurrency` at once."""
    queue = iter(prompts)
    answers: list[Answer] = []

    async def worker() -> None:
        for prompt in queue:
            answers.append(await _answer(engine, prompt, output_len))

    try:
        async with asyncio.TaskGroup() as group:
            for started in range(1, min(concurrency, len(prompts)) + 1):
                group.create_task(worker())
                if started % STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        # The first failure cancelled the other workers; only it is worth reporting.
        raise failures.exceptions[0] from failures
    return answers


async def _answer(engine: Engine, prompt: list[int], output_len: int) -> Answer:
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    stream = engine.stream(prompt, params)
    async for _ in stream:
        pass
    return stream.usage, stream.timings


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return throughput over `seconds`, and the latencies of requests."""
    usages, timings = [usage for usage, _ in answers], [timings for _, timings in answers]
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    output_tokens = sum(usage.completion_tokens for usage in usages)
    first = [t.first_token_seconds for t in timings if t.first_token_seconds is not None]
    queued = [t.queued_seconds for t in timings if t.queued_seconds is not None]
    gaps = [t.inter_token_latency for t in timings if t.inter_token_latency is not None]
    between = [tpot for t in timings if (tpot := t.seconds_per_output_token) is not None]
    return {
        "answers": {
            "requests": len(answers),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        },
        "throughput": {
            "requests_per_second": len(answers) / seconds,
            "prompt_tokens_per_second": prompt_tokens / seconds,
            "output_tokens_per_second": output_tokens / seconds,
            "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        },
        "latency_milliseconds": {
            "queued": _spread(queued),
            "ttft": _spread(first),
            "tpot": _spread(between),
            "longest_gap": _spread([gap.max_seconds for gap in gaps]),
            "e2e": _spread([t.total_seconds for t in timings]),
        },
    }


def host_share(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Return what the engine's own work on the event loop took of the steps between two snapshots.

    There must be at least one step.
    """
    spent = {
        part: getattr(after, f"{part}_seconds_total") - getattr(before, f"{part}_seconds_total")
        for part in ("planning", "commit", "delivery", "step")
    }
    steps, step_seconds = after.steps_total - before.steps_total, spent.pop("step")
    return {
        **{
            f"{part}_microseconds_per_step": seconds / steps * 1e6
            for part, seconds in spent.items()
        },
        "step_milliseconds": step_seconds / steps * 1e3,
        "share_of_step": sum(spent.values()) / step_seconds,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum in milliseconds; None without measurements."""
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1000
    return {
        "mean": float(values.mean()),
        "p50": float(np.percentile(values, 50)),
        "p90": float(np.percentile(values, 90)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }
