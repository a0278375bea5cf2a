"""The scheduler under every order of events, on a device that notices each wrong page.

Steps are launched, run and committed with up to two in flight, while requests come, leave, stall
and steps fail. After each rule the books must balance; at the end every request must have ended
with exactly the tokens that its prompt determines.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioserve.execution.plan import StepPlan
from aioserve.kv.page_pool import PagePool
from aioserve.request import FinishReason, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy, Verdict
from aioserve.scheduling.scheduler import Progress, Scheduler
from aioserve.testing.fake_model import FakeDevice, expected_tokens

MAX_LENGTH = 48
PARAMS = SamplingParams(temperature=0.0)


class Whimsical(SchedulingPolicy):
    """Answers anything that is allowed, and now and then something that isn't."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def order(self, waiting, view):
        self.maybe_break()
        return self.random.sample(waiting, self.random.randint(0, len(waiting)))

    def admit(self, request, view):
        self.maybe_break()
        return self.random.choice([Verdict.NOW, Verdict.LATER])

    def chunk(self, request, budget_tokens, view):
        self.maybe_break()
        return self.random.randint(-1, budget_tokens + 1)

    def victim(self, running, need_pages, view):
        self.maybe_break()
        return self.random.choice([*running, None])

    def maybe_break(self) -> None:
        if self.random.random() < 0.05:
            raise RuntimeError("whim")


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16, 64]),
        spare_pages=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 16, 64]),
        reserve=st.sampled_from([0, 8, 64]),
        whim=st.none() | st.integers(0, 2**16),
    )
    def start(self, page_size, spare_pages, max_num_seqs, budget, reserve, whim):
        num_pages = -(-MAX_LENGTH // page_size) + spare_pages
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            self.pool,
            SchedulingPolicy() if whim is None else Whimsical(whim),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            output_reserve_tokens=reserve,
        )
        self.device = FakeDevice(num_pages, page_size, self.scheduler.num_slots)
        self.in_flight: deque[StepPlan] = deque()
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.left: set[int] = set()
        self.now = 0.0

    @rule(
        prompt=st.lists(st.integers(0, 255), min_size=1, max_size=MAX_LENGTH - 1),
        max_tokens=st.integers(1, MAX_LENGTH - 1),
    )
    def submit(self, prompt, max_tokens):
        max_length = min(MAX_LENGTH, len(prompt) + max_tokens)
        seed = len(self.expected)
        sequence_id = self.scheduler.submit(
            f"r{seed}",
            np.array(prompt, np.int32),
            PARAMS,
            seed=seed,
            end_ids=frozenset(),
            max_length=max_length,
            now_seconds=self.now,
        )
        self.expected[sequence_id] = expected_tokens(prompt, max_length - len(prompt), seed)
        self.received[sequence_id] = []

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def launch(self):
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return
        assert plan.items
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({item.sequence_id for item in plan.items}) == len(plan.items)
        self.assert_fenced(plan)
        self.in_flight.append(plan)

    def assert_fenced(self, plan: StepPlan) -> None:
        """No page or slot of a step in flight belongs to someone else in the new step."""
        for earlier in self.in_flight:
            for item in earlier.items:
                for new in plan.items:
                    if (new.sequence_id, new.epoch) != (item.sequence_id, item.epoch):
                        assert not set(new.page_ids.tolist()) & set(item.page_ids.tolist())
                        assert new.slot != item.slot

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self):
        plan = self.in_flight.popleft()
        self.take(self.scheduler.commit(plan, self.device.execute(plan)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self):
        plan = self.in_flight.popleft()
        self.take(self.scheduler.fail(plan, "planted"))

    @precondition(lambda self: self.in_flight)
    @rule()
    def produce_a_bad_row(self):
        plan = self.in_flight.popleft()
        outcome = self.device.execute(plan)
        outcome.row_errors[len(plan.items) - 1] = "NaN"
        self.take(self.scheduler.commit(plan, outcome))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data):
        sequence_id = data.draw(st.sampled_from(self.live()))
        self.scheduler.finish(sequence_id)
        self.scheduler.finish(sequence_id)
        self.left.add(sequence_id)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), paused=st.booleans())
    def stall(self, data, paused):
        sequence_id = data.draw(st.sampled_from(self.live()))
        (self.scheduler.pause if paused else self.scheduler.resume)(sequence_id)

    def live(self) -> list[int]:
        return [s for s in self.expected if s not in self.ended and s not in self.left]

    def take(self, progress: list[Progress]) -> None:
        for entry in progress:
            assert entry.sequence_id not in self.ended, "a second end"
            assert entry.sequence_id not in self.left, "progress after a cancel"
            if entry.token_id is not None:
                self.received[entry.sequence_id].append(entry.token_id)
            if entry.finish_reason is not None:
                self.ended[entry.sequence_id] = entry.finish_reason

    @invariant()
    def books_balance(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.sanity_check()
        for sequence_id, received in self.received.items():
            assert received == self.expected[sequence_id][: len(received)]
            if self.ended.get(sequence_id) is FinishReason.LENGTH:
                assert received == self.expected[sequence_id]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for sequence_id in self.live():
            self.scheduler.resume(sequence_id)
        for _ in range(100 * MAX_LENGTH * max(1, len(self.expected))):
            if not self.live() and not self.in_flight:
                break
            plan = self.scheduler.plan(self.now) if len(self.in_flight) < 2 else None
            if plan is not None:
                self.assert_fenced(plan)
                self.in_flight.append(plan)
            if self.in_flight and (plan is None or len(self.in_flight) == 2):
                self.complete()
        assert not self.live(), "requests that never end"
        self.books_balance()
        assert self.pool.num_free == self.pool.num_pages


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestScheduler = pytest.mark.timeout(300)(SchedulerMachine.TestCase)
