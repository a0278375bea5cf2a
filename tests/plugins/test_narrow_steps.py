"""Steps that hold fewer tokens than sequences decode: shares of what is left begin at 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aioserve import SchedulingPolicy
from aioserve_plugins.deadline import Deadline
from aioserve_plugins.round_robin import RoundRobin
from tests.scheduling.bench import Bench

POLICIES: list[Callable[[], SchedulingPolicy]] = [
    Deadline,
    lambda: RoundRobin(chunk_size=3, adaptive=True),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_is_never_less_than_nothing(policy: Callable[[], SchedulingPolicy]) -> None:
    """Two decoding requests wait for their readers, so a prompt gets the step of one token."""
    bench = Bench(policy=policy(), max_num_batched_tokens=1, max_num_seqs=4)
    now = 0.0
    for number in range(2):
        one = bench.submit([number, 7], 6)
        for _ in range(2):  # its prompt, a token a step
            bench.commit(bench.plan(now), now)
            now += 0.01
        bench.scheduler.pause(one)
    waiting = bench.submit([5, 6, 7, 8], 2)
    plan = bench.plan(now)
    assert [item.sequence_id for item in plan.items] == [waiting]
    assert bench.scheduler.policy_calls.faults_total == 0
