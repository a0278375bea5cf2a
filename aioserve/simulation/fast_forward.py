"""Fast passes of simulated steps in which each running completion gets one token, and nothing else
happens.

The result is that of single steps, to the last digit of their times. In these steps no request
comes, starts or is preempted, and completions end with the last step at the earliest. The policy
isn't asked: a waiting request may find too few pages again and again. The simulator knows when the
next request comes and where completions end; policies don't.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from aioserve.scheduling.scheduler import Scheduler
from aioserve.simulation.cost import CostModel, StepLoad, TableSteps
from aioserve.simulation.decode_pass import DecodePass, decode_pass, frees_at_once
from aioserve.simulation.roofline import RooflineCost
from aioserve.steps.plan import StepPlan
from aioserve.traces.checks import named
from aioserve.traces.trace_request import END_TOKEN

__all__ = ["LEAST_STEPS", "MAX_CLOCK_SECONDS", "Clock", "PassedSteps", "pass_steps"]

LEAST_STEPS = 1
"""Fewest steps of a pass: fewer are taken one by one."""
FIRST_STEPS = 16
"""Steps that a pass considers first; it then considers four times as many. Something may happen
soon.
"""
MAX_CLOCK_SECONDS = 1e15


class Clock(msgspec.Struct, frozen=True):
    """Times of a run, in seconds on the trace's clock."""

    now: float
    last_end: float
    """End of the last step launched."""
    in_flight: tuple[float, ...]
    """Durations of the steps in flight."""
    next_arrival: float | None
    next_deadline: float | None
    """Time at which the next request is ended, whatever it has got until then."""


class PassedSteps(msgspec.Struct, frozen=True):
    """Steps that were launched, and as many that finished. The last one launched may be in
    flight.
    """

    sequence_ids: list[int]
    """Sequences that got a token in each finished step; `late` ones got none in the first."""
    late: set[int]
    """Sequences that got none in the first step."""
    ends: list[float]
    """Ends of the finished steps."""
    ended: list[int]
    """Sequences whose completions ended with the last finished step."""
    launched_seconds: list[float]
    """Durations of the launched steps."""
    pages_held: list[int]
    """Pages held while each launched step runs."""
    in_flight: StepPlan | None
    last_end: float
    """End of the last launched step."""


def pass_steps(
    scheduler: Scheduler,
    cost: CostModel,
    clock: Clock,
    own_tokens: Mapping[int, int],
    end_positions: Mapping[int, int],
) -> PassedSteps | None:
    """Pass as many steps as possible, and return them.

    Returns None, and changes nothing, if the next steps have to be taken one by one. Each
    sequence's completion is made of its token in `own_tokens`, and ends at its position in
    `end_positions`.
    """
    if not isinstance(cost, RooflineCost | TableSteps) or not cost.tells_several:
        return None
    steps = decode_pass(scheduler)
    if steps is None:
        return None
    most = _num_till_next_end(steps, end_positions)
    if most < LEAST_STEPS:
        return None
    load = StepLoad(0, len(steps.sequences), steps.context_tokens, 0)
    ends, launched, count = _times(cost, clock, load, steps.first_step, most)
    if count < LEAST_STEPS:
        return None
    count, held = _within_pages(scheduler, steps, count)
    if count < LEAST_STEPS:
        return None
    finished = [*([clock.last_end] if clock.in_flight else ()), *ends][:count]
    ids = [sequence.sequence_id for sequence in steps.sequences]
    taken = [*clock.in_flight, *launched[:count]]
    ended = [
        sequence.sequence_id
        for sequence in steps.sequences
        if end_positions[sequence.sequence_id]
        == sequence.num_known - (sequence in steps.late) + count - 1
    ]
    last_ids = dict.fromkeys(ended, END_TOKEN)
    plan = steps.take(count, [own_tokens[i] for i in ids], taken, finished, last_ids)
    if isinstance(cost, TableSteps):
        cost.count_decodes(load, count)
    late = {sequence.sequence_id for sequence in steps.late}
    return PassedSteps(ids, late, finished, ended, launched[:count], held, plan, ends[count - 1])


def _num_till_next_end(steps: DecodePass, end_positions: Mapping[int, int]) -> int:
    """Return the number of steps in which no sequence exceeds its last token.

    A sequence also gets at most all but one of the tokens that it may have. With that one in
    flight, it is in no further step.
    """
    # Late sequences get one token less.
    seen = [(s.num_known - (s in steps.late), s) for s in steps.sequences]
    till_end = min([end_positions[s.sequence_id] - known for known, s in seen]) + 1
    till_longest = min([s.max_length - known for known, s in seen]) - 1
    return min(till_end, till_longest)


def _times(
    cost: RooflineCost | TableSteps, clock: Clock, load: StepLoad, first: int, most: int
) -> tuple[list[float], list[float], int]:
    """Return the ends and durations of steps, and the number of them that begin before the next
    request comes.
    """
    begins, looked_at = max(clock.now, clock.last_end), FIRST_STEPS
    while True:
        asked = min(most, looked_at)
        with named("cost: step_seconds"), np.errstate(all="ignore"):
            several = cost.decode_seconds(load, first, asked)
        times = list(accumulate(several, initial=begins))
        ends, launched = times[1:], [end - start for start, end in pairwise(times)]
        count = asked
        # An invalid step is taken by itself, which reports the error: one without a duration, or
        # with one that isn't finite.
        if not (min(launched) > 0 and ends[-1] <= MAX_CLOCK_SECONDS):
            steps = zip(launched, ends, strict=True)
            count = [took > 0 and end <= MAX_CLOCK_SECONDS for took, end in steps].index(False)
            del ends[count:]
        done = [clock.last_end, *ends] if clock.in_flight else ends
        if clock.next_arrival is not None:
            # A request that comes when a step is done is there before the next one is planned.
            count = min(count, 1 + bisect_left(done, clock.next_arrival))
        if clock.next_deadline is not None:
            count = min(count, bisect_right(done, clock.next_deadline))
        if count < asked or asked == most:
            return ends, launched, count
        looked_at *= 4


def _within_pages(scheduler: Scheduler, steps: DecodePass, count: int) -> tuple[int, list[int]]:
    """Return how many of `count` steps find their pages free, and the pages held during each."""
    memory = scheduler.memory
    # Pages that are evicted to another tier are copied, which takes steps time.
    free = memory.pool.num_free if memory.copies_evicted else memory.num_available
    less = steps.pages_less(count)
    # Later steps begin when the step in flight is done, so it no longer fences pages.
    if not frees_at_once(memory, less[0]):
        return 0, []
    count = steps.num_before_next_start(less)
    held = memory.pool.num_pages - memory.num_available
    left = [free - pages for pages in accumulate(less[:count])]
    # Pages that come back may make up for a shortage before.
    short = next((step for step, pages in enumerate(left) if pages < 0), count)
    return short, [held + free - pages for pages in left[:short]]
