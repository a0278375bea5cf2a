"""Exceptions at any line of planning a step: the state stays consistent.

Each run counts the lines that planning executes in the scheduler and in the KV memory. It then runs
again for some of them and raises there. The request that was being planned ends with an error, or
nothing does; every other request gets exactly its tokens.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import aioserve
from aioserve.errors import InvariantError
from aioserve.kv import (
    claims,
    lease,
    memory,
    page_pool,
    page_table,
    prefix_tree,
    usage,
)
from aioserve.kv.groups import base as group
from aioserve.kv.groups import full, making, window
from aioserve.kv.tiers import copies, swapping, tier
from aioserve.paging import layout, pages
from aioserve.request import FinishReason
from aioserve.scheduling import (
    account,
    admission,
    making_room,
    pins,
    planner,
    policy_calls,
    priority_preemption,
    reserve,
    room,
    scheduler,
    sequence,
    slots,
    state,
    step_builder,
    token_budget,
    updates,
    view,
    waiting_queue,
)
from aioserve.scheduling.parts import (
    base,
    draw,
    forced,
    mask,
    pool,
    pooling_state,
    score,
    verifying,
)
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy, Verdict
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.speculation import budget, drafts, verify
from aioserve.steps import plan
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench
from tests.scheduling.request_model import RequestModel

MODULES = (planner, scheduler, state, slots, sequence, reserve, room, memory, lease, page_table)
MODULES += (
    policy_calls,
    view,
    account,
    priority_preemption,
    pooling_state,
    page_pool,
    pages,
    prefix_tree,
    token_budget,
)
MODULES += (
    pins,
    waiting_queue,
    claims,
    copies,
    swapping,
    tier,
    group,
    full,
    making,
    window,
    usage,
    plan,
    layout,
)
MODULES += (admission, making_room, step_builder)
MODULES += (base, draw, forced, mask, pool, score, verifying, budget, drafts, verify)
FILES = {module.__file__ for module in MODULES}


class PlantedError(Exception):
    pass


class Refusing(SchedulingPolicy):
    """Refuses every third request."""

    def admit(self, request, view):
        return Verdict.NEVER if request.arrival_index % 3 == 0 else Verdict.NOW


class LineTrap:
    """Counts the lines of `FILES` that are executed within it, and raises before one of them."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0
        self.where = ""

    def __enter__(self) -> LineTrap:
        self._before = sys.gettrace()
        if not self.where:  # there is nothing more to count
            sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        """Trace a frame. A generator may also go on in another place."""
        if frame.f_code.co_filename not in FILES:
            return None
        catches = frame.f_code is Scheduler.plan.__code__
        return self._line if not catches and is_of_plan(frame) else self._elsewhere

    def _elsewhere(self, frame: FrameType, event: str, arg: Any) -> Callable:
        return self._elsewhere

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise PlantedError(self.where)
        return self._line


def is_of_plan(frame: FrameType | None) -> bool:
    """True inside a plan. Exceptions elsewhere, for example in `commit`, are another matter."""
    while frame is not None and frame.f_code.co_filename in FILES:
        if frame.f_code.co_name == "plan":
            return True
        frame = frame.f_back
    return False


