"""Rows that a rule of acceptance decides, and rows that are drawn as without draft tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch

from aioserve.execution.speculation.verification import RejectionSampling, SamplerMatch
from aioserve.execution.speculation.verified_rows import VerifiedRows
from aioserve.execution.step_arrays import NO_COPIES, StepArrays
from aioserve.ops import Backend
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable
from aioserve.steps.outcome import StepOutcome
from tests.ops.scenarios import BACKENDS

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

VOCAB = 6
WARM = SamplingParams()
CERTAIN = [-math.inf, -math.inf, 0.0, -math.inf, -math.inf, -math.inf]
SURE = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


class Drawn:
    """A drafter that drew the draft tokens of some slots, all from one distribution."""

    def __init__(self, draft_tokens: Mapping[int, int], distribution: Sequence[float]) -> None:
        self._draft_tokens = draft_tokens
        self._distribution = torch.tensor(distribution)

    def distributions(self, slot: int) -> Sequence[torch.Tensor]:
        return [self._distribution] * self._draft_tokens.get(slot, 0)


def step_of(draft_tokens: Sequence[Sequence[int]], seed: int = 0) -> StepArrays:
    """Make a step in which slot i draws a token, followed by these draft tokens."""
    slots = SlotTable(len(draft_tokens))
    counts = [len(ids) + 1 for ids in draft_tokens]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    for slot in range(len(draft_tokens)):
        slots.start(slot, WARM, seed + slot)
    at = [slot for slot, count in enumerate(counts) for _ in range(count)]
    positions = [10 + place for count in counts for place in range(count)]
    by_first = {first: ids for first, ids in zip(firsts, draft_tokens, strict=True) if ids}
    verified = VerifiedRows(firsts, counts, by_first)
    return StepArrays(3, NO_COPIES, None, slots.rows(at, positions), verified=verified)


def outcome(
    backend: Backend, step: StepArrays, logits: torch.Tensor, drafter: Drawn | None
) -> StepOutcome:
    rule = SamplerMatch(backend) if drafter is None else RejectionSampling(backend, drafter)
    drawn = rule.draw(logits, step, backend.allocate_slots(len(step.samples)))
    return step.outcome(drawn.token_ids.tolist(), drawn.row_errors)


@on_every_backend
def test_only_rows_whose_drafts_were_drawn_are_decided_otherwise(backend: Backend) -> None:
    """Slot 1 has draft tokens that were not drawn, and slot 2 has none. With many seeds,
    rejection keeps a token that the row's own draw would not give."""
    other = 0
    for seed in range(0, 300, 3):
        step = step_of([[2, 2], [2], []], seed)
        logits = torch.zeros(6, VOCAB)
        match = outcome(backend, step, logits, None)
        rule = Drawn({0: 2}, [1 / VOCAB] * VOCAB)
        rejection = outcome(backend, step, logits, rule)
        # Target and draft have the same distribution: all draft tokens are kept, and one more is
        # drawn.
        mine = rejection.token_ids[:3]
        assert mine[:2] == (2, 2)
        assert rejection.token_counts[0] == 3
        theirs = match.token_counts.get(0, 1)
        assert rejection.token_ids[3:] == match.token_ids[theirs:]
        assert rejection.drafted == match.drafted == {0: 2, 1: 1}
        other += match.token_ids[0] != 2
    assert other > 50


@on_every_backend
def test_behind_drafts_that_are_all_kept_a_token_is_drawn_as_without_any(
    backend: Backend,
) -> None:
    rule = Drawn({0: 1}, SURE)
    for seed in range(30):
        logits = torch.tensor([CERTAIN, [0.0] * VOCAB])
        step = step_of([[2]], seed)
        drawn = outcome(backend, step, logits, rule).token_ids
        match = SamplerMatch(backend).draw(logits, step, backend.allocate_slots(1)).token_ids
        assert drawn == (2, match[1])


@on_every_backend
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_told_as_by_sampler_match(bad: float, backend: Backend) -> None:
    """A bad first row ends its request. A bad row after a draft token is left for the next step."""
    for row in (0, 1, 2):
        logits = torch.tensor([CERTAIN] * 3)
        logits[row, :] = bad
        step = step_of([[2, 2]])
        match = outcome(backend, step, logits, None)
        rejection = outcome(backend, step, logits, Drawn({0: 2}, SURE))
        assert rejection.row_errors == match.row_errors
        assert bool(match.row_errors) == (row == 0)
        assert rejection.token_ids == match.token_ids


def test_a_step_without_drawn_drafts_needs_no_logits() -> None:
    backend = BACKENDS[0]
    step = step_of([[2, 2], [2]])
    assert not SamplerMatch(backend).reads_logits(step)
    assert not RejectionSampling(backend, Drawn({}, [])).reads_logits(step)
    assert RejectionSampling(backend, Drawn({1: 1}, [0.0])).reads_logits(step)
    plain = StepArrays(0, NO_COPIES, None, SlotTable(1).rows([], []))
    assert not RejectionSampling(backend, Drawn({0: 1}, [0.0])).reads_logits(plain)


def test_a_distribution_that_a_draft_lacks_is_refused() -> None:
    rule = RejectionSampling(BACKENDS[0], Drawn({0: 1}, [1 / VOCAB] * VOCAB))
    with pytest.raises(ValueError, match="zip"):
        rule.reads_logits(step_of([[2, 2]]))
