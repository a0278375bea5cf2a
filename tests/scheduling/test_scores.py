"""Scores of a prompt's tokens: each is told once, whatever comes between two chunks."""

from __future__ import annotations

import pytest

from tests.scheduling.bench import Bench


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_scores_that_a_preemption_drops_are_computed_again(prefix_caching: bool) -> None:
    """Two chunks are in flight; the second one's scores are dropped, and the first one's are not
    told again."""
    bench = Bench(prefix_caching=prefix_caching, max_num_batched_tokens=6)
    bench.submit(20, 1, score_from=1)
    first, second = bench.plan(), bench.plan()
    told = [update for update in bench.commit(first) if update.scored]
    bench.scheduler.state.preempt(bench.running[0], bench.scheduler.state.launched + 1)
    assert not bench.commit(second)
    while bench.sequences:
        told += [update for update in bench.step() if update.scored]

    places = [range(one.scored_before, one.scored_before + len(one.scored)) for one in told]
    assert [place for places_of_one in places for place in places_of_one] == list(range(19))
    alone = Bench()
    alone.submit(20, 1, score_from=1)
    expected = [score for update in alone.step() + alone.step() for score in update.scored]
    assert [score for one in told for score in one.scored] == expected