class Workload:
    """Requests that share beginnings, fork, swap, are evicted and preempted: drawn from a seed."""

    def __init__(self, seed: int, trap: LineTrap) -> None:
        draw = random.Random(seed)
        host = draw.choice([0, 0, 12])
        self.trap = trap
        groups = draw.choice([0, 0, 2])
        self.bench = Bench(
            num_pages=draw.randint(9, 16) + 12 * groups,
            num_host_pages=host,
            num_window_groups=groups,
            window=6 if groups else 0,
            page_size=draw.choice([1, 4]) if draw.random() < 0.3 else 4,
            prefix_caching=draw.random() < 0.8,
            preemption="swap" if host else "recompute",
            max_num_seqs=draw.randint(2, 5),
            max_num_batched_tokens=draw.choice([5, 16, 40]),
            policy=Refusing() if draw.random() < 0.3 else None,
        )
        self.draw = draw
        self.end_ids = frozenset(draw.sample(range(256), draw.choice([0, 40, 90])))
        self.failing = draw.choice([0.0, 0.0, 0.1])
        self.pipeline = StepPipeline(self.bench.scheduler, self._launched, depth=2)
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.failed: set[int] = set()
        self.ended: set[int] = set()
        self.request_of: dict[int, int] = {}
        self.models: dict[int, RequestModel] = {}
        self.now = 0.0
        longest = self.bench.memory.capacity_tokens
        self.todo = [self._draw_request(draw, longest) for _ in range(draw.randint(3, 6))]

    def _draw_request(self, draw: random.Random, longest: int) -> tuple[list[int], int, int]:
        shared = [*range(draw.choice([0, 3, 8]))]
        prompt = [*shared, *(draw.randint(0, 2) for _ in range(draw.randint(1, 4)))]
        prompt = prompt[: longest - 2]
        n = draw.randint(1, min(3, self.bench.scheduler.state.max_num_seqs))
        return prompt, draw.randint(1, min(8, longest - len(prompt))), n

    def _launched(self, plan: StepPlan) -> StepPlan:
        for run, item, _ in self.bench.scheduler.state.in_flight[plan.step]:
            if item.slot == run.slot:
                self.models[item.sequence_id].plan(item, run.sequence.epoch, self.now)
        return plan

    def run(self) -> None:
        scheduler = self.bench.scheduler
        for step in range(2000):
            if step % 2 == 0 and self.todo:
                self._submit(*self.todo.pop())
            self.now += 1.0
            with self.trap:
                self.pipeline.advance(self.now)
            scheduler.sanity_check()
            for model in self.models.values():
                model.check()
            for update in scheduler.take_ended_unplanned():
                self._take(update)
                scheduler.finish(update.sequence_id)  # as an engine does in any state
            if (plan := self.pipeline.due) is not None:
                for update in self._finish(plan):
                    self._take(update)
                scheduler.sanity_check()
            if not (self.todo or self.pipeline.in_flight or self.bench.sequences):
                break
        assert not self.bench.sequences, "requests that never end"
        for sequence_id, tokens in self.expected.items():
            if sequence_id not in self.ended:
                assert self.received[sequence_id] == tokens
        if self.bench.memory.tree is not None:
            self.bench.memory.tree.clear()
        assert self.bench.pool.num_free == self.bench.pool.num_pages
        assert all(tier.pool.num_held == 0 for tier in self.bench.memory.tiers[1:])
        assert scheduler.state.slots.num_free == scheduler.num_slots

    def _finish(self, plan: StepPlan) -> list[updates.SequenceUpdate]:
        outcome = self.bench.device.execute(plan)
        self.bench.scheduler.charge(plan, 1.0)
        for item in plan.items:
            self.models[item.sequence_id].charge(item.count / plan.num_tokens)
        if self.draw.random() < self.failing:
            return self.pipeline.fail("the step")
        if self.draw.random() < self.failing and plan.num_rows:
            outcome.row_errors[self.draw.randrange(plan.num_rows)] = "the row"
        return self.pipeline.finish(outcome, self.now)

    def _take(self, update: updates.SequenceUpdate) -> None:
        sequence_id = update.sequence_id
        assert sequence_id not in self.ended, "something comes after the end"
        if update.token_id is not None:
            self.received[sequence_id].append(update.token_id)
            self.models[sequence_id].take(sequence_id)
            assert (
                self.received[sequence_id]
                == self.expected[sequence_id][: len(self.received[sequence_id])]
            )
            assert (update.token_id in self.end_ids) == (update.finish_reason is FinishReason.STOP)
        if update.finish_reason is FinishReason.ERROR or update.token_id in self.end_ids:
            self.ended.add(sequence_id)
        if update.cause is not None:
            assert isinstance(update.cause, PlantedError), update.cause
            self.failed.add(sequence_id)

    def _submit(self, prompt: list[int], max_tokens: int, n: int) -> None:
        number = len(self.todo)
        sequence_ids = self.bench.submit_all(prompt, max_tokens, n=n, end_ids=self.end_ids)
        account = self.bench.scheduler.account_of(sequence_ids[0])
        model = RequestModel(sequence_ids, len(prompt), account)
        for sample, sequence_id in enumerate(sequence_ids):
            self.models[sequence_id] = model
            self.request_of[sequence_id] = number
            self.expected[sequence_id] = expected_tokens(prompt, max_tokens, seed=sample)
            self.received[sequence_id] = []


# A generator that is closed as garbage runs a line in some versions, and its exceptions are lost.
@pytest.mark.sampled(6)
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("seed", range(24))
def test_an_exception_at_any_line_of_planning_ends_at_most_the_request_that_was_planned(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    whole = LineTrap()
    Workload(seed, whole).run()
    assert whole.count > 500
    draw = random.Random(seed)
    for at in sorted(draw.sample(range(1, whole.count + 1), 60)):
        trap = LineTrap(at)
        workload = Workload(seed, trap)
        try:
            workload.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, raised before line number {at}: {trap.where}")
            raise
        assert trap.where
        assert len({workload.request_of[s] for s in workload.failed}) <= 1


def test_what_raises_at_no_sequence_again_and_again_is_raised_in_the_end(monkeypatch):
    bench = Bench()
    bench.submit(4)

    def broken(step: object) -> None:
        raise PlantedError("always")

    monkeypatch.setattr(planner, "_split_running", broken)
    with pytest.raises(PlantedError, match="always"):
        bench.scheduler.plan(0.0)
    bench.scheduler.sanity_check()


def test_work_that_cannot_be_planned_and_that_nothing_holds_up_is_a_bug_that_is_raised(monkeypatch):
    bench = Bench()
    bench.submit(4)
    monkeypatch.setattr(planner, "_force_progress", lambda step: None)
    monkeypatch.setattr(planner, "admit", lambda step, forced: False)
    with pytest.raises(InvariantError, match="nothing is planned, nothing is in flight"):
        bench.scheduler.plan(0.0)


def test_no_line_of_planning_is_outside_the_files_that_are_watched():
    """Policies and a request's properties, which are read-only, are left out, and so are plain
    values."""
    seen = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        seen.add(frame.f_code.co_filename)

    for seed in range(6):
        workload = Workload(seed, LineTrap())
        plan = workload.bench.scheduler.plan

        def traced(now_seconds: float, plan: Callable = plan) -> StepPlan | None:
            sys.settrace(note)
            try:
                return plan(now_seconds)
            finally:
                sys.settrace(None)

        workload.bench.scheduler.plan = traced
        workload.run()
    package = os.path.dirname(aioserve.__file__)
    others = {os.path.relpath(f, package) for f in seen - FILES if f.startswith(package)}
    assert others <= {
        "arguments.py",
        "isolation.py",
        "kv/eviction.py",
        "request.py",
        "sampling_params.py",
        "scheduling/policy.py",
        "scheduling/sanity.py",
    }
