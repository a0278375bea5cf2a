"""Plans of a sequence that draws each of its tokens under a mask."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.memory import KVMemory
from aioserve.request import FinishReason, Request, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import DRAFT_TOKEN, PENDING_TOKEN, StepPlan
from aioserve.structured_output import StructuredOutput


def scheduler(max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(
        KVMemory.of((16,), 8),
        SchedulingPolicy(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        output_reserve_tokens=0,
    )


def guided(n: int = 1, max_tokens: int = 8, max_draft_tokens: int = 0) -> Request:
    return Request(
        request_id="r",
        prompt_ids=np.array([1, 2, 3], np.int32),
        max_length=3 + max_tokens,
        params=SamplingParams(n=n, structured_output=StructuredOutput(json_object=True)),
        max_draft_tokens=max_draft_tokens,
    )


def outcome(plan: StepPlan | None, *token_ids: int) -> tuple[StepPlan, StepOutcome]:
    assert plan is not None
    return plan, StepOutcome(step=plan.step, token_ids=token_ids)


def late(plan: StepPlan | None) -> tuple[StepPlan, StepOutcome]:
    """Plan and outcome of a step with one row, whose mask came too late."""
    assert plan is not None
    return plan, StepOutcome(step=plan.step, token_ids=(), token_counts={0: 0})


def items(plan: StepPlan | None) -> list[tuple[int, list[int]]]:
    return [] if plan is None else [(i.start, i.token_ids.tolist()) for i in plan.items]


def test_samples_begin_when_a_mask_is_there_for_each() -> None:
    one = scheduler()
    first, second = one.submit(guided(n=2))
    assert one.plan(0.0) is None
    one.guide(first)
    assert one.plan(0.0) is None
    one.guide(second)
    plan = one.plan(0.0)
    assert plan is not None
    assert one.masked_rows(plan) == [(0, first, 3), (1, second, 3)]


def test_steps_are_planned_ahead_of_the_token_that_a_grammar_must_see() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    first, second = one.plan(0.0), one.plan(0.0)
    assert second is not None
    assert items(second) == [(3, [PENDING_TOKEN])]
    assert one.masked_rows(second) == [(0, sequence_id, 4)]
    one.commit(*outcome(first, 7), 0.0)
    one.commit(*outcome(second, 8), 0.0)
    assert items(one.plan(0.0)) == [(4, [8])]


def test_what_is_forced_is_computed_with_the_next_token() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    one.commit(*outcome(one.plan(0.0), 7), 0.0)
    forced = one.guide(sequence_id, (8, 9))
    assert [(update.token_id, update.forced) for update in forced] == [(8, True), (9, True)]
    plan = one.plan(0.0)
    assert plan is not None
    assert items(plan) == [(3, [7, 8, 9])]
    assert one.masked_rows(plan) == [(0, sequence_id, 6)]
    assert one.counters.tokens_generated == 3


@pytest.mark.parametrize("num_forced", [1, 2, 3])
@pytest.mark.parametrize("ahead", [1, 2])
def test_what_steps_in_flight_sample_of_what_is_forced_is_told_once(
    num_forced: int, ahead: int
) -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    first = one.plan(0.0)
    flying = [one.plan(0.0) for _ in range(ahead)]
    told = [u.token_id for u in one.commit(*outcome(first, 7), 0.0)]
    told += [u.token_id for u in one.guide(sequence_id, (8, 9, 10)[:num_forced])]
    token_ids = [8, 9, 10, 11, 12, 13]
    for plan in flying:
        told += [u.token_id for u in one.commit(*outcome(plan, token_ids.pop(0)), 0.0)]
        one.sanity_check()
    expected = 1 + max(num_forced, ahead)
    assert told == [7, 8, 9, 10, 11][:expected]
    # The rest is computed in one go, and a token is sampled after it.
    last = told[ahead:]
    assert items(one.plan(0.0)) == [(3 + ahead, last)]


def test_a_row_whose_mask_is_late_is_sampled_when_it_is_there() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    first, second = one.plan(0.0), one.plan(0.0)
    one.commit(*outcome(first, 7), 0.0)
    third = one.plan(0.0)
    assert one.commit(*late(second), 0.0) == []
    assert one.plan(0.0) is None  # the mask after 7 is missing
    assert one.commit(*outcome(third, 99), 0.0) == []  # it was computed over nothing
    one.sanity_check()
    one.guide(sequence_id)
    plan = one.plan(0.0)
    assert plan is not None
    assert items(plan)[0][1][-1] == 7
    assert one.masked_rows(plan) == [(0, sequence_id, 4)]
    assert [u.token_id for u in one.commit(*outcome(plan, 8), 0.0)] == [8]


def test_a_mask_that_comes_before_its_step_is_known_to_be_late_is_good() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    first, second = one.plan(0.0), one.plan(0.0)
    one.commit(*outcome(first, 7), 0.0)
    one.guide(sequence_id, (8,))
    assert one.commit(*late(second), 0.0) == []
    plan = one.plan(0.0)
    assert items(plan)[0][1][-1] == 8
    assert [u.token_id for u in one.commit(*outcome(plan, 9), 0.0)] == [9]


def test_forced_tokens_end_a_sequence_as_others_do() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided(max_tokens=3))
    with pytest.raises(InvariantError):
        one.guide(sequence_id, (8,))
    one.guide(sequence_id)
    first, second = one.plan(0.0), one.plan(0.0)
    one.commit(*outcome(first, 7), 0.0)
    *_, last = one.guide(sequence_id, (8, 9, 10))
    assert (last.token_id, last.finish_reason) == (9, FinishReason.LENGTH)
    assert one.guide(sequence_id, (8,)) == []
    assert one.commit(*outcome(second, 8), 0.0) == []
    one.sanity_check()
    assert one.memory.pool.num_fenced == 0


@pytest.mark.parametrize("leaves", ["ends", "is preempted"])
def test_nothing_is_found_of_what_was_computed_over_a_row_without_its_mask(leaves: str) -> None:
    """The step in flight has drawn another token than the one forced meanwhile, and the next step
    computes that."""
    one = scheduler()
    (sequence_id,) = one.submit(guided(max_tokens=12))
    one.guide(sequence_id)
    first, second, third = one.plan(0.0), one.plan(0.0), one.plan(0.0)
    one.commit(*outcome(first, 7), 0.0)
    one.guide(sequence_id, (8, 9, 10, 11, 12))
    if leaves == "ends":
        one.finish(sequence_id)
    else:
        one.state.preempt(one.state.running[0], one.state.launched + 1)
    tree = one.memory.tree
    assert tree is not None
    assert tree.peek(b"", np.array([1, 2, 3, 7, 8, 9, 10, 11], np.int32)) == (0,)
    one.commit(*late(second), 0.0)
    one.commit(*outcome(third, 99), 0.0)
    one.sanity_check()


def drawn_ahead(*forced: int, max_tokens: int = 8) -> tuple[Scheduler, int]:
    """A sequence whose first token, 7, is known, followed by forced tokens that are drawn."""
    one = scheduler()
    (sequence_id,) = one.submit(guided(max_tokens=max_tokens))
    one.guide(sequence_id)
    one.commit(*outcome(one.plan(0.0), 7), 0.0)
    assert one.guide(sequence_id, forced, drawn=True) == []
    return one, sequence_id


def test_forced_tokens_that_are_drawn_are_verified_in_one_step() -> None:
    one, sequence_id = drawn_ahead(8, 9, 10)
    first, second = one.plan(0.0), one.plan(0.0)
    assert items(first) == [(3, [7, 8, 9, 10])]
    assert second is not None
    assert items(second) == [(7, [PENDING_TOKEN])]
    assert first is not None
    assert one.masked_rows(first) == [(0, sequence_id, 4)]
    told = StepOutcome(
        step=first.step, token_ids=(8, 9, 10, 11), token_counts={0: 4}, drafted={0: 3}
    )
    updates = one.commit(first, told, 0.0)
    assert [update.token_id for update in updates] == [8, 9, 10, 11]
    assert not any(update.forced for update in updates)
    one.commit(*outcome(second, 12), 0.0)
    assert one.num_known(sequence_id) == 9
    account = one.account_of(sequence_id)
    assert (account.drafted_tokens, account.accepted_tokens) == (0, 0)
    assert not one.counters.drafted
    assert items(one.plan(0.0)) == [(8, [12])]


def test_one_that_draws_what_is_forced_may_skip_a_step_for_its_next_mask() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided(max_tokens=20, max_draft_tokens=2))
    one.guide(sequence_id)
    one.commit(*outcome(one.plan(0.0), 7), 0.0)
    drafts = one.state.sequences[sequence_id].drafts
    assert drafts is not None
    drafts.skipped_for_mask = True  # it has waited for the mask that comes now
    one.guide(sequence_id, (8, 9), drawn=True)
    assert items(one.plan(0.0)) == [(3, [7, 8, 9])]
    assert not drafts.skipped_for_mask


def test_what_is_known_to_come_is_verified_behind_a_token_in_flight() -> None:
    one = scheduler()
    (sequence_id,) = one.submit(guided())
    one.guide(sequence_id)
    first, second = one.plan(0.0), one.plan(0.0)
    one.commit(*outcome(first, 7), 0.0)
    one.guide(sequence_id, (8, 9, 10), drawn=True)
    third = one.plan(0.0)
    assert items(third) == [(4, [PENDING_TOKEN, 9, 10])]
    one.commit(*outcome(second, 8), 0.0)
    assert third is not None
    told = StepOutcome(step=third.step, token_ids=(9, 10, 11), token_counts={0: 3}, drafted={0: 2})
    assert len(one.commit(third, told, 0.0)) == 3


def test_where_one_of_them_is_not_drawn_the_sequence_goes_on_from_there() -> None:
    one, sequence_id = drawn_ahead(8, 9, 10)
    first, second = one.plan(0.0), one.plan(0.0)
    assert first is not None
    told = StepOutcome(step=first.step, token_ids=(8, 9), token_counts={0: 2}, drafted={0: 3})
    assert len(one.commit(first, told, 0.0)) == 2
    assert one.commit(*outcome(second, 12), 0.0) == []
    assert one.num_known(sequence_id) == 6
    assert items(one.plan(0.0)) == [(5, [9, 10])]
    one.sanity_check()


def test_no_more_of_them_are_verified_than_an_answer_may_have() -> None:
    one, _ = drawn_ahead(8, 9, 10, 11, max_tokens=3)
    assert items(one.plan(0.0)) == [(3, [7, 8])]
    assert one.plan(0.0) is None


def test_a_step_has_no_more_rows_for_them_than_it_may_have_sequences() -> None:
    one, _ = drawn_ahead(8, 9, 10, 11, 12)
    one.submit(guided())
    assert items(one.plan(0.0)) == [(3, [7, 8, 9])]


@pytest.mark.parametrize("depth", [1, 2])
def test_where_seats_are_taken_they_are_drawn_one_by_one_and_drafts_come_behind_them(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The mask of the token after them is there, and none is awaited."""
    one = scheduler(max_num_seqs=1)
    (sequence_id,) = one.submit(guided(max_tokens=20, max_draft_tokens=4))
    one.guide(sequence_id)
    one.commit(*outcome(one.plan(0.0), 7), 0.0)
    one.guide(sequence_id, (8, 9, 10), drawn=True)
    flying: list[StepPlan | None] = []
    for place, token_id in enumerate([8, 9, 10]):
        while len(flying) < min(depth, 3 - place):
            flying.append(one.plan(0.0))
            ahead = place + len(flying) - 1
            known = [7, 8, 9][ahead] if len(flying) == 1 else PENDING_TOKEN
            assert items(flying[-1]) == [(3 + ahead, [known])]
        one.commit(*outcome(flying.pop(0), token_id), 0.0)
    one.sanity_check()
    assert items(one.plan(0.0)) == [(6, [10, *[DRAFT_TOKEN] * 4])]
    assert not caplog.messages  # of a failed plan that was repeated
