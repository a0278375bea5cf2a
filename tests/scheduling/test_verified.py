"""Steps in which a row has several tokens: guesses of what comes next, some of them right."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.request import FinishReason
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import PENDING_TOKEN, ItemKind, StepPlan
from aioserve.testing import expected_tokens
from tests.scheduling.bench import Bench

PROMPT = [7, 1, 8, 2, 8, 1]
TOKENS = expected_tokens(PROMPT, 12)
WRONG = -7


def with_guesses(bench: Bench, plan: StepPlan, guesses: Sequence[int]) -> StepPlan:
    """A plan of one decode, as it would be with these guesses behind its token."""
    ((run, item, _),) = bench.scheduler.state.in_flight[plan.step]
    lease = run.lease
    assert bench.memory.reserve(lease, len(guesses), plan.step)
    bench.memory.advance(lease, len(guesses), plan.step)
    item = msgspec.structs.replace(
        item,
        kind=ItemKind.VERIFY,
        count=1 + len(guesses),
        token_ids=np.array([item.token_ids[0], *guesses], np.int32),
    )
    pages = lease.page_ids
    lease.carried = len(pages)
    bench.scheduler.state.in_flight[plan.step] = [(run, item, pages)]
    plan = msgspec.structs.replace(plan, items=(item,), pages=(SlotPages(run.slot, 0, pages),))
    bench.page_tables.take(plan)
    return plan


@pytest.mark.parametrize(
    ("guesses", "num_kept"),
    [([], 1), ([WRONG], 1), (TOKENS[1:2], 2), ([*TOKENS[1:4], WRONG, 9], 4), (TOKENS[1:7], 7)],
)
def test_guesses_are_kept_up_to_the_first_that_is_wrong(guesses: list[int], num_kept: int) -> None:
    bench = Bench(page_size=2, prefix_caching=True)
    bench.submit(PROMPT, max_tokens=12)
    assert [update.token_id for update in bench.step()] == TOKENS[:1]
    plan = with_guesses(bench, bench.plan(), guesses)
    updates = bench.commit(plan)
    assert [update.token_id for update in updates] == TOKENS[1 : 1 + num_kept]
    assert bench.running[0].lease.computed == len(PROMPT) + num_kept
    (rest,) = bench.run().values()
    assert rest == TOKENS[1 + num_kept :]
    assert bench.scheduler.counters.tokens_generated == 12
    # Nothing of a wrong guess is in the prefix tree.
    bench.submit([*PROMPT, *TOKENS], max_tokens=4)
    assert [*bench.run().values()] == [expected_tokens([*PROMPT, *TOKENS], 4)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_earliest_end_wins_and_what_is_behind_it_is_nothing(page_size: int) -> None:
    bench = Bench(page_size=page_size, prefix_caching=True)
    end = TOKENS[3]
    bench.submit(PROMPT, max_tokens=12, end_ids=frozenset([end]))
    bench.step()
    updates = bench.commit(with_guesses(bench, bench.plan(), TOKENS[1:7]))
    assert [update.token_id for update in updates] == TOKENS[1:4]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.STOP]
    assert not bench.sequences
    bench.submit([*PROMPT, *TOKENS[:5]], max_tokens=4)
    assert [*bench.run().values()] == [expected_tokens([*PROMPT, *TOKENS[:5]], 4)]


def test_no_more_tokens_are_taken_than_an_answer_may_have() -> None:
    bench = Bench()
    bench.submit(PROMPT, max_tokens=4)
    bench.step()
    updates = bench.commit(with_guesses(bench, bench.plan(), TOKENS[1:7]))
    assert [update.token_id for update in updates] == TOKENS[1:4]
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert not bench.sequences


def test_while_its_guesses_are_verified_a_sequence_is_in_no_other_step() -> None:
    bench = Bench()
    bench.submit(PROMPT, max_tokens=12)
    bench.step()
    flying = with_guesses(bench, bench.plan(), TOKENS[1:4])
    assert bench.scheduler.plan(0.0) is None
    bench.commit(flying)
    assert [item.start for item in bench.plan().items] == [len(PROMPT) + 4]


def test_tokens_of_one_that_has_left_are_dropped() -> None:
    bench = Bench()
    first = bench.submit(PROMPT, max_tokens=12)
    bench.step()
    flying = with_guesses(bench, bench.plan(), TOKENS[1:4])
    bench.scheduler.finish(first)
    assert bench.commit(flying) == []
    assert bench.scheduler.counters.tokens_generated == 1


def test_an_outcome_with_more_tokens_than_were_guessed_is_refused() -> None:
    bench = Bench()
    bench.submit(PROMPT, max_tokens=12)
    bench.step()
    plan = bench.plan()
    assert plan.items[0].token_ids[0] in (PENDING_TOKEN, TOKENS[0])
    outcome = bench.device.execute(plan)
    several = msgspec.structs.replace(outcome, token_ids=(1, 2), token_counts={0: 2})
    with pytest.raises(InvariantError, match=r"1 rows, its outcome 2 tokens, of rows \{0: 2\}"):
        bench.scheduler.commit(plan, several, 0.0)
    bench.commit(plan)
