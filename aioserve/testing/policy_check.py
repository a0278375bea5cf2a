"""Check of a scheduling policy's contract on random workloads.

The real scheduler and KV memory serve small workloads on a `FakeDevice`. They have prompts that
share beginnings, several samples, metadata, and more requests than there is memory for, with and
without host pages to swap to. Some draft tokens are right, steps are planned ahead, steps fail,
requests are cancelled, and readers fall behind. If a policy declares a starvation bound, others
keep coming until it is reached.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, zip_longest

import numpy as np

from aioserve.arguments import plain_int
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import pages_for
from aioserve.plugins import check_policy_object
from aioserve.request import Request, SamplingParams
from aioserve.scheduling import policy_calls
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.steps.plan import StepPlan
from aioserve.testing.examples import check_arguments, smallest_failure
from aioserve.testing.fake_device import VOCAB_SIZE, FakeDevice, expected_tokens
from aioserve.testing.policy_workloads import (
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    DrawnRequest,
    Rush,
    Workload,
    workloads,
)
from aioserve.testing.prediction_drafter import PredictionDrafter

__all__ = ["check_policy"]

STEPS_PER_TOKEN = 20
"""Steps for each token of a workload after which a run counts as endless."""
MAX_SMALLER_WORKLOADS = 60
MAX_SMALLER_RUSHES = 12
"""Smaller workloads that are tried after a failure, for one that is easier to read."""
STEP_SECONDS = 0.01
PAUSE_STEPS = 6
MAX_RUSH_TOKENS = 20_000
"""Largest bound that is tried: beyond it a workload would take too long."""
RUSHES_PER_EXAMPLE = 0.3


def check_policy(make_policy: Callable[[], SchedulingPolicy], *, max_examples: int = 100) -> None:
    """Raise `AssertionError`, with the smallest workload that shows it, unless the policy keeps its
    contract.

    - It returns only valid answers, which the mechanism needn't replace.
    - A new object of the policy decides alike when the same workload comes again.
    - No request is overtaken beyond its `starvation_bound_tokens`, if the policy declares one.

    Under it, every request must end once, with all of its tokens unless the policy refused it. No
    step may exceed its budget, every run must end, and the counts of the memory must be consistent.

    `make_policy` makes a new policy object with each call: a class, or a function for one with
    options. `max_examples` workloads are drawn. Prompts have up to 64 tokens. A bound above 20,000
    tokens isn't tried, and causes a warning: check such a policy with options that make it smaller.

    Needs hypothesis. Raises `ConfigError` for invalid arguments.
    """
    check_arguments("make_policy", make_policy, max_examples)
    policy = make_policy()
    if not isinstance(policy, SchedulingPolicy):
        raise AssertionError(f"make_policy must give a SchedulingPolicy, got {shown(policy)}")
    try:
        check_policy_object(policy)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    if make_policy() is policy:
        raise AssertionError("make_policy must make a new policy object with each call")
    _try(lambda workload: _serve_twice(make_policy, workload), max_examples, rush=False)
    untried: set[int] = set()

    def serve(workload: Workload) -> None:
        run = _Run(make_policy(), workload)
        run.serve()
        untried.update(run.untried_bounds)

    _try(serve, max(1, round(RUSHES_PER_EXAMPLE * max_examples)), rush=True)
    if untried:
        warnings.warn(
            f"{type(policy).__name__}: starvation_bound_tokens declares up to {max(untried)}, and "
            f"no more than {MAX_RUSH_TOKENS} tokens are tried: check it with options that make the "
            "bound smaller",
            stacklevel=2,
        )


def _try(serve: Callable[[Workload], None], max_examples: int, *, rush: bool) -> None:
    """Serve random workloads; raise the error of the smallest one that fails."""
    failed = smallest_failure(
        workloads(rush=rush),
        serve,
        max_examples,
        max_smaller=MAX_SMALLER_RUSHES if rush else MAX_SMALLER_WORKLOADS,
        size_of=lambda workload: len(workload.requests),
    )
    if failed is not None:
        workload, error = failed
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


class _Run:
    """One workload under one policy object, with every check after every step."""

    def __init__(self, policy: SchedulingPolicy, workload: Workload) -> None:
        self.policy = policy
        self.workload = workload
        longest = MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS
        num_pages = pages_for(longest, workload.page_size) + workload.spare_pages
        self.scheduler = Scheduler(
            KVMemory.of(
                (num_pages, workload.num_host_pages),
                workload.page_size,
                prefix_caching=workload.prefix_caching,
                preemption=workload.preemption if workload.num_host_pages else "auto",
            ),
            policy,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            output_reserve_tokens=workload.output_reserve_tokens,
        )
        self.device = FakeDevice(
            num_pages,
            workload.page_size,
            self.scheduler.num_slots,
            workload.num_host_pages,
            drafter=PredictionDrafter(),
        )
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.todo: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        """Actions before a step is planned, by its number."""
        self.numbers = count()
        self.own: list[int] = []
        """Sequences of the workload's own requests, without those of the rush."""
        self.rush = cycle([] if workload.rush is None else workload.rush.requests)
        self.untried_bounds: list[int] = []
        """Bounds of requests that still waited when the rush ended, for less than their bound."""

    def serve(self) -> list[tuple[object, ...]]:
        """Return the plans of the run, in a form that can be compared."""
        arrival, tokens = 0, 0
        for request in self.workload.requests:
            arrival += request.gap_steps
            tokens += MAX_PROMPT_TOKENS + request.max_tokens * request.num_samples
            self.todo[arrival].append(lambda r=request, at=arrival: self._submit(r, at, own=True))
        if self.workload.rush is not None:
            tokens += MAX_RUSH_TOKENS
        pipeline = StepPipeline(
            self.scheduler, self._launch, depth=2 if self.workload.overlap else 1
        )
        plans: list[tuple[object, ...]] = []
        with _quiet():
            for step in range(STEPS_PER_TOKEN * (tokens + 100)):
                for happen in self.todo.pop(step, ()):
                    happen()
                if self.workload.rush is not None and not self.todo:
                    self._go_on_rushing(self.workload.rush, step)
                plan = self._advance(pipeline, step * STEP_SECONDS)
                if plan is not None:
                    plans.append((*_work(plan), plan.preempted))
                if (due := pipeline.due) is not None:
                    self._finish(pipeline, due, step * STEP_SECONDS)
                if self.scheduler.policy_calls.last_fault is not None:
                    raise AssertionError(self.scheduler.policy_calls.last_fault)
                if not (self.todo or pipeline.in_flight or self.scheduler.state.sequences):
                    break
            else:
                raise AssertionError(f"no end in sight after {len(plans)} steps: {self._left()}")
        lost = self.expected.keys() - self.ended
        if lost:
            raise AssertionError(f"sequences {sorted(lost)} never ended")
        return plans

    def _submit(self, request: DrawnRequest, step: int, *, own: bool) -> None:
        index = next(self.numbers)
        prompt_ids = request.prompt_ids(index)
        tokens = expected_tokens(prompt_ids, request.max_tokens, index)
        sequence_ids = self.scheduler.submit(
            Request(
                request_id=f"r{index}",
                prompt_ids=np.array(prompt_ids, np.int32),
                max_length=len(prompt_ids) + request.max_tokens,
                params=SamplingParams(temperature=0.0, n=request.num_samples),
                seed=index,
                arrival_seconds=step * STEP_SECONDS,
                hints=request.hints,
                max_draft_tokens=request.max_draft_tokens,
                predicted_ids=np.array(_half_right(tokens), np.int32),
            )
        )
        for sample, sequence_id in enumerate(sequence_ids):
            tokens = expected_tokens(prompt_ids, request.max_tokens, index + sample)
            self.expected[sequence_id] = tokens
            self.received[sequence_id] = []
        if own:
            self.own += sequence_ids
        if request.leaves_after_steps is not None:
            leaves = step + 1 + request.leaves_after_steps
            self.todo[leaves].append(lambda: self._cancel(sequence_ids))
        if request.pauses_after_steps is not None:
            pauses = step + 1 + request.pauses_after_steps
            self.todo[pauses].append(lambda: self._pause(sequence_ids, pauses + PAUSE_STEPS))

    def _pause(self, sequence_ids: tuple[int, ...], until_step: int) -> None:
        for sequence_id in sequence_ids:
            self.scheduler.pause(sequence_id)
            self.todo[until_step].append(lambda one=sequence_id: self.scheduler.resume(one))

    def _cancel(self, sequence_ids: tuple[int, ...]) -> None:
        for sequence_id in sequence_ids:
            if sequence_id not in self.ended:
                self.scheduler.finish(sequence_id)
                self._end(sequence_id)

    def _go_on_rushing(self, rush: Rush, step: int) -> None:
        """Keep others coming while a request waits that may be overtaken further."""
        scheduler = self.scheduler
        processed = scheduler.counters.tokens_processed
        held_up = [
            bound
            for sequence_id in self.own
            if (sequence := scheduler.state.sequences.get(sequence_id)) is not None
            and sequence.phase is Phase.WAITING
            and (bound := self._bound(sequence)) is not None
        ]
        if processed < MAX_RUSH_TOKENS and held_up:
            while scheduler.num_waiting < rush.backlog:
                self._submit(next(self.rush), step, own=False)
        elif not self.untried_bounds:
            self.untried_bounds = [bound for bound in held_up if bound > MAX_RUSH_TOKENS]

    def _bound(self, sequence: SequenceState) -> int | None:
        answer = self.policy.starvation_bound_tokens(sequence.view)
        bound = None if answer is None else plain_int(answer)
        if answer is not None and (bound is None or bound < 0):
            raise AssertionError(
                f"starvation_bound_tokens answered {shown(answer)}, not an int from 0 on or None"
            )
        return bound

    def _launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def _advance(self, pipeline: StepPipeline[StepPlan], now_seconds: float) -> StepPlan | None:
        scheduler = self.scheduler
        waiting = list(scheduler.state.waiting)
        processed = scheduler.counters.tokens_processed
        plan = pipeline.advance(now_seconds)
        scheduler.sanity_check()
        for ended in scheduler.take_ended_unplanned():
            if ended.cause is not None:
                raise ended.cause
            self._end(ended.sequence_id)
        self._check_overtaking(waiting, processed)
        if plan is not None and plan.num_tokens > scheduler.state.max_num_batched_tokens:
            raise AssertionError(
                f"step {plan.step} computes {plan.num_tokens} tokens, over its budget of "
                f"{scheduler.state.max_num_batched_tokens}"
            )
        return plan

    def _check_overtaking(self, waiting: list[SequenceState], processed: int) -> None:
        """Check that no request started before one that has waited for its bound."""
        started = [s.sequence_id for s in waiting if s.phase is Phase.RUNNING]
        for sequence in waiting:
            if sequence.phase is not Phase.WAITING or sequence.paused:
                continue
            bound = self._bound(sequence)
            if not started or sequence.sequence_id > max(started):
                continue
            waited = processed - sequence.arrival_processed_tokens
            if bound is not None and waited >= bound:
                raise AssertionError(
                    f"starvation: sequence {max(started)} started before sequence "
                    f"{sequence.sequence_id}, which arrived earlier and has waited for {waited} "
                    f"processed tokens; starvation_bound_tokens declares {bound}"
                )

    def _finish(self, pipeline: StepPipeline[StepPlan], plan: StepPlan, now_seconds: float) -> None:
        if plan.step in self.workload.failing_steps:
            self.device.execute_in_part(plan, 0)
            for progress in pipeline.fail("planted"):
                self._end(progress.sequence_id)
            return
        self.scheduler.state.times.record(plan, STEP_SECONDS)
        for progress in pipeline.finish(self.device.execute(plan), now_seconds):
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
        return ", ".join(map(repr, self.scheduler.state.sequences.values()))


def _half_right(tokens: Sequence[int]) -> list[int]:
    """Return tokens of which two are right, then two wrong, and so on."""
    return [
        token if place % 4 < 2 else (token + 1) % VOCAB_SIZE for place, token in enumerate(tokens)
    ]


def _work(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.sequence_id, item.start, item.count) for item in plan.items]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop log messages: the fault that ends the run is its error already."""

    def drop(record: object) -> bool:
        return False

    policy_calls.logger.addFilter(drop)
    try:
        yield
    finally:
        policy_calls.logger.removeFilter(drop)
