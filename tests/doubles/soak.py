"""Many random requests through whole engines on a simulated loop, looking for what is lost.

    python -m tests.doubles.soak --requests 1000000 --seed 7 --max-seconds 600

Requests share prefixes, continue earlier completions, ask for several samples, leave early, are
cancelled, or read slowly. Steps take random times and fail, and pages are scarce. Each batch is one
engine with options of its own, whose state is checked all the time. Prints the findings, and ends
with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from typing import Any, TextIO

import msgspec

from aioserve.engine.engine import Engine
from aioserve.request import SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy, Verdict
from aioserve.testing.fake_device import expected_tokens
from aioserve.testing.fake_model import FakeModel, Fault, Faults, random_step_seconds
from aioserve.testing.invariants import check_invariants, count_leaked_pages, scribble_free_pages
from aioserve.testing.sim_loop import run_simulated
from aioserve.testing.stream_checker import StreamChecker

__all__ = ["Findings", "main", "run_batch"]

MODULE = "tests.doubles.soak"
BATCH_REQUESTS = 2_000
MAX_ROUNDS = 50_000_000
MAX_MODEL_LEN = 128
STEPS_BETWEEN_CHECKS = 100
SHOWN_FAULTS = 5
RATES = {
    Fault.STEP_RAISES: 0.002,
    Fault.LAUNCH_RAISES: 0.001,
    Fault.BAD_ROW: 0.003,
    Fault.SLOW: 0.002,
}


class Findings(msgspec.Struct):
    """Findings of a run. All but the first two should be 0."""

    requests: int = 0
    steps: int = 0
    leaked_pages: int = 0
    wrong_ends: int = 0
    """Terminal events that were lost or doubled."""
    wrong_tokens: int = 0
    failed_steps: int = 0
    """Requests that ended because of a failed step that should not have failed."""
    broken: int = 0
    """Batches that ended with an exception: broken invariants, a deadlock, a failed engine."""
    faults: list[str] = []
    """Failures in words, and how to repeat them."""

    def add(self, other: Findings) -> None:
        for field in msgspec.structs.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    started = time.monotonic()
    total = Findings()
    for findings in _batches(options):
        total.add(findings)
        seconds = time.monotonic() - started
        _say(f"\r{total.requests:,} requests in {seconds:.0f} s", sys.stderr)
        _say("".join(f"\n{fault}" for fault in findings.faults))
    seconds = time.monotonic() - started
    _say(
        f"\n{total.requests:,} requests, {total.steps:,} steps, "
        f"{total.leaked_pages} leaked pages, "
        f"{total.wrong_ends} lost or doubled terminal events, "
        f"{total.wrong_tokens} requests with wrong tokens, "
        f"{total.failed_steps} with steps that failed by themselves, "
        f"{total.broken} broken batches; "
        f"{seconds:.1f} s, {total.requests / seconds:,.0f} requests/s\n"
    )
    return 1 if total.faults else 0


def _batches(options: argparse.Namespace) -> Iterator[Findings]:
    """Results of batches as they end, until there are enough requests or no time is left."""
    if options.batch is not None:
        yield run_batch(options.seed, options.batch, min(options.requests, BATCH_REQUESTS))
        return
    ends_at = time.monotonic() + options.max_seconds
    left, batch = options.requests, 0
    running: set[Future[Findings]] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as processes:
        while True:
            while left and len(running) < options.processes and time.monotonic() < ends_at:
                count = min(left, BATCH_REQUESTS)
                running.add(processes.submit(run_batch, options.seed, batch, count))
                left -= count
                batch += 1
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def run_batch(seed: int, batch: int, requests: int) -> Findings:
    """Send `requests` requests through one engine, whose options are drawn from `seed` and
    `batch`."""
    draw = random.Random(f"{seed} {batch}")
    engine = Engine(_model(draw), **_options(draw))
    checker = StreamChecker(engine)
    findings = Findings()
    faults: list[str] = []
    logging.disable(logging.CRITICAL)
    try:
        run_simulated(
            lambda: _serve(engine, checker, draw, requests),
            seed=draw.getrandbits(32),
            max_rounds=MAX_ROUNDS,
        )
        findings.steps = engine.stats().steps_total
        findings.leaked_pages = count_leaked_pages(engine)
        if findings.leaked_pages:
            faults.append(f"{findings.leaked_pages} pages leaked")
    except Exception:
        findings.broken = 1
        faults.append(traceback.format_exc())
    finally:
        logging.disable(logging.NOTSET)
    findings.requests = checker.ends.total()
    findings.wrong_ends = len(checker.wrong_ends) + checker.num_open
    findings.wrong_tokens = len(checker.wrong_tokens)
    findings.failed_steps = len(checker.failed_steps)
    faults += [*checker.failed_steps, *checker.wrong_ends, *checker.wrong_tokens]
    if faults:
        again = f"python -m {MODULE} --seed {seed} --batch {batch} --requests {requests}"
        findings.faults = [*faults[:SHOWN_FAULTS], f"{len(faults)} faults; to repeat them: {again}"]
    return findings


async def _serve(
    engine: Engine, checker: StreamChecker, draw: random.Random, requests: int
) -> None:
    async with engine:
        callers = draw.choice([4, 32, 64, 128])
        source = _Source(draw)
        share = [requests // callers + (caller < requests % callers) for caller in range(callers)]
        checking = asyncio.create_task(_check(engine))
        async with asyncio.TaskGroup() as group:
            for caller, count in enumerate(share):
                group.create_task(_call(checker, source, draw, caller, count))
        await engine.drain()
        checking.cancel()
        await asyncio.wait([checking])
        if not checking.cancelled():
            checking.result()
        check_invariants(engine)


async def _check(engine: Engine) -> None:
    checked = 0
    while True:
        await asyncio.sleep(0.5)
        if engine.stats().steps_total > checked + STEPS_BETWEEN_CHECKS:
            checked = engine.stats().steps_total
            check_invariants(engine)
            scribble_free_pages(engine)


async def _call(
    checker: StreamChecker, source: _Source, draw: random.Random, caller: int, count: int
) -> None:
    """Act as one caller: some requests, one after the other."""
    for index in range(count):
        request_id = f"{caller}.{index}"
        prompt, params = source.request()
        way = draw.random()
        read = partial(checker.read, prompt, params, request_id=request_id)
        if way < 0.8:
            await read()
        elif way < 0.87:
            await read(leave_after=draw.randrange(4))
        elif way < 0.92:
            pause = draw.choice([0.02, 0.3])
            await read(pause_seconds=lambda _, pause=pause: pause)
        else:
            reading = asyncio.create_task(read())
            await asyncio.wait([reading], timeout=draw.random() * draw.choice([0.0, 0.02, 0.2]))
            reading.cancel()
            await asyncio.wait([reading])
        if way < 0.1:
            await asyncio.sleep(draw.random())


class _Source:
    """Requests that share prefixes, continue earlier ones, or are repeated."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._letters = draw.choice([2, 256])
        self._prefixes = [self._ids(draw.randrange(70)) for _ in range(6)]
        self._recent: deque[tuple[list[int], SamplingParams]] = deque(maxlen=8)

    def request(self) -> tuple[list[int], SamplingParams]:
        draw = self._draw
        if self._recent and draw.random() < 0.25:
            return draw.choice(self._recent)
        prompt = [*draw.choice(self._prefixes), *self._ids(draw.randint(1, 12))]
        params = SamplingParams(
            max_tokens=draw.choice([1, 1, 2, 3, 4, 6, 9, 30]),
            seed=draw.randrange(4),
            n=draw.choice([1, 1, 1, 1, 1, 1, 2, 4]),
        )
        if draw.random() < 0.1 and len(prompt) < MAX_MODEL_LEN - 44:
            count = draw.randrange(params.max_tokens or 1)
            answer = expected_tokens(prompt, count, params.seed or 0)
            self._prefixes[draw.randrange(len(self._prefixes))] = [*prompt, *answer]
        self._recent.append((prompt, params))
        return prompt, params

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(self._letters) for _ in range(count)]


