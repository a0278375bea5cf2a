"""Measures the host's cost to plan steps under each policy, against one that overrides nothing.

    python benchmarks/planning.py [--running 256] [--waiting 2000] [--deep 20000] [--json FILE]

`Scheduler.plan` and `commit` run without a model, each plan while the step before it is in flight,
in eight situations:

    no seat   all that run decode, and there is no seat for those that wait
    no pages  the same, but there are seats, and no pages
    deep      the same, where `--deep` requests wait
    resting   the same as "no seat", and each asks for draft tokens, which are never right
    prompt    all that run decode but one, whose prompt is computed in chunks
    turnover  answers end, and others start
    alike     the same, where all prompts begin alike
    short     the same with fewer pages than those that run need: some are preempted

The policies are the installed ones. For each method of `SchedulingPolicy` there is one more, whose
own method does the same as the default. They take turns: `--rounds` times `--steps` steps of each.
For the first row the medians are printed, in microseconds of processor time a step. For the others
it is the ratio to the first: the median over the rounds of the ratios of medians.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np

from aioserve import RequestView, SchedulingPolicy, _native
from aioserve.hints import SchedulingHints
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import pages_for
from aioserve.plugins import PluginRegistry
from aioserve.request import Request, SamplingParams
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan

T = TypeVar("T")

BASELINE = "nothing overridden"
WHAT = "plan", "commit"
NEVER_ASKED = "starvation_bound_tokens"
PAGE_SIZE = 16
PROMPT_TOKENS = ANSWER_TOKENS = 64
TOKENS_ALIKE = 512
DRAFT_TOKENS = 4
STEP_SECONDS = 0.02
NUM_TENANTS = 8
NUM_PRIORITIES = 3
NEVER_SECONDS = 1e6
WARM_STEPS = 3 * ANSWER_TOKENS


class Sizes(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    deep: int
    """Number of requests that wait in the situation deep."""
    rounds: int
    steps: int
    """Steps of each policy in each round."""


class Load:
    """Scheduler and its requests, step by step."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        num_pages: int,
        seats: int,
        step_tokens: int,
        reserve_tokens: int = 0,
        tokens_alike: int = 0,
    ) -> None:
        self.scheduler = Scheduler(
            KVMemory.of([num_pages], PAGE_SIZE),
            policy,
            max_num_seqs=seats,
            max_num_batched_tokens=step_tokens,
            output_reserve_tokens=reserve_tokens,
        )
        self.come_back = False
        """True if callers send their next request when one has ended."""
        self._callers: dict[int, int] = {}
        """Callers by sequence id."""
        self._random = np.random.default_rng(0)
        self._beginning = self._random.integers(0, 2**15, tokens_alike, np.int32)
        self._flying: StepPlan | None = None
        self._now = 0.0

    def submit(
        self,
        caller: int,
        prompt_tokens: int = PROMPT_TOKENS,
        answer_tokens: int = ANSWER_TOKENS,
        priority: int | None = None,
        max_draft_tokens: int = 0,
    ) -> None:
        ids = self._random.integers(0, 2**15, prompt_tokens, np.int32)
        ids = np.concatenate([self._beginning, ids])
        (sequence_id,) = self.scheduler.submit(
            Request(
                request_id=f"caller {caller}",
                prompt_ids=ids,
                max_length=len(ids) + answer_tokens,
                params=SamplingParams(),
                max_draft_tokens=max_draft_tokens,
                arrival_seconds=self._now,
                hints=SchedulingHints(
                    tenant=f"tenant {caller % NUM_TENANTS}",
                    session_id=f"session {caller}",
                    priority=caller % NUM_PRIORITIES if priority is None else priority,
                    ttft_target_seconds=NEVER_SECONDS,
                    tpot_target_seconds=NEVER_SECONDS,
                ),
            )
        )
        self._callers[sequence_id] = caller

    def step(self) -> tuple[float, float]:
        """Plan a step and commit the one before it; return the microseconds of both."""
        self._now += STEP_SECONDS
        plan, plan_us = timed(lambda: self.scheduler.plan(self._now))
        flying, self._flying = self._flying, plan
        if flying is None:
            return plan_us, 0.0
        outcome = outcome_of(flying)
        self.scheduler.charge(flying, STEP_SECONDS)
        updates, commit_us = timed(lambda: self.scheduler.commit(flying, outcome, self._now))
        for update in updates if self.come_back else ():
            if update.finish_reason is not None:
                self.submit(self._callers.pop(update.sequence_id))
        return plan_us, commit_us

    def step_until_all_decode(self) -> None:
        sequences = self.scheduler.state.sequences
        for _ in range(sum(s.remaining for s in sequences.values())):
            if all(s.remaining == 1 for s in sequences.values()):
                return
            self.step()
        raise AssertionError("more steps than tokens, and not all decode")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.thread_time_ns()
    result = call()
    return result, (time.thread_time_ns() - began) / 1000


