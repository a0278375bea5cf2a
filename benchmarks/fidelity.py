"""How well the simulator tells what the engine does: one trace, live and simulated.

Every installed policy serves the same requests twice: live, by an engine on this machine, each
request sent when the trace says, and in the simulator, whose steps take what a cost table says that
was measured in the same run, as `aioserve calibrate` does. Passes of measuring and live runs take
turns, so that both see the same machine. Compared are time to first token (TTFT), from the moment
the trace says, and time per output token (TPOT), at p50 and p99. Of the live runs the median
counts; their noise is the largest less the smallest, relative to that. Of simulated runs, whose
steps vary as the measured ones did, the median of as many seeds. The noise lets two policies be
told apart where live they are further apart than it, and than a tie of 2 %. Of those pairs it is
counted how many the simulator has in the same order.

A machine that others use too is now fast and now slow. The last column is the error, median over
the runs, where each live run is compared with a simulation whose table is scaled to the sum of that
run's own steps: what would be left if the machine kept its speed.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --trace azure_code.csv --scale-lengths 0.125 --rate 30
    python benchmarks/fidelity.py --trace mine.csv --policy fcfs --policy mine:window=8

Neither trace nor policies have any part in the cost table, so that those which nobody tried while
the simulator was made tell as much of it as others.

Lengths are scaled, and requests too long for the model are left out. Prompts are random tokens that
share what the trace's blocks share; answers are as long as the trace says. A real model doesn't end
them there by itself, so both sides are told that length as `max_tokens`, and policies see it. Leave
the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aioserve.simulation.cost import CostModel, CostTable
from aioserve.simulation.records import SimulationResult
from aioserve.steps.plan import StepPlan
from aioserve.traces.request import TraceRequest

Times = dict[str, list[float]]
"""Seconds of each request that has them, by "ttft" and "tpot"."""

FIGURES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
WIDTH_OF_FILES = 120
TIE = 0.02
"""Policies this close to each other are a tie even where live runs agree to the microsecond."""


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
    return options


class ScaledCost:
    """A table of a machine that is so many times slower."""

    def __init__(self, table: CostTable, factor: float) -> None:
        self.table = table
        self.factor = factor

    def step_seconds(self, plan: StepPlan) -> float:
        return self.factor * self.table.step_seconds(plan)


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    from aioserve.cli._calibration import Grid
    from aioserve.cli.doctor import compute_facts
    from aioserve.plugins import PluginRegistry
    from aioserve.simulation.calibration import fit_table, prediction_error

    policies = options.policy or sorted(PluginRegistry().policies)
    limits = await limits_of(options)
    grid = Grid.up_to(options.max_num_batched_tokens, options.max_num_seqs, limits.max_model_len)
    requests, left_out = requests_for(options, limits.max_model_len)
    live: dict[str, list[Times]] = {policy: [] for policy in policies}
    noted_steps: dict[str, list[Any]] = {policy: [] for policy in policies}
    measured: list[Any] = []
    for repeat in range(options.repeats):
        # In another order each time, so that none is always the first after a pause.
        for policy in policies[repeat % len(policies) :] + policies[: repeat % len(policies)]:
            measured += await measure(options, grid, len(measured))
            print(f"run {repeat + 1} of {options.repeats}: {policy}", file=sys.stderr, flush=True)
            times, noted = await replay_live(requests, policy, options)
            live[policy].append(times)
            noted_steps[policy].append(noted)
    table = fit_table(measured, grid.prefill_tokens, grid.decode_batch).table()

    def simulated(policy: str, cost: CostModel, seed: int | None = None) -> SimulationResult:
        return run_simulated(requests, policy, options, limits.num_pages, cost, seed)

    runs = {p: [simulated(p, table, n) for n in range(options.repeats)] for p in policies}
    outside = [r.steps_outside.share for of in runs.values() for r in of if r.steps_outside]
    speeds = {
        policy: [1 / (1 + prediction_error(table, steps).total) for steps in runs]
        for policy, runs in noted_steps.items()
    }
    at_live_speed = {
        policy: [times_of(simulated(policy, ScaledCost(table, speed))) for speed in of]
        for policy, of in speeds.items()
    }
    error = prediction_error(table, [s for runs in noted_steps.values() for r in runs for s in r])
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": compute_facts(),
        "requests": len(requests),
        "left_out": left_out,
        "seconds": max(request.arrival_seconds for request in requests),
        "measured_steps": len(measured),
        "live_steps": {"steps": error.steps, "median": error.median, "total": error.total},
        "speeds": speeds,
        "steps_outside": max(outside),
        "figures": figures(
            live, {p: [times_of(run) for run in of] for p, of in runs.items()}, at_live_speed
        ),
    }


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

    return simulate(
        requests,
        PluginRegistry().policy(policy),
        cost=cost,
        noise_seed=noise_seed,
        num_pages=num_pages,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        overlap=options.overlap,
        ttft_target_seconds=options.ttft_target_seconds,
        tpot_target_seconds=options.tpot_target_seconds,
    )


async def limits_of(options: argparse.Namespace) -> Any:
    """Of the model, as the live engines will load it."""
    from aioserve.cli._calibration import recorded_engine

    async with recorded_engine(options.model, **engine_options(options)) as (engine, _):
        return engine.limits


async def measure(options: argparse.Namespace, grid: Any, seed: int) -> list[Any]:
    """The steps of one pass over the grid."""
    from aioserve.cli._calibration import MOST_PROMPTS, measure_grid, recorded_engine

    settings = engine_options(options) | {"max_num_seqs": options.max_num_seqs + MOST_PROMPTS}
    async with recorded_engine(options.model, **settings) as (engine, recorder):
        await measure_grid(engine, grid, seed, lambda: None)
        return recorder.take()


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_pages": options.num_pages,
        "overlap": options.overlap,
    }


def requests_for(options: argparse.Namespace, max_model_len: int) -> tuple[list[TraceRequest], int]:
    """The scaled requests that fit the model, at the rate, each with its answer's length as its
    limit, and how many don't fit."""
    from msgspec.structs import replace

    from aioserve.traces.formats import read_trace
    from aioserve.traces.request import at_rate, with_scaled_lengths
    from aioserve.traces.synthetic import synthetic_trace

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
    requests: Sequence[TraceRequest], policy: str, options: argparse.Namespace
) -> tuple[Times, list[Any]]:
    """Times of the requests, and the engine's steps."""
    from aioserve import Engine, RequestRejectedError, SamplingParams
    from aioserve.cli._calibration import recorded_engine

    times: Times = {"ttft": [], "tpot": []}

    async def ask(engine: Engine, request: TraceRequest, prompt: list[int], due: float) -> None:
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        late = time.perf_counter() - due
        stream = engine.stream(
            prompt,
            params,
            cache_salt=request.session or None,
            tenant=request.client or None,
            ttft_target_seconds=options.ttft_target_seconds,
            tpot_target_seconds=options.tpot_target_seconds,
        )
        try:
            async for _ in stream:
                pass
        except RequestRejectedError:
            return
        timings = stream.timings
        if timings.first_token_seconds is not None:
            times["ttft"].append(late + timings.first_token_seconds)
        if timings.seconds_per_output_token is not None:
            times["tpot"].append(timings.seconds_per_output_token)

    settings = engine_options(options) | {"policy": policy}
    async with recorded_engine(options.model, **settings) as (engine, recorder):
        prompts = [live_prompt(request, engine.limits.vocab_size) for request in requests]
        began = time.perf_counter() + 0.05
        async with asyncio.TaskGroup() as group:
            for request, prompt in zip(requests, prompts, strict=True):
                due = began + request.arrival_seconds
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(ask(engine, request, prompt, due))
        return times, recorder.take()