class _Whimsical(SchedulingPolicy):
    """Gives any allowed answer, and now and then an invalid one."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def order(self, waiting, view):
        return self._draw.sample(waiting, self._draw.randint(0, len(waiting)))

    def admit(self, request, view):
        return self._draw.choice([Verdict.NOW, Verdict.NOW, Verdict.LATER])

    def chunk(self, request, budget_tokens, view):
        return self._draw.choice([budget_tokens, self._draw.randint(-1, budget_tokens)])

    def victim(self, running, need_pages, view):
        return self._draw.choice(running)


def _model(draw: random.Random) -> FakeModel:
    often = draw.choice([0, 1, 1, 10])
    rates = {fault: often * rate for fault, rate in RATES.items()}
    return FakeModel(
        max_model_len=MAX_MODEL_LEN,
        step_seconds=random_step_seconds(0.0, 0.02, seed=draw.getrandbits(32)),
        faults=Faults(rates=rates, seed=draw.getrandbits(32)),
    )


def _options(draw: random.Random) -> dict[str, Any]:
    page_size = draw.choice([1, 2, 8, 16, 64])
    num_pages = int(MAX_MODEL_LEN / page_size * draw.choice([1.5, 3, 6, 12, 24]))
    num_host_pages = draw.choice([0, num_pages // 2, 2 * num_pages])
    options = {
        "policy": _Whimsical(draw) if draw.random() < 0.2 else SchedulingPolicy(),
        "page_size": page_size,
        "num_pages": num_pages,
        "num_host_pages": num_host_pages,
        "prefix_caching": draw.random() < 0.9,
        "partial_page_reuse": draw.random() < 0.8,
        "eviction": draw.choice(["lru", "lru", "lfu", "fifo", "slru"]),
        "preemption": draw.choice(["auto", "recompute", *(["swap"] * 3 if num_host_pages else [])]),
        "max_num_seqs": draw.choice([4, 32, 64]),
        "max_num_batched_tokens": draw.choice([32, 128, 512]),
        "output_reserve_tokens": draw.choice([0, 16, 64]),
        "overlap": draw.random() < 0.8,
        "max_buffered_tokens": draw.choice([1, 4, 64]),
        "stall_timeout_seconds": draw.choice([0.25, 60.0]),
    }
    if not options["prefix_caching"]:
        # An engine refuses options that have no effect without the cache.
        options["eviction"] = "lru"
        options["preemption"] = "swap" if num_host_pages else "auto"
    return options


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--requests", type=int, default=sys.maxsize, help="default: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="default: 600")
    parser.add_argument("--batch", type=int, help="run this batch alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(arguments)


def _say(text: str, to: TextIO | None = None) -> None:
    print(text, end="", flush=True, file=to or sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
