"""Scores of a prompt's tokens: each is reported once, whatever comes between two chunks."""

from __future__ import annotations

import pytest

from tests.scheduling.bench import Bench


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_scores_that_a_preemption_drops_are_computed_again(prefix_caching: bool) -> None:
    """Two chunks are in flight. The second one's scores are dropped, and the first one's are not
    repeated."""
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


def test_all_of_a_prompt_is_told_before_a_token_of_another_sample() -> None:
    """The prompt's own sample is preempted while the last of it is in flight."""
    bench = Bench(prefix_caching=True, max_num_batched_tokens=6)
    own, other = bench.submit_all(10, 3, n=2, score_from=1)
    bench.step()
    last = bench.plan()
    (sequence,) = [one for one in bench.running if one.sequence_id == own]
    bench.scheduler.state.preempt(sequence, bench.scheduler.state.launched + 1)
    updates = bench.commit(last)
    assert [one.sequence_id for one in updates] == [own, other]
    assert (updates[0].scored_before, len(updates[0].scored)) == (6, 3)
    assert updates[1].token_id is not None
    told = updates[0].scored
    alone = Bench(max_num_batched_tokens=6)
    alone.submit(10, 3, score_from=1)
    alone.step()
    assert [one.scored for one in alone.step() if one.scored] == [told]
    while bench.sequences:
        assert not [one for one in bench.step() if one.scored]


def test_scores_of_a_sample_that_was_cancelled_are_told_nobody() -> None:
    """Its step is in flight, and another sample of the prompt goes on."""
    bench = Bench(prefix_caching=True, max_num_batched_tokens=6)
    own, other = bench.submit_all(10, 3, n=2, score_from=1)
    bench.step()
    last = bench.plan()
    bench.scheduler.finish(own)
    assert [one.sequence_id for one in bench.commit(last)] == [other]
