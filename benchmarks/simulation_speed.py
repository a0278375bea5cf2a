"""Measures the simulator's speed: requests of a recorded trace a second, and the gain over single
steps.

The gain is the ratio to the speed when the simulator takes each step by itself. The trace is
repeated until there are as many requests as asked for; its model is llama-3-8b on one H100. Both
ways run in turn, and must give the same results to the last digit.

    python benchmarks/simulation_speed.py DIR/azure2023_code.csv.gz DIR/servegen_deepseek_r1.csv.gz
    python benchmarks/simulation_speed.py --requests 100000 --fast-only DIR/azure2023_code.csv.gz
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from unittest import mock

from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation import fast_forward
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TraceRequest, repeated

MODEL, HARDWARE = "llama-3-8b", "h100"
MILLION = 1_000_000


def main() -> None:
    arguments = parsed()
    print(
        f"{'':28} {'requests':>9} {'steps':>9} {'seconds':>8} {'requests/s':>11} "
        f"{'1 million, s':>13} {'one by one, s':>14} {'ratio':>6}"
    )
    for path in arguments.trace:
        trace = repeated(read_trace(path), arguments.requests)
        seconds, result = timed(trace, arguments.policy)
        pace = len(trace) / seconds
        line = (
            f"{path.name:28} {len(trace):9,} {result.steps:9,} {seconds:8.2f} {pace:11,.0f} "
            f"{MILLION / pace:13,.0f}"
        )
        if not arguments.fast_only:
            with mock.patch.object(fast_forward, "LEAST_STEPS", math.inf):
                slow_seconds, slow = timed(trace, arguments.policy)
            if repr(slow) != repr(result):
                sys.exit(f"{path.name}: one by one, steps give other results")
            line += f" {slow_seconds:14.2f} {slow_seconds / seconds:6.1f}"
        print(line, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=1000, help="of each trace")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument(
        "--fast-only", action="store_true", help="without taking the steps one by one"
    )
    return parser.parse_args()


def timed(trace: list[TraceRequest], policy: str) -> tuple[float, SimulationResult]:
    model, hardware = read_model(MODEL), hardware_preset(HARDWARE)
    fits = capacity_of(MODEL, model, gpu_memory_bytes=hardware.memory_bytes)
    began = time.perf_counter()
    result = simulate(
        trace,
        PluginRegistry().policy(policy),
        cost=RooflineCost(ModelShape.of(model), hardware),
        num_pages=fits.num_pages,
    )
    return time.perf_counter() - began, result


if __name__ == "__main__":
    main()
