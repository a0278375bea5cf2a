"""The host's calls of a worker, and what it keeps from the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import InvariantError
from aioserve.execution.host import Host
from aioserve.execution.step_arrays import StepArrays
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import SampleRow, SlotStart, StepPlan
from tests.doubles.drafters import ScriptedDrafter, right_up_to
from tests.placed import placed_item, placed_plan

PAGE_SIZE = 4
COPY = PageCopy(0, 0, 0, 1, PAGE_SIZE)


class Recorder:
    """A `Worker` that keeps its calls, and draws the number of the step in each row."""

    max_in_flight = 1

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        self.calls.append(("copy", copies.tolist()))

    def step(self, block: StepArrays) -> Drawn:
        self.calls.append(("step", block.step, block.copies.tolist()))
        return Drawn(block)

    def close(self) -> None:
        self.calls.append(("close",))


@dataclass
class Drawn:
    block: StepArrays

    def outcome(self) -> StepOutcome:
        return self.block.outcome([self.block.step] * len(self.block.samples), {})


def plan_of(step: int, *slots: int, **fields: Any) -> StepPlan:
    """Make a step with a token of each slot."""
    items = tuple(
        placed_item(
            sequence_id=slot,
            slot=slot,
            start=0,
            count=1,
            token_ids=np.array([7], np.int32),
            page_ids=np.array([slot], np.int32),
            rows=(SampleRow(offset=0, slot=slot),),
        )
        for slot in slots
    )
    return placed_plan(step=step, items=items, **fields)


def starts(*slots: int) -> tuple[SlotStart, ...]:
    return tuple(SlotStart(slot=slot, params=SamplingParams(), seed=0) for slot in slots)


def step(host: Host, worker: Recorder, plan: StepPlan) -> StepOutcome:
    return host.step(plan, host.read(plan), worker)


def test_a_worker_is_given_the_copies_of_a_step_with_it() -> None:
    host, worker = Host(PAGE_SIZE, 2, 1), Recorder()
    outcome = step(host, worker, plan_of(5, 0, 1, started_slots=starts(0, 1), copies=(COPY,)))
    assert outcome.token_ids == (5, 5)
    assert worker.calls == [("step", 5, [[0, 0, 0, 1, PAGE_SIZE]])]


def test_a_plan_without_items_is_a_step_as_well() -> None:
    host, worker = Host(PAGE_SIZE, 2, 1), Recorder()
    assert step(host, worker, plan_of(5)) == StepOutcome(step=5, token_ids=())
    assert step(host, worker, plan_of(6, copies=(COPY,))).token_ids == ()
    assert worker.calls == [("step", 5, []), ("step", 6, [[0, 0, 0, 1, PAGE_SIZE]])]


def test_a_plan_that_cannot_be_read_fails_in_its_turn_and_reaches_no_worker() -> None:
    host, worker = Host(PAGE_SIZE, 2, 1), Recorder()
    plans = [
        plan_of(0, 0, started_slots=starts(0)),
        plan_of(1, 1, copies=(COPY,)),  # the slot hasn't started
        plan_of(2, 0),
    ]
    reads = [host.read(plan) for plan in plans]  # ahead, as a loop does
    assert isinstance(reads[1], InvariantError)
    assert host.step(plans[0], reads[0], worker).token_ids == (0,)
    with pytest.raises(InvariantError) as raised:
        host.step(plans[1], reads[1], worker)
    assert raised.value is reads[1]
    assert host.step(plans[2], reads[2], worker).token_ids == (2,)
    assert worker.calls == [("step", 0, []), ("step", 2, [])]


def test_a_slot_with_drafting_is_refused_where_no_drafter_is() -> None:
    host, worker = Host(PAGE_SIZE, 2, 1), Recorder()
    drafting = DraftedSequence(known_ids=np.array([7], np.int32), prompt_tokens=1)
    [start] = starts(0)
    start = msgspec.structs.replace(start, drafting=drafting)
    with pytest.raises(
        InvariantError, match=r"^slot 0 starts with drafting in step 3, .* no drafter$"
    ):
        step(host, worker, plan_of(3, 0, started_slots=(start,)))
    assert worker.calls == []
    host.take_drafter(
        ScriptedDrafter(lambda sequence, count: [7] * count, right_up_to(99)), lambda: 0.0
    )
    assert step(host, worker, plan_of(4, 0, started_slots=(start,))).token_ids == (4,)


def test_without_a_drafter_nothing_is_kept_of_the_steps() -> None:
    """A device that runs ahead tells its resolver of every step, without checking first."""
    resolver = Host(PAGE_SIZE, 2, 1).resolver
    plan = plan_of(0, 0, started_slots=starts(0))
    resolver.take(plan)
    outcome = StepOutcome(step=0, token_ids=(5,))
    assert resolver.noted(resolver.resolved(plan), outcome) is outcome
    assert (resolver._known, resolver._unread, resolver._steps_plain) == ({}, [], 0)
