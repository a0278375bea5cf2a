"""When a sequence is planned of which somebody must say what may come next."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool
from aioserve.request import FinishReason, Request, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.structured_output import StructuredOutput

MASK = np.full(8, -1, np.int32)
OTHER = np.full(8, 1, np.int32)


def scheduler() -> Scheduler:
    return Scheduler(
        KVMemory(PagePool(16, 4)),
        SchedulingPolicy(),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        output_reserve_tokens=0,
    )


def guided(n: int = 1, max_tokens: int = 8) -> Request:
    return Request(
        request_id="r",
        prompt_ids=np.array([1, 2, 3], np.int32),
        max_length=3 + max_tokens,
        params=SamplingParams(n=n, structured_output=StructuredOutput(json_object=True)),
    )


def outcome(plan: StepPlan | None, *token_ids: int) -> tuple[StepPlan, StepOutcome]:
    assert plan is not None
    return plan, StepOutcome(step=plan.step, token_ids=token_ids)


def test_samples_begin_when_it_is_said_of_each_what_may_come() -> None:
    one = scheduler()
    first, second = one.submit(guided(n=2))
    assert one.plan(0.0) is None
    one.guide(first, MASK)
    assert one.plan(0.0) is None
    one.guide(second, OTHER)
    plan = one.plan(0.0)
    assert plan is not None
    assert [row.mask is MASK for row in plan.items[0].rows] == [True, False]


def test_a_token_is_waited_for_and_what_is_forced_is_computed_with_the_next() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id, MASK)
    planned = outcome(one.plan(0.0), 7)
    assert one.plan(0.0) is None
    one.commit(*planned, 0.0)
    assert one.plan(0.0) is None
    forced = one.guide(sequence_id, OTHER, (8, 9))
    assert [(update.token_id, update.forced) for update in forced] == [(8, True), (9, True)]
    plan = one.plan(0.0)
    assert plan is not None
    (item,) = plan.items
    assert list(item.token_ids) == [7, 8, 9]
    assert [(row.offset, row.mask is OTHER) for row in item.rows] == [(2, True)]
    assert one.counters.tokens_generated == 3


def test_forced_tokens_end_a_sequence_as_others_do() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided(max_tokens=3))
    with pytest.raises(InvariantError):
        one.guide(sequence_id, MASK, (8,))
    one.guide(sequence_id, MASK)
    one.commit(*outcome(one.plan(0.0), 7), 0.0)
    *_, last = one.guide(sequence_id, MASK, (8, 9, 10))
    assert (last.token_id, last.finish_reason) == (9, FinishReason.LENGTH)
    assert one.guide(sequence_id, MASK, (8,)) == []
    one.sanity_check()
    assert one.memory.pool.num_fenced == 0
