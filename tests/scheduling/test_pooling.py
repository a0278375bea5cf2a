"""Sums of hidden states: which tokens each step adds, and that each counts once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.request import FinishReason
from aioserve.steps.plan import PooledTokens, StepPlan
from aioserve.testing.fake_device import expected_hidden
from tests.scheduling.bench import Bench, work

LOOK = {"max_tokens": 1, "answers": False}


def pooled(plan: StepPlan) -> list[tuple[int, int] | None]:
    parts = [item.pooled for item in plan.items]
    return [None if part is None else (part.offset, part.count) for part in parts]


def summed(num_tokens: int, first: int = 0) -> list[float]:
    return expected_hidden(range(num_tokens))[first:].sum(axis=0).tolist()


def finish(bench: Bench) -> list[float]:
    while True:
        for update in bench.step():
            assert update.token_id is None
            assert update.finish_reason is FinishReason.LENGTH
            assert update.pooled is not None
            return update.pooled.tolist()


def test_a_sum_over_all_tokens_takes_none_from_the_cache_and_one_over_the_last_takes_all_others():
    bench = Bench(prefix_caching=True)
    bench.submit(13)
    bench.step()
    every = bench.submit(13, **LOOK, pooled=range(13))
    last = bench.submit(13, **LOOK, pooled=range(12, 13))
    plan = bench.plan()
    assert work(plan)[1:] == [(every, 0, 13), (last, 12, 1)]
    assert pooled(plan) == [None, (0, 13), (0, 1)]
    assert plan.num_pooled == 2

    _, first, second = bench.commit(plan)

    assert first.pooled is not None
    assert second.pooled is not None
    assert first.pooled.tolist() == summed(13)
    assert second.pooled.tolist() == summed(13, 12)
    assert bench.scheduler.counters.tokens_generated == 2, "those of the first request"


def test_after_a_preemption_the_sum_goes_on_where_it_was():
    bench = Bench(prefix_caching=True, max_num_batched_tokens=6)
    look = bench.submit(20, **LOOK, pooled=range(20))
    bench.step()
    in_flight = bench.plan()
    assert work(in_flight) == [(look, 6, 6)]
    bench.scheduler.state.preempt(bench.running[0], bench.scheduler.state.launched + 1)
    assert bench.commit(in_flight) == []

    # The cache has the first three pages; six tokens of them were added, and six were dropped.
    plan = bench.plan()
    assert (work(plan), pooled(plan)) == ([(look, 6, 6)], [(0, 6)])
    bench.commit(plan)

    assert finish(bench) == summed(20)


def test_what_was_added_over_kv_that_may_be_wrong_is_forgotten():
    bench = Bench(prefix_caching=True, max_num_batched_tokens=24)
    bench.submit([*range(16), 100])
    look = bench.submit(36, **LOOK, pooled=range(16, 36))
    plan = bench.plan()
    assert work(plan)[1] == (look, 16, 7)
    outcome = bench.device.execute(plan)
    bad = (np.array([np.nan, np.nan], np.float32),)
    outcome = msgspec.structs.replace(outcome, row_errors={0: "NaN"}, pooled=bad)

    bench.scheduler.commit(plan, outcome, 0.0)

    assert finish(bench) == summed(36, 16)


def test_an_outcome_with_other_sums_is_refused():
    bench = Bench()
    bench.submit(3, **LOOK, pooled=range(3))
    plan = bench.plan()
    assert plan.items[0].pooled == PooledTokens(offset=0, count=3)
    outcome = msgspec.structs.replace(bench.device.execute(plan), pooled=())
    with pytest.raises(InvariantError, match="pools 1 items, its outcome 0"):
        bench.scheduler.commit(plan, outcome, 0.0)
