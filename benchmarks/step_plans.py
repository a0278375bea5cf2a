"""Measures the host's cost of a step of decodes: to plan, to read, to commit, and to send
elsewhere.

    python benchmarks/step_plans.py [--running 256] [--context 8192] [--rounds 30]

`--running` sequences decode at `--context` tokens of context, each plan made while the step before
it is in flight, as an engine does. Times are medians and minima of processor time, in microseconds.
Sizes are of 16 steps in a row, in one of which each sequence gets a page. When plans carried page
tables, 256 decodes at 8,192 tokens were 552 kB, 525 of them page ids.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import numpy as np

from aioserve.execution.step_arrays import PlanReader
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import pages_for
from aioserve.request import Request, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.encoding import encoded_plan
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

T = TypeVar("T")

PAGE_SIZE = 16
STEPS_PER_ROUND = 16


class Load:
    """Sequences that decode, and a runner that reads and computes nothing."""

    def __init__(self, running: int, context: int, num_steps: int) -> None:
        longest = context + num_steps + 2 * STEPS_PER_ROUND
        self.scheduler = Scheduler(
            KVMemory.of([running * pages_for(longest, PAGE_SIZE)], PAGE_SIZE),
            SchedulingPolicy(),
            max_num_seqs=running,
            max_num_batched_tokens=running * context,
            output_reserve_tokens=0,
        )
        self.reader = PlanReader(PAGE_SIZE, self.scheduler.num_slots)
        self.flying: StepPlan | None = None
        for number in range(running):
            self.scheduler.submit(
                Request(
                    request_id=str(number),
                    # Lengths and first tokens differ: pages end in different steps, and no prefix
                    # is shared.
                    prompt_ids=number + np.arange(context - number % PAGE_SIZE, dtype=np.int32),
                    params=SamplingParams(),
                    max_length=longest,
                    arrival_seconds=0.0,
                )
            )
        self.step()
        self.step()

    def step(self) -> tuple[StepPlan, tuple[float, float, float]]:
        """Plan one more step; return the plan and three durations in microseconds.

        They are for planning it, reading it, and committing the step before.
        """
        plan, plan_us = timed(lambda: self.scheduler.plan(0.0))
        if plan is None:
            raise AssertionError("there is a step to plan")
        _, read_us = timed(lambda: self.reader.read(plan))
        flying, self.flying, commit_us = self.flying, plan, 0.0
        if flying is not None:
            rows = sum(len(item.rows) for item in flying.items)
            outcome = StepOutcome(step=flying.step, token_ids=(7,) * rows)
            _, commit_us = timed(lambda: self.scheduler.commit(flying, outcome, 0.0))
        return plan, (plan_us, read_us, commit_us)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.thread_time_ns()
    result = call()
    return result, (time.thread_time_ns() - began) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30, help="of 16 steps")
    options = parser.parse_args()
    load = Load(options.running, options.context, options.rounds * STEPS_PER_ROUND)
    steps = [load.step() for _ in range(options.rounds * STEPS_PER_ROUND)]
    for name, values in zip(
        ("plan", "read", "commit"), np.array([t for _, t in steps]).T, strict=True
    ):
        print(f"{name:8}{median(values):8.0f} us, at least {min(values):.0f}")
    both = [plan_us + commit_us for _, (plan_us, _, commit_us) in steps]
    print(f"{'both':8}{median(both):8.0f} us, at least {min(both):.0f}: plan and commit")
    plans = [plan for plan, _ in steps[-STEPS_PER_ROUND:]]
    sizes = [len(encoded_plan(plan)) for plan in plans]
    print(f"encoded {median(sizes) / 1000:8.1f} kB, at most {max(sizes) / 1000:.1f}")


if __name__ == "__main__":
    main()
