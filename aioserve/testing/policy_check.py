"""Whether a scheduling policy keeps the contract, tried on random workloads.

The real scheduler and KV memory serve small workloads on a `FakeDevice`: prompts that share
beginnings, several samples, more requests than there is memory for, steps planned ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aioserve.execution.plan import StepPlan
from aioserve.kv.page_pool import PagePool
from aioserve.kv.pages import pages_for
from aioserve.request import SamplingParams
from aioserve.scheduling import guard
from aioserve.scheduling.memory import KVMemory
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.testing.fake_device import FakeDevice, expected_tokens

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["check_policy"]

MAX_PROMPT_TOKENS = 64
MAX_ANSWER_TOKENS = 16
STEPS_PER_TOKEN = 20
"""A run that takes more steps than this for each token of its workload is taken for endless."""
MAX_SMALLER_WORKLOADS = 60
"""Tried after a failure, for one that is easier to read."""
STEP_SECONDS = 0.01


class Request(msgspec.Struct, frozen=True):
    """One of a workload."""

    gap_steps: int
    """Steps between the request before and this one."""
    family: int
    """Requests of a family begin alike."""
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    num_samples: int

    def prompt_ids(self, index: int) -> list[int]:
        shared = [(7 * i + self.family) % 251 for i in range(self.shared_tokens)]
        return [*shared, *[(3 * i + 5 * index) % 256 for i in range(self.own_tokens)]]


class Workload(msgspec.Struct, frozen=True):
    """Requests, and the scheduler that serves them."""

    requests: list[Request]
    page_size: int
    spare_pages: int
    """Pages beyond those that the longest request needs."""
    max_num_seqs: int
    max_num_batched_tokens: int
    output_reserve_tokens: int
    prefix_caching: bool
    overlap: bool


def check_policy(make_policy: Callable[[], SchedulingPolicy], *, max_examples: int = 100) -> None:
    """Raise `AssertionError`, with the smallest workload that shows it, unless the policy

    - gives only answers that are some: nothing that the mechanism would have to replace;
    - decides alike when the same workload comes again, to a new object of the policy;
    - lets nobody be overtaken beyond its `starvation_bound_tokens`, where it declares one;

    and, under it, every request ends once, with all of its tokens unless the policy refused it, no
    step is over its budget, every run ends, and the books of the memory balance.

    `make_policy` makes a new policy object with each call: a class, or a function for one with
    options. `max_examples` workloads are drawn. Needs hypothesis.
    """
    from hypothesis import HealthCheck, Phase, given, settings

    policy = make_policy()
    if not isinstance(policy, SchedulingPolicy):
        raise AssertionError(f"make_policy must give a SchedulingPolicy, got {policy!r}")
    if make_policy() is policy:
        raise AssertionError("make_policy must make a new policy object with each call")
    failures: list[tuple[Workload, Exception]] = []
    num_tried_since = 0

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(_workloads())
    def check(workload: Workload) -> None:
        nonlocal num_tried_since
        if failures:
            num_tried_since += 1
            if num_tried_since > MAX_SMALLER_WORKLOADS:
                return
        try:
            _serve_twice(make_policy, workload)
        except Exception as error:
            failures.append((workload, error))
            raise

    try:
        check()
    except Exception:
        # Of a policy that fails only now and then hypothesis says just that.
        if not failures:
            raise
        workload, error = min(reversed(failures), key=lambda failure: len(failure[0].requests))
        what = str(error) if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"{what}\n{workload}") from error


def _serve_twice(make_policy: Callable[[], SchedulingPolicy], workload: Workload) -> None:
    first = _Run(make_policy(), workload).serve()
    again = _Run(make_policy(), workload).serve()
    for number, (one, other) in enumerate(zip_longest(first, again)):
        if one != other:
            raise AssertionError(
                f"not deterministic: plan {number} of the same workload was {one} and then "
                f"{other} (sequence, start, tokens; preempted)"
            )


def _workloads() -> SearchStrategy[Workload]:
    from hypothesis import strategies as st

    request = st.builds(
        Request,
        gap_steps=st.sampled_from([0, 0, 0, 1, 2, 8]),
        family=st.integers(0, 2),
        shared_tokens=st.integers(0, MAX_PROMPT_TOKENS // 2),
        own_tokens=st.integers(1, MAX_PROMPT_TOKENS // 2),
        max_tokens=st.integers(1, MAX_ANSWER_TOKENS),
        num_samples=st.sampled_from([1, 1, 1, 2]),
    )
    return st.builds(
        Workload,
        requests=st.lists(request, min_size=1, max_size=12)
        | st.lists(request, min_size=12, max_size=40),
        page_size=st.sampled_from([1, 4, 16]),
        spare_pages=st.sampled_from([0, 2, 8, 24]),
        max_num_seqs=st.integers(2, 5),
        max_num_batched_tokens=st.sampled_from([1, 8, 32, 64]),
        output_reserve_tokens=st.sampled_from([0, 8]),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
    )


class _Run:
    """One workload under one policy object, with every check after every step."""

    def __init__(self, policy: SchedulingPolicy, workload: Workload) -> None:
        self.policy = policy
        self.workload = workload
        longest = MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS
        num_pages = pages_for(longest, workload.page_size) + workload.spare_pages
        self.scheduler = Scheduler(
            KVMemory(
                PagePool(num_pages, workload.page_size), prefix_caching=workload.prefix_caching
            ),
            policy,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            output_reserve_tokens=workload.output_reserve_tokens,
        )
        self.device = FakeDevice(num_pages, workload.page_size, self.scheduler.num_slots)
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def serve(self) -> list[tuple[object, ...]]:
        """The plans of the run, in a form that can be compared."""
        todo = deque(enumerate(self.workload.requests))
        next_step = todo[0][1].gap_steps
        in_flight: deque[StepPlan] = deque()
        plans: list[tuple[object, ...]] = []
        tokens = sum(MAX_PROMPT_TOKENS + r.max_tokens * r.num_samples for _, r in todo)
        with _faults() as faults:
            for step in range(STEPS_PER_TOKEN * (tokens + 100)):
                while todo and next_step <= step:
                    self._submit(*todo.popleft())
                    next_step = step + todo[0][1].gap_steps if todo else 0
                plan = self._plan(step * STEP_SECONDS)
                if faults:
                    raise AssertionError(faults[0])
                if plan is not None:
                    plans.append((*_work(plan), plan.preempted))
                    in_flight.append(plan)
                if in_flight and (plan is None or len(in_flight) > self.workload.overlap):
                    self._commit(in_flight.popleft(), step * STEP_SECONDS)
                if not (todo or in_flight or self.scheduler.sequences):
                    break
            else:
                raise AssertionError(f"no end in sight after {len(plans)} steps: {self._left()}")
        lost = self.expected.keys() - self.ended
        if lost:
            raise AssertionError(f"sequences {sorted(lost)} never ended")
        return plans

    def _submit(self, index: int, request: Request) -> None:
        prompt_ids = request.prompt_ids(index)
        sequence_ids = self.scheduler.submit(
            f"r{index}",
            np.array(prompt_ids, np.int32),
            SamplingParams(temperature=0.0, n=request.num_samples),
            seed=index,
            end_ids=frozenset(),
            max_length=len(prompt_ids) + request.max_tokens,
            now_seconds=0.0,
        )
        for sample, sequence_id in enumerate(sequence_ids):
            tokens = expected_tokens(prompt_ids, request.max_tokens, index + sample)
            self.expected[sequence_id] = tokens
            self.received[sequence_id] = []

    def _plan(self, now_seconds: float) -> StepPlan | None:
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        processed = scheduler.counters.tokens_processed
        plan = scheduler.plan(now_seconds)
        scheduler.sanity_check()
        for rejected in scheduler.take_rejected():
            self._end(rejected.sequence_id)
        self._check_overtaking(waiting, processed)
        if plan is not None and plan.num_tokens > scheduler.max_num_batched_tokens:
            raise AssertionError(
                f"step {plan.step} computes {plan.num_tokens} tokens, over its budget of "
                f"{scheduler.max_num_batched_tokens}"
            )
        return plan

    def _check_overtaking(self, waiting: list[SequenceState], processed: int) -> None:
        """Those that started came after none that has waited for its bound."""
        started = [s.sequence_id for s in waiting if s.phase is Phase.RUNNING]
        if not started:
            return
        for sequence in waiting:
            if sequence.phase is not Phase.WAITING or sequence.sequence_id > max(started):
                continue
            bound = self.policy.starvation_bound_tokens(sequence.view)
            waited = processed - sequence.arrival_processed_tokens
            if bound is not None and waited >= bound:
                raise AssertionError(
                    f"starvation: sequence {max(started)} started before sequence "
                    f"{sequence.sequence_id}, which arrived earlier and has waited for {waited} "
                    f"processed tokens; starvation_bound_tokens declares {bound}"
                )

    def _commit(self, plan: StepPlan, now_seconds: float) -> None:
        for progress in self.scheduler.commit(plan, self.device.execute(plan), now_seconds):
            if progress.token_id is not None:
                self.received[progress.sequence_id].append(progress.token_id)
            if progress.finish_reason is not None:
                self._end(progress.sequence_id)
                received = self.received[progress.sequence_id]
                if received != self.expected[progress.sequence_id]:
                    raise AssertionError(
                        f"sequence {progress.sequence_id} got the tokens {received} for "
                        f"{self.expected[progress.sequence_id]}"
                    )

    def _end(self, sequence_id: int) -> None:
        if sequence_id in self.ended:
            raise AssertionError(f"sequence {sequence_id} ended twice")
        self.ended.add(sequence_id)

    def _left(self) -> str:
        return ", ".join(map(repr, self.scheduler.sequences.values()))


def _work(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.sequence_id, item.start, item.count) for item in plan.items]


@contextlib.contextmanager
def _faults() -> Iterator[list[str]]:
    """What the guard reports of a policy meanwhile, in place of the log."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    guard.logger.addFilter(keep)
    try:
        yield messages
    finally:
        guard.logger.removeFilter(keep)
