"""Views of waiting requests, which policies see."""

from __future__ import annotations

import pytest

from aioserve.scheduling.policy import SchedulingPolicy, Verdict
from tests.scheduling.bench import Bench


def test_who_is_held_is_not_among_those_that_wait_for_their_turn():
    class Looks(SchedulingPolicy):
        def chunk(self, request, budget_tokens, view):
            seen.append(([r.arrival_index for r in view.waiting], view.num_waiting))
            return budget_tokens

    seen: list[tuple] = []
    bench = Bench(policy=Looks(), max_num_seqs=1)
    _, second, third = (bench.submit(30, 4) for _ in range(3))
    bench.step()
    assert not bench.view(second).is_held
    bench.scheduler.pause(second)
    assert bench.view(second).is_held
    bench.step()
    assert seen == [([1, 2, 3], 3), ([third], 2)]


@pytest.mark.parametrize("reserve", [0, 8])
def test_a_request_starts_exactly_if_there_are_the_pages_that_it_says(reserve):
    class Looks(SchedulingPolicy):
        def admit(self, request, view):
            needed = request.pages_to_start + view.pages_reserved_for(request)
            expected.append(needed <= view.pages_free + view.pages_cached - view.pages_reserved)
            return Verdict.NOW

        def chunk(self, request, budget_tokens, view):
            started.append(request.arrival_index)
            return budget_tokens

    def wait_for_the_last(shared: int, own: int) -> None:
        """Submit requests after one that runs: the cache has `shared` tokens, which only the last
        one finds."""
        bench = Bench(
            policy=Looks(),
            num_pages=14,
            prefix_caching=True,
            output_reserve_tokens=reserve,
            max_num_batched_tokens=64,
        )
        bench.submit([7] * shared, 1)
        bench.run()
        bench.submit([8] * 10, 20)
        bench.step()
        last = bench.submit([7] * shared + [9] * own, 8)
        expected.clear()
        started.clear()
        while not started:
            bench.step()
        assert bench.view(last).is_running
        assert bench.view(last).pages_to_start == 0
        verdicts.add(expected[0])
        alone = not bench.scheduler.state.running[:-1]
        assert [*expected[:-1], expected[-1] or alone] == [False] * (len(expected) - 1) + [True]

    expected: list[bool] = []
    started: list[int] = []
    verdicts: set[bool] = set()
    for shared in (1, 9, 16, 20):
        for own in (1, 6, 16, 27):
            wait_for_the_last(shared, own)
    assert verdicts == {True, False}