def live_prompt(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random tokens: the same for a block of the same id and session, others for all the rest."""
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


def figures(
    live: dict[str, list[Times]],
    simulated: dict[str, list[Times]],
    at_live_speed: dict[str, list[Times]],
) -> list[dict[str, Any]]:
    """For each figure, both sides, errors, and which pairs of policies can be told apart, and are
    ranked otherwise."""
    found = []
    for name, percentile in FIGURES:
        rank = float(percentile[1:])
        rows = {}
        for policy, runs in live.items():
            values = [float(np.percentile(run[name], rank)) for run in runs]
            middle = float(np.median(values))
            told = [float(np.percentile(run[name], rank)) for run in simulated[policy]]
            predicted = float(np.median(told))
            scaled = [np.percentile(run[name], rank) for run in at_live_speed[policy]]
            rows[policy] = {
                "live": middle,
                "noise": None if len(runs) < 2 else (max(values) - min(values)) / middle,
                "simulated": predicted,
                "scatter": (max(told) - min(told)) / predicted,
                "error": predicted / middle - 1,
                "error_at_live_speed": float(np.median(np.divide(scaled, values))) - 1,
            }
        decided, otherwise = ranked(rows)
        found.append(
            {
                "figure": f"{name} {percentile}",
                "policies": rows,
                "pairs": len(rows) * (len(rows) - 1) // 2,
                "decided": len(decided),
                "ranked_otherwise": otherwise,
            }
        )
    return found


def ranked(
    rows: dict[str, dict[str, Any]],
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs that live are further apart than noise, and those of them that are simulated in the
    other order."""
    decided: list[tuple[str, str]] = []
    otherwise: list[tuple[str, str]] = []
    for one, other in itertools.combinations(rows, 2):
        a, b = rows[one], rows[other]
        apart = abs(a["live"] - b["live"]) / min(a["live"], b["live"])
        if apart <= max(a["noise"] or 0.0, b["noise"] or 0.0, TIE):
            continue
        decided.append((one, other))
        if (a["live"] < b["live"]) != (a["simulated"] < b["simulated"]):
            otherwise.append((one, other))
    return decided, otherwise


def print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A file has room for all columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    options, machine, steps = result["options"], result["machine"], result["live_steps"]
    speeds = [speed for runs in result["speeds"].values() for speed in runs]
    source = options["synthetic"] if options["trace"] == "None" else Path(options["trace"]).name
    console.print(
        f"{source}: {result['requests']} requests in {result['seconds']:.1f} s "
        f"({result['left_out']} too long), {options['model']}, {machine['threads']} threads, "
        f"{options['repeats']} live runs of each policy",
        soft_wrap=True,
    )
    console.print(
        f"{result['measured_steps']:,} steps measured; of {steps['steps']:,} live steps the table "
        f"tells the sum with {steps['total']:+.1%}, each with {steps['median']:.1%} (median); "
        f"single runs took {min(speeds):.2f} to {max(speeds):.2f} times what it says",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    columns = (
        "",
        "policy",
        "live, ms",
        "noise",
        "simulated, ms",
        "scatter",
        "error",
        "at its speed",
    )
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("", "policy") else "right", no_wrap=True
        )
    errors: dict[str, list[float]] = {"error": [], "error_at_live_speed": []}
    for figure in result["figures"]:
        name, percentile = figure["figure"].split()
        for number, (policy, row) in enumerate(figure["policies"].items()):
            for kind, values in errors.items():
                values.append(abs(row[kind]))
            table.add_row(
                "" if number else f"{name.upper()} {percentile}",
                policy,
                f"{row['live'] * 1e3:,.2f}",
                "-" if row["noise"] is None else f"{row['noise']:.1%}",
                f"{row['simulated'] * 1e3:,.2f}",
                f"{row['scatter']:.1%}",
                f"{row['error']:+.1%}",
                f"{row['error_at_live_speed']:+.1%}",
            )
    console.print(table)
    plain, scaled = errors.values()
    console.print(
        f"errors: median {np.median(plain):.1%}, largest {max(plain):.1%}; at the speed of the "
        f"live run: median {np.median(scaled):.1%}, largest {max(scaled):.1%}",
        soft_wrap=True,
    )
    print_ranking(console, result)


def print_ranking(console: Any, result: dict[str, Any]) -> None:
    """How many pairs of policies can be told apart, and how many of those the simulator has right,
    by each figure and in all."""
    found = result["figures"]
    for figure in found:
        otherwise = figure["ranked_otherwise"]
        names = "; ".join(" and ".join(pair) for pair in otherwise)
        console.print(
            f"by {figure['figure']}: the noise decides {figure['decided']} of {figure['pairs']} "
            f"pairs of policies, {figure['decided'] - len(otherwise)} of them are simulated in the "
            f"same order{names and f', and not {names}'}",
            soft_wrap=True,
        )
    decided = sum(figure["decided"] for figure in found)
    wrong = sum(len(figure["ranked_otherwise"]) for figure in found)
    console.print(
        f"in all: {decided} of {sum(figure['pairs'] for figure in found)} pairs decided, "
        f"{decided - wrong} in the same order; {result['steps_outside']:.1%} of simulated steps, "
        f"at most, are none that were measured",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
