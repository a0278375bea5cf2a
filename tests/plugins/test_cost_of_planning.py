"""Cost of planning a step, in instructions: under each bundled policy with many waiting requests,
and for each decoding sequence."""

from __future__ import annotations

import gc
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
MOST_CALLS_A_DECODE = 2
"""Calls to advance its lease, and to append its token."""
MOST_CALLS_A_PAGE = 20
MOST_INSTRUCTIONS_A_DECODE = 380
"""Instructions of a decode, with a sixteenth of those for a page."""
POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"none": SchedulingPolicy, **BY_NAME}


class Instructions:
    """Count of the interpreter's instructions, including those of called functions."""

    def __init__(self) -> None:
        self.count = 0
        self.num_calls = 0
        """Functions called, without those in C."""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.num_calls += event == "call"
        self.count += event == "opcode"
        return self.trace


def _nothing() -> None:
    pass


@contextmanager
def counted() -> Iterator[Instructions]:
    """Count without passes of the garbage collector, whose callbacks would count."""
    instructions, before = Instructions(), sys.gettrace()
    collects = gc.isenabled()
    gc.disable()
    # In some versions the first function traced like this reports no instructions.
    sys.settrace(Instructions().trace)
    _nothing()
    sys.settrace(instructions.trace)
    try:
        yield instructions
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def instructions_of_a_step(
    policy: SchedulingPolicy, num_waiting: int, *, seats: int, num_pages: int, prompts: int = 0
) -> int:
    """Instructions to plan a step with decodes and a prompt, while many requests of all kinds
    wait."""
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


def cost_of_decodes(num_decodes: int, *, prefix_caching: bool) -> tuple[int, int]:
    """Instructions and calls to plan and commit a step while the one before it is in flight, and
    one waits. All running sequences decode, and one in 16 gets a page."""
    bench = Bench(
        num_pages=8 * num_decodes,
        page_size=16,
        prefix_caching=prefix_caching,
        max_num_seqs=num_decodes,
        max_num_batched_tokens=20 * num_decodes,
    )
    for number in range(num_decodes):
        bench.submit([number] * (4 + number % 16), 50)
    bench.step()
    bench.submit(4)
    flying = bench.plan()
    for _ in range(STEPS_TO_SETTLE):
        plan = bench.plan()
        bench.commit(flying)
        flying = plan
    outcome = bench.device.execute(flying)
    with counted() as instructions:
        plan = bench.scheduler.plan(0.0)
        updates = bench.scheduler.commit(flying, outcome, 0.0)
    assert plan is not None
    assert plan.num_decodes == len(plan.items) == len(updates) == num_decodes
    assert len(plan.pages) == num_decodes // 16
    return instructions.count, instructions.num_calls


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_decode_costs_two_calls_and_few_instructions(prefix_caching: bool) -> None:
    (few, few_calls), (many, many_calls) = (
        cost_of_decodes(count, prefix_caching=prefix_caching) for count in (32, 64)
    )
    assert many_calls - few_calls <= 32 * MOST_CALLS_A_DECODE + 2 * MOST_CALLS_A_PAGE
    assert many - few <= 32 * MOST_INSTRUCTIONS_A_DECODE
