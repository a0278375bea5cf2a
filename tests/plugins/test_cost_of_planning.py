"""What planning a step costs under each bundled policy where many wait, counted in instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from aioserve import SchedulingPolicy
from tests.plugins.test_bundled_policies import BY_NAME
from tests.scheduling.bench import Bench

RUNNING = 4
ANSWER_TOKENS = 200
STEPS_TO_SETTLE = 6
POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"none": SchedulingPolicy, **BY_NAME}


class Instructions:
    """Of the interpreter, those of the functions that are called included."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self.trace


def _nothing() -> None:
    pass


@contextmanager
def counted() -> Iterator[Instructions]:
    instructions, before = Instructions(), sys.gettrace()
    # The first function that is traced so tells of no instruction in some versions.
    sys.settrace(Instructions().trace)
    _nothing()
    sys.settrace(instructions.trace)
    try:
        yield instructions
    finally:
        sys.settrace(before)


def instructions_of_a_step(
    policy: SchedulingPolicy, num_waiting: int, *, seats: int, num_pages: int, prompts: int = 0
) -> int:
    """To plan one in which some decode and a prompt is computed, while many wait of all kinds."""
    bench = Bench(
        policy=policy,
        num_pages=num_pages,
        max_num_seqs=seats,
        max_num_batched_tokens=2 * RUNNING,
        output_reserve_tokens=ANSWER_TOKENS,
    )
    for number in range(RUNNING):
        bench.submit([number] * 4, ANSWER_TOKENS, tenant=str(number % 2))
    while any(sequence.remaining != 1 for sequence in bench.sequences.values()):
        bench.step()
    for _ in range(prompts):
        bench.submit([9] * 400, 4)
        bench.step()
    for number in range(num_waiting):
        bench.submit([20 + number, 1, 2, 3, 4], 4, tenant=str(number % 3), priority=number % 5)
    for _ in range(STEPS_TO_SETTLE):
        bench.step()
    with counted() as instructions:
        plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.items) == bench.scheduler.num_running == RUNNING + prompts
    return instructions.count


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prompts", [0, 1])
def test_while_there_is_no_seat_nobody_looks_at_those_that_wait(name: str, prompts: int) -> None:
    seats = RUNNING + prompts
    few, many = (
        instructions_of_a_step(
            POLICIES[name](), count, seats=seats, num_pages=1000, prompts=prompts
        )
        for count in (10, 200)
    )
    assert few == many


@pytest.mark.parametrize("name", POLICIES)
def test_while_there_are_seats_and_no_pages_few_of_those_that_wait_are_looked_at(name: str) -> None:
    pages = RUNNING * (4 + ANSWER_TOKENS) // 4
    few, many = (
        instructions_of_a_step(POLICIES[name](), count, seats=2 * RUNNING, num_pages=pages)
        for count in (300, 1500)
    )
    assert many <= 1.1 * few
