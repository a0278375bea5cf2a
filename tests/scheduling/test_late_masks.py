"""Cost of a late mask to its sequence: one token is computed again, and no more."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve.request import Request, SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.sequence import Phase
from aioserve.scheduling.step_builder import PATIENT_STEPS
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan
from aioserve.structured_output import StructuredOutput
from aioserve.testing import expected_tokens
from tests.scheduling.bench import Bench

PROMPT = [i * i % 251 for i in range(90)]
NUM_TOKENS = 30
TOKENS = expected_tokens(PROMPT, NUM_TOKENS)
FORM = SamplingParams(temperature=0.0, structured_output=StructuredOutput(json_object=True))


class Served:
    """One request with structured output, whose masks for tokens at some positions come late."""

    def __init__(
        self, late: Collection[int], *, depth: int = 2, told: str = "after", **options: Any
    ):
        """`told` says when they come: "before" the step's commit, "after" it, or a "step" later.
        With "never", the test decides."""
        self.bench = Bench(**options)
        self.told = told
        self.late = {len(PROMPT) + index for index in late}
        self.pipeline = StepPipeline(self.bench.scheduler, lambda plan: plan, depth=depth)
        (self.sequence_id,) = self.bench.scheduler.submit(
            Request(
                request_id="r",
                prompt_ids=np.array(PROMPT, np.int32),
                max_length=len(PROMPT) + NUM_TOKENS,
                params=FORM,
            )
        )
        self.guide()
        self.tokens: list[int] = []
        self.plans: list[StepPlan] = []
        self.num_late = self.num_dropped = 0
        self.num_untold = 0

    @property
    def sequence(self):
        return self.bench.sequences[self.sequence_id]

    def guide(self) -> None:
        self.bench.scheduler.guide(self.sequence_id)
        self.bench.scheduler.sanity_check()

    def step(self) -> None:
        if self.num_untold == 1:
            self.guide()
        self.num_untold = max(0, self.num_untold - 1)
        plan = self.pipeline.advance(0.0)
        self.bench.scheduler.sanity_check()
        self.plans += [] if plan is None else [plan]
        if self.pipeline.due is not None:
            self.finish(self.pipeline.in_flight[0])

    def finish(self, plan: StepPlan) -> None:
        """Finish a step. If the mask isn't late, or the row will be dropped, anything may be
        drawn."""
        ((run, item, _),) = self.bench.scheduler.state.in_flight[plan.step]
        masks = LateMasks(range(len(item.rows)))
        is_late = run.goes_on and bool(item.rows) and item.end in self.late
        self.num_dropped += not run.goes_on
        if is_late:
            self.late.discard(item.end)
            self.num_late += 1
        elif item.rows:
            masks.bring(0, None)
        outcome = self.bench.device.execute(plan, masks)
        if is_late and self.told == "before":
            self.guide()
        updates = self.pipeline.finish(outcome, 0.0)
        self.bench.scheduler.sanity_check()
        self.tokens += [u.token_id for u in updates if u.token_id is not None]
        if is_late:
            self.num_untold = {"before": 0, "after": 1, "step": 3, "never": 0}[self.told]
        elif updates and self.bench.sequences and self.sequence.num_known not in self.late:
            self.guide()

    def run(self) -> None:
        for _ in range(10 * (len(PROMPT) + NUM_TOKENS)):
            if not self.bench.sequences:
                break
            self.step()
        while self.pipeline.in_flight:
            self.finish(self.pipeline.in_flight[0])
        assert self.tokens == TOKENS
        memory = self.bench.memory
        assert memory.pool.num_free + memory.num_cached == memory.pool.num_pages


@pytest.mark.parametrize("told", ["before", "after", "step"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_late_mask_costs_one_token_that_is_computed_again(
    told: str, depth: int, page_size: int, prefix_caching: bool
) -> None:
    late = range(1, NUM_TOKENS, 2)
    served = Served(
        late,
        depth=depth,
        told=told,
        num_pages=128,
        page_size=page_size,
        prefix_caching=prefix_caching,
    )
    served.run()
    assert served.num_late == len(late)
    computed = served.bench.scheduler.counters.tokens_processed
    assert computed - served.num_dropped == len(PROMPT) + NUM_TOKENS - 1 + len(late)
    assert served.num_dropped <= (depth - 1) * (len(late) + 1)
    starts = [start.slot for plan in served.plans for start in plan.started_slots]
    assert len(starts) == 1
    assert [plan.step for plan in served.plans if plan.ended_slots] == []


@pytest.mark.parametrize("num_host_pages", [0, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("told", ["before", "step"])
def test_one_that_waits_for_its_mask_may_be_preempted(
    num_host_pages: int, prefix_caching: bool, told: str
) -> None:
    served = Served(
        range(1, NUM_TOKENS, 3),
        told=told,
        prefix_caching=prefix_caching,
        num_host_pages=num_host_pages,
        preemption="swap" if num_host_pages else "recompute",
    )
    preempted = 0
    while served.bench.sequences:
        num_late = served.num_late
        served.step()
        state = served.bench.scheduler.state
        if served.num_late > num_late and served.sequence.phase is Phase.RUNNING:
            state.preempt(served.sequence, state.launched + 1)
            served.bench.scheduler.sanity_check()
            preempted += 1
    served.run()
    assert preempted == 10


@pytest.mark.parametrize("told", ["before", "after"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_step_of_which_it_drops_the_result_may_fail(told: str, prefix_caching: bool) -> None:
    served = Served([6], told=told, prefix_caching=prefix_caching)
    while not served.num_late:
        served.step()
    (behind,) = served.pipeline.in_flight
    served.bench.device.execute_in_part(behind, 1)
    assert served.pipeline.fail("planted") == []
    served.bench.scheduler.sanity_check()
    served.run()


def test_samples_whose_first_masks_are_late_begin_again() -> None:
    bench = Bench(prefix_caching=True)
    request = Request(
        request_id="r",
        prompt_ids=np.array(PROMPT[:9], np.int32),
        max_length=13,
        params=msgspec.structs.replace(FORM, n=3),
        seed=5,
    )
    ids = bench.scheduler.submit(request)
    for sequence_id in ids:
        bench.scheduler.guide(sequence_id)
    plan = bench.plan()
    behind = bench.plan()
    masks = LateMasks([0, 1, 2])
    masks.bring(1, None)
    outcome = bench.device.execute(plan, masks)
    told = {u.sequence_id: [u.token_id] for u in bench.scheduler.commit(plan, outcome, 0.0)}
    assert list(told) == [ids[1]]
    assert [s.sequence_id for s in bench.waiting] == [ids[0], ids[2]]
    told[ids[1]] += [u.token_id for u in bench.commit(behind)]
    for sequence_id, token_ids in bench.run().items():
        told[sequence_id] = told.get(sequence_id, []) + token_ids
    assert told == {
        sequence_id: expected_tokens(PROMPT[:9], 4, 5 + sample)
        for sample, sequence_id in enumerate(ids)
    }


def test_drafts_of_a_row_without_its_mask_are_gone() -> None:
    served = Served([], depth=1, prefix_caching=True, page_size=2)
    while len(served.tokens) < 3:
        served.step()
    bench, state = served.bench, served.bench.scheduler.state
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.device.execute(plan)
    ((run, item, _),) = state.in_flight[plan.step]
    assert bench.memory.reserve(run.lease, 4, plan.step)
    bench.memory.advance(run.lease, 4, plan.step)
    token_ids = np.array([item.token_ids[0], *TOKENS[3:7]], np.int32)
    item = msgspec.structs.replace(item, kind=ItemKind.VERIFY, count=5, token_ids=token_ids)
    state.in_flight[plan.step] = [(run, item, run.lease.page_ids)]
    plan = msgspec.structs.replace(plan, items=(item,))
    none = StepOutcome(step=plan.step, token_ids=(), token_counts={0: 0})
    assert bench.scheduler.commit(plan, none, 0.0) == []
    bench.scheduler.sanity_check()
    assert run.lease.computed == len(PROMPT) + 2
    served.run()


def test_one_whose_mask_does_not_come_makes_room_for_those_that_wait() -> None:
    served = Served([5], told="never", max_num_seqs=2)
    bench = served.bench
    while not served.num_late:
        served.step()
    for plan in served.pipeline.in_flight:
        served.finish(plan)
    sequence = served.sequence
    bench.submit(PROMPT[:3], max_tokens=100)
    waits = bench.submit(PROMPT[:3], max_tokens=1)
    for _ in range(PATIENT_STEPS - 1):
        bench.step()
        assert sequence.phase is Phase.RUNNING
    for _ in range(3):
        bench.step()
    assert sequence.phase is Phase.WAITING
    assert waits not in bench.sequences
    served.guide()
    while len(served.tokens) < NUM_TOKENS:
        updates = bench.step()
        mine = [u.token_id or 0 for u in updates if u.sequence_id == served.sequence_id]
        served.tokens += mine
        if mine and served.sequence_id in bench.sequences:
            served.guide()
    assert served.tokens == TOKENS


@pytest.mark.parametrize("short_of", ["slots", "pages"])
def test_nobody_stands_still_for_a_mask_alone(short_of: str) -> None:
    """The sequence whose mask is late is older, and nothing else can be computed."""
    slots = 1 if short_of == "slots" else 2
    served = Served([5], told="never", max_num_seqs=slots, num_pages=32, page_size=4)
    bench = served.bench
    while not served.num_late:
        served.step()
    for plan in served.pipeline.in_flight:
        served.finish(plan)
    other = bench.submit(PROMPT[:3], max_tokens=120)
    tokens: list[int] = []
    while other in bench.sequences:
        tokens += [u.token_id for u in bench.step() if u.token_id is not None]
    assert tokens == expected_tokens(PROMPT[:3], 120)
    served.guide()
    served.pipeline.drain()
    served.run()
