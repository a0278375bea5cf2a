"""Compares the simulator with the engine: one trace, live and simulated.

Every installed policy serves the same requests twice. Live, an engine on this machine gets each
request at its time in the trace. In the simulator, steps take the time in a cost table that was
measured in the same run, as `aioserve calibrate` does. The program compares time to first token
(TTFT) and time per output token (TPOT), at p50 and p99. TTFT runs from the moment in the trace
until the reader has the token. Of the live runs the median counts. Their noise is the largest less
the smallest, relative to the median. Of simulated runs, whose steps vary as the measured ones did,
the median of as many seeds counts.

The speed of a machine that others use too changes. So the trace is cut into blocks, and the
policies take turns, block by block. Each has an engine of its own that keeps its cache. Measuring
takes its turn as well, and each engine warms up again before its own. A change of speed that is
longer than a block affects all. A thread sends requests and wakes the event loop as a socket would:
timers of the loop itself are late by up to a millisecond.

Two policies can be told apart if every repetition has them in the same order, and their ratio is
far enough from 1. It must be further from 1 than its repetitions are from each other, and by more
than a tie (2 %). Of those pairs, the program counts how many the simulator has in the same order.
The last column is the median error over the runs of another simulation. Its table is scaled, block
by block, to the sum of that run's own steps. It is the error that would be left if the machine kept
its speed.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --trace azure_code.csv --scale-lengths 0.125 --rate 30
    python benchmarks/fidelity.py --trace mine.csv --policy fcfs --policy mine:window=8

Neither trace nor policies affect the cost table, so new ones test the simulator as well as known
ones.

Lengths are scaled, and requests too long for the model are left out. Prompts are random tokens that
share what the trace's blocks share; answers are as long as the trace says. A real model doesn't end
them there by itself, so both sides get that length as `max_tokens`, and policies see it. Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fidelity_figures import Times, figures, print_result
from msgspec.structs import replace

from aioserve.simulation.calibration import StepSample
from aioserve.simulation.cost import CostModel, CostTable, HostTimes, TableSteps
from aioserve.simulation.records import SimulationResult
from aioserve.steps.plan import StepPlan
from aioserve.traces.trace_request import TraceRequest

if TYPE_CHECKING:
    from aioserve import Engine
    from aioserve.cli._calibration import Grid

HOST_FIELDS = HostTimes.__struct_fields__
BETWEEN_BLOCKS_SECONDS = 1e4
"""Time between blocks in the simulated trace: a block comes when the one before has been served."""
WARMING_REQUESTS = 2
SETTLE_SECONDS = 1.0
"""Time for engines that have just started to do the work that they do while idle."""


def main() -> None:
    options = parse_arguments()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    result = asyncio.run(compare(options))
    print_result(result)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pyhelp")
    parser.add_argument("--trace", type=Path, help="a file that `aioserve simulate` reads")
    parser.add_argument("--synthetic", default="bursts", help="a made-up workload instead")
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second")
    parser.add_argument("--scale-lengths", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="once for each, options behind it: at least two; those installed, unless given",
    )
    parser.add_argument("--repeats", type=int, default=3, help="live runs of each policy")
    parser.add_argument("--block", type=int, default=25, help="requests until the next one's turn")
    parser.add_argument("--ttft-target-seconds", type=float, help="that policies see")
    parser.add_argument("--tpot-target-seconds", type=float)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--num-pages", type=int)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.policy is not None and len(set(options.policy)) != max(2, len(options.policy)):
        parser.error(f"--policy: give two or more, each once, got {', '.join(options.policy)}")
    if options.block < 1:
        parser.error(f"--block must be at least 1, got {options.block}")
    return options


class ScaledSteps(TableSteps):
    """Steps of a machine that is slower than the table's, by a factor for each block of a trace.

    `firsts` are the first requests of the blocks, by number.
    """

    def __init__(self, table: CostTable, factors: Sequence[float], firsts: Sequence[int]) -> None:
        super().__init__(table, None)
        self.factors = factors
        self.firsts = firsts

    @property
    def tells_several(self) -> bool:
        return False

    def step_seconds(self, plan: StepPlan) -> float:
        number = plan.items[0].sequence_id - 1  # the first one has 1
        block = bisect_right(self.firsts, number) - 1
        return self.factors[block] * super().step_seconds(plan)


class LiveRun(NamedTuple):
    """Run of one policy, once through the trace."""

    times: Times
    steps: list[list[StepSample]]
    """Steps of each block."""


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    from aioserve.cli._calibration import Grid
    from aioserve.cli.doctor import compute_facts
    from aioserve.plugins import PluginRegistry
    from aioserve.simulation.calibration import fit_table, prediction_error

    policies = options.policy or sorted(PluginRegistry().policies)
    limits = await limits_of(options)
    options.num_pages = limits.num_pages
    grid = Grid.up_to(options.max_num_batched_tokens, options.max_num_seqs, limits.max_model_len)
    requests, left_out = requests_for(options, limits.max_model_len)
    blocks = blocks_of(requests, options.block)
    measured: list[StepSample] = []
    hosts: list[HostTimes] = []
    live: dict[str, list[LiveRun]] = {policy: [] for policy in policies}
    for repeat in range(options.repeats):
        # In another order each time, so that no policy is always the first after a pause.
        order = policies[repeat % len(policies) :] + policies[: repeat % len(policies)]
        for policy, run in (await live_runs(order, blocks, options, grid, measured, hosts)).items():
            live[policy].append(run)
        print(f"run {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
    host = HostTimes(
        *(float(np.median([getattr(each, name) for each in hosts])) for name in HOST_FIELDS)
    )
    table = replace(fit_table(measured, grid.prefill_tokens, grid.decode_batch), host=host).table()
    apart, firsts = set_apart(blocks)

    def simulated(policy: str, cost: CostModel, seed: int | None = None) -> SimulationResult:
        return run_simulated(apart, policy, options, limits.num_pages, cost, seed)

    runs = {p: [simulated(p, table, n) for n in range(options.repeats)] for p in policies}
    outside = [r.steps_outside.share for of in runs.values() for r in of if r.steps_outside]
    speeds = {
        policy: [
            [1 / (1 + prediction_error(table, steps).total) for steps in run.steps] for run in of
        ]
        for policy, of in live.items()
    }
    at_live_speed = {
        policy: [times_of(simulated(policy, ScaledSteps(table, f, firsts))) for f in factors]
        for policy, factors in speeds.items()
    }
    every = [step for of in live.values() for run in of for block in run.steps for step in block]
    error = prediction_error(table, every)
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": compute_facts(),
        "requests": len(requests),
        "blocks": len(blocks),
        "left_out": left_out,
        "seconds": max(request.arrival_seconds for request in requests),
        "measured_steps": len(measured),
        "host": {name: getattr(host, name) for name in HOST_FIELDS},
        "live_steps": {"steps": error.steps, "median": error.median, "total": error.total},
        "speeds": speeds,
        "steps_outside": max(outside),
        "figures": figures(
            {policy: [run.times for run in of] for policy, of in live.items()},
            {policy: [times_of(run) for run in of] for policy, of in runs.items()},
            at_live_speed,
        ),
    }


def blocks_of(requests: Sequence[TraceRequest], size: int) -> list[list[TraceRequest]]:
    """Return blocks of so many requests each, whose arrivals begin with 0."""
    blocks = [requests[first : first + size] for first in range(0, len(requests), size)]
    return [
        [replace(r, arrival_seconds=r.arrival_seconds - of[0].arrival_seconds) for r in of]
        for of in blocks
    ]


def set_apart(blocks: Sequence[Sequence[TraceRequest]]) -> tuple[list[TraceRequest], list[int]]:
    """Return one trace in which each block comes when those before have been served.

    Also returns the places of the first requests of the blocks.
    """
    trace = [
        replace(r, arrival_seconds=r.arrival_seconds + number * BETWEEN_BLOCKS_SECONDS)
        for number, block in enumerate(blocks)
        for r in block
    ]
    sizes = [len(block) for block in blocks]
    return trace, [sum(sizes[:number]) for number in range(len(sizes))]


def run_simulated(
    requests: Sequence[TraceRequest],
    policy: str,
    options: argparse.Namespace,
    num_pages: int,
    cost: CostModel,
    noise_seed: int | None,
) -> SimulationResult:
    from aioserve.plugins import PluginRegistry
    from aioserve.simulation.simulator import simulate
    from aioserve.traces.workload import with_targets

    return simulate(
        with_targets(
            requests,
            ttft_target_seconds=options.ttft_target_seconds,
            tpot_target_seconds=options.tpot_target_seconds,
        ),
        PluginRegistry().policy(policy),
        cost=cost,
        noise_seed=noise_seed,
        num_pages=num_pages,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        overlap=options.overlap,
    )


async def limits_of(options: argparse.Namespace) -> Any:
    """Return the limits of the model, as the live engines will load it."""
    from aioserve.cli._calibration import recorded_engine

    async with recorded_engine(options.model, **engine_options(options)) as (engine, _):
        return engine.limits


async def live_runs(
    policies: Sequence[str],
    blocks: Sequence[Sequence[TraceRequest]],
    options: argparse.Namespace,
    grid: Grid,
    measured: list[StepSample],
    hosts: list[HostTimes],
) -> dict[str, LiveRun]:
    """Go once through the trace, with the policies in turns.

    Each round has one pass of measuring, which goes to `measured` and `hosts`.
    """
    from aioserve.cli._calibration import MOST_PROMPTS, measure_grid, measure_host, recorded_engine

    settings = engine_options(options)
    more_seats = {"max_num_seqs": options.max_num_seqs + MOST_PROMPTS}
    async with AsyncExitStack() as stack:
        measuring, recorder = await stack.enter_async_context(
            recorded_engine(options.model, **settings | more_seats)
        )
        engines = {
            policy: await stack.enter_async_context(
                recorded_engine(options.model, **settings, policy=policy)
            )
            for policy in policies
        }
        runs = {policy: LiveRun({"ttft": [], "tpot": []}, []) for policy in policies}
        await asyncio.sleep(SETTLE_SECONDS)
        for block in blocks:
            await measure_grid(measuring, grid, len(hosts), lambda: None)
            measured += recorder.take()
            hosts.append(await measure_host(measuring, recorder, len(hosts)))
            recorder.take()
            for policy, (engine, noted) in engines.items():
                noted.take()
                await replay_live(engine, block, options, runs[policy].times)
                runs[policy].steps.append(noted.take())
        return runs


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_pages": options.num_pages,
        "overlap": options.overlap,
    }


def requests_for(options: argparse.Namespace, max_model_len: int) -> tuple[list[TraceRequest], int]:
    """Return the scaled requests that fit the model, at the rate, and how many don't fit.

    Each has its answer's length as its limit.
    """
    from aioserve.traces.formats import read_trace
    from aioserve.traces.synthetic import synthetic_trace
    from aioserve.traces.trace_request import at_rate, with_scaled_lengths

    count = options.num_requests
    if options.trace is None:
        trace = synthetic_trace(options.synthetic, count, rate=options.rate, seed=options.seed)
    else:
        trace = read_trace(options.trace)[:count]
    scaled = with_scaled_lengths(trace, options.scale_lengths)
    limited = [replace(r, max_tokens=max(1, r.output_tokens)) for r in scaled]
    fitting = [r for r in limited if r.prompt_tokens + max(1, r.output_tokens) <= max_model_len]
    if not fitting:
        sys.exit(f"none of {len(scaled)} requests fits max_model_len = {max_model_len}")
    return at_rate(fitting, options.rate), len(scaled) - len(fitting)


async def replay_live(
    engine: Engine, requests: Sequence[TraceRequest], options: argparse.Namespace, times: Times
) -> None:
    """Serve the requests, and add their times."""
    from aioserve import RequestRejectedError, SamplingParams

    async def ask(request: TraceRequest, prompt: list[int], due: float) -> None:
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        stream = engine.stream(
            prompt,
            params,
            cache_salt=request.session or None,
            tenant=request.tenant or None,
            ttft_target_seconds=options.ttft_target_seconds,
            tpot_target_seconds=options.tpot_target_seconds,
        )
        first = None
        try:
            async for _ in stream:
                first = first or time.perf_counter()
        except RequestRejectedError:
            return
        if first is not None:
            times["ttft"].append(first - due)
        if (tpot := stream.timings.seconds_per_output_token) is not None:
            times["tpot"].append(tpot)

    prompts = [live_prompt(request, engine.limits.vocab_size) for request in requests]
    await warm(engine)
    loop, due_now = (
        asyncio.get_running_loop(),
        asyncio.Queue[tuple[TraceRequest, list[int], float]](),
    )
    began = time.perf_counter() + 0.05

    def send() -> None:
        for request, prompt in zip(requests, prompts, strict=True):
            due = began + request.arrival_seconds
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            loop.call_soon_threadsafe(due_now.put_nowait, (request, prompt, due))

    sender = asyncio.create_task(asyncio.to_thread(send))
    async with asyncio.TaskGroup() as group:
        for _ in requests:
            group.create_task(ask(*await due_now.get()))
    await sender


async def warm(engine: Engine) -> None:
    """Run a few steps, so that its weights and code are in the processor's caches again.

    Other engines have used the caches since its last turn.
    """
    from aioserve import SamplingParams

    vocab_size, length = engine.limits.vocab_size, min(256, engine.limits.max_model_len // 2)
    for number in range(WARMING_REQUESTS):
        prompt = np.random.default_rng((3, number)).integers(vocab_size, size=length)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        await engine.generate(prompt.tolist(), params, cache_salt=f"warming {time.perf_counter()}")


def live_prompt(request: TraceRequest, vocab_size: int) -> list[int]:
    """Return random tokens: the same for blocks of one id and session, and others for the rest."""
    session = zlib.crc32(request.session.encode())
    parts = [
        np.random.default_rng((1, session, block)).integers(vocab_size, size=request.block_tokens)
        for block in request.block_ids
    ]
    own = max(0, request.prompt_tokens - len(parts) * request.block_tokens)
    parts.append(np.random.default_rng((2, request.number)).integers(vocab_size, size=own))
    return np.concatenate(parts)[: request.prompt_tokens].tolist()


def times_of(result: SimulationResult) -> Times:
    from aioserve.simulation.metrics import tpot_seconds, ttft_seconds

    found = {
        "ttft": [ttft_seconds(record) for record in result.requests],
        "tpot": [tpot_seconds(record) for record in result.requests],
    }
    return {name: [v for v in values if v is not None] for name, values in found.items()}


if __name__ == "__main__":
    main()