def outcome_of(plan: StepPlan) -> StepOutcome:
    """Return an outcome with a token for each row; draft tokens are made and are wrong."""
    tokens = [item.start for item in plan.items for _ in item.rows]
    drafted = {
        index: item.count - 1
        for index, item in enumerate(plan.items)
        if item.kind is ItemKind.VERIFY
    }
    return StepOutcome(step=plan.step, token_ids=tuple(tokens), drafted=drafted)


# -- situations


def no_seat(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return decodes(policy, sizes, seats=sizes.running)


def no_pages(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return decodes(policy, sizes, seats=2 * sizes.running, reserves=True)


def deep(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return no_pages(policy, msgspec.structs.replace(sizes, waiting=sizes.deep))


def resting(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    load = decodes(policy, sizes, seats=sizes.running, drafts=DRAFT_TOKENS)
    for _ in range(WARM_STEPS):
        load.step()
    return load


def prompt(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return decodes(policy, sizes, seats=sizes.running + 1, prompts=1)


def decodes(
    policy: SchedulingPolicy,
    sizes: Sizes,
    *,
    seats: int,
    prompts: int = 0,
    reserves: bool = False,
    drafts: int = 0,
) -> Load:
    """Return a load of answers and prompts that last longer than the measurement.

    If the engine reserves pages for answers, it does so for all of them, so that none are left for
    others.
    """
    num_steps = sizes.rounds * sizes.steps + WARM_STEPS + 1
    answer, prompt = num_steps + sizes.running * PROMPT_TOKENS, num_steps * sizes.running
    needed = sizes.running * pages_for(PROMPT_TOKENS + answer, PAGE_SIZE)
    load = Load(
        policy,
        num_pages=needed + prompts * pages_for(prompt + 1, PAGE_SIZE),
        seats=seats,
        step_tokens=2 * sizes.running,
        reserve_tokens=answer if reserves else 0,
    )
    for caller in range(sizes.running):
        load.submit(caller, answer_tokens=answer, priority=0, max_draft_tokens=drafts)
    load.step_until_all_decode()
    for _ in range(prompts):
        load.submit(0, prompt, 1, priority=0)
        load.step()
    for caller in range(sizes.waiting):
        load.submit(caller)
    return load


def turnover(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return comings_and_goings(policy, sizes, share=2.0)


def alike(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return comings_and_goings(policy, sizes, share=2.0, tokens_alike=TOKENS_ALIKE)


def short(policy: SchedulingPolicy, sizes: Sizes) -> Load:
    return comings_and_goings(policy, sizes, share=0.6)


def comings_and_goings(
    policy: SchedulingPolicy, sizes: Sizes, *, share: float, tokens_alike: int = 0
) -> Load:
    """Return a load of callers who come back.

    There is `share` of the pages that all running requests need at the end of their answers.
    """
    each = pages_for(PROMPT_TOKENS + ANSWER_TOKENS, PAGE_SIZE)
    load = Load(
        policy,
        num_pages=int(share * sizes.running * each) + each + tokens_alike // PAGE_SIZE,
        seats=sizes.running,
        step_tokens=2 * sizes.running,
        tokens_alike=tokens_alike,
    )
    for caller in range(sizes.running + sizes.waiting):
        load.submit(caller)
    load.come_back = True
    for _ in range(WARM_STEPS):
        load.step()
    return load


SITUATIONS: dict[str, Callable[[SchedulingPolicy, Sizes], Load]] = {
    "no seat": no_seat,
    "no pages": no_pages,
    "deep": deep,
    "resting": resting,
    "prompt": prompt,
    "turnover": turnover,
    "alike": alike,
    "short": short,
}


# -- policies


class PinsAll(SchedulingPolicy):
    def pin(self, request: RequestView) -> int:
        return request.computed_tokens


def answering(method: str) -> SchedulingPolicy:
    """Return a policy that overrides one method, with the default's behaviour."""
    default = getattr(SchedulingPolicy, method)

    def own(self: SchedulingPolicy, *arguments: Any) -> Any:
        return default(self, *arguments)

    return type(f"Own_{method}", (SchedulingPolicy,), {method: own})()


def policies_to_try(named: list[str] | None) -> dict[str, Callable[[], SchedulingPolicy]]:
    registry = PluginRegistry()
    tried: dict[str, Callable[[], SchedulingPolicy]] = {BASELINE: SchedulingPolicy}
    for name in sorted(registry.policies) if named is None else named:
        tried[name] = partial(registry.policy, name)
    if named is None:
        for method, function in vars(SchedulingPolicy).items():
            if inspect.isfunction(function) and method != NEVER_ASKED:
                tried[f"own {method}"] = partial(answering, method)
        tried["pins all"] = PinsAll
    return tried


# -- measuring


def measure(
    situation: str, policies: dict[str, Callable[[], SchedulingPolicy]], sizes: Sizes
) -> dict[str, list[tuple[float, float]]]:
    """Return by policy and round the medians of `plan` and `commit`, in microseconds."""
    loads = {name: SITUATIONS[situation](make(), sizes) for name, make in policies.items()}
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    gc.collect()
    gc.freeze()  # requests by the ten thousand, which no engine has
    for _ in range(sizes.rounds):
        for name, load in loads.items():
            steps = [load.step() for _ in range(sizes.steps)]
            plans, commits = zip(*steps, strict=True)
            medians[name].append((median(plans), median(commits)))
    gc.unfreeze()
    faults = {name: load.scheduler.policy_calls.last_fault for name, load in loads.items()}
    for name, fault in faults.items():
        if fault is not None:
            raise AssertionError(f"{name}: {fault}")
    return medians


def compared(medians: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return a row for each policy."""
    rows: list[dict[str, Any]] = []
    baseline = medians[BASELINE]
    for name, rounds in medians.items():
        row: dict[str, Any] = {"policy": name}
        for place, what in enumerate(WHAT):
            row[f"{what}_us"] = median(one[place] for one in rounds)
            row[f"{what}_ratio"] = median(
                one[place] / base[place] for one, base in zip(rounds, baseline, strict=True)
            )
        rows.append(row)
    return rows


def print_table(what: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    print(f"{what:24}" + "".join(f"{situation:>10}" for situation in tables))
    for rows in zip(*tables.values(), strict=True):
        unit, form = ("us", "10.0f") if rows[0]["policy"] == BASELINE else ("ratio", "10.2f")
        cells = [format(row[f"{what}_{unit}"], form) for row in rows]
        print(f"{rows[0]['policy']:24}{''.join(cells)}")


def main() -> None:
    options = parsed()
    sizes = Sizes(options.running, options.waiting, options.deep, options.rounds, options.steps)
    policies = policies_to_try(options.policies)
    print(f"{_native.cpu_info()}, {sizes}")
    tables = {name: compared(measure(name, policies, sizes)) for name in options.situations}
    for what in WHAT:
        print_table(what, tables)
    if options.json is not None:
        options.json.write_text(json.dumps(tables, indent=2), encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--deep", type=int, default=20_000, help="waiting in a deep queue")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of each policy in each round")
    parser.add_argument(
        "--situations", nargs="+", default=list(SITUATIONS), choices=SITUATIONS, metavar="NAME"
    )
    parser.add_argument(
        "--policies", nargs="+", metavar="NAME", help="these alone, with options as for the engine"
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
