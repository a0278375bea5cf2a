"""Drafters rehearse the largest batches that can come, and no larger ones."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from aioserve.execution.speculation.drafts.computed_drafter import DraftOptions
from aioserve.execution.speculation.drafts.draft_medusa import DraftMedusa
from aioserve.execution.speculation.drafts.draft_model import DraftModel
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.ops import Drawn, HostBatch, SampleRows
from tests.doubles.draft_decoder import DraftDecoder, TokenPages

MOST_TOKENS = 20


def options_of(max_model_len: int, max_draft_tokens: int) -> DraftOptions:
    return DraftOptions(
        num_slots=6,
        num_groups=1,
        max_model_len=max_model_len,
        max_sequences=3,
        max_draft_tokens=max_draft_tokens,
        most_tokens=MOST_TOKENS,
    )


class HeardDecoder(DraftDecoder):
    """Computes nothing."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.batches: list[HostBatch] = []
        self.any_sampled: list[bool] = []

    def draw(
        self, host: HostBatch, kv: TokenPages, rows: SampleRows, last_tokens: torch.Tensor
    ) -> Drawn:
        assert len(rows) == len(host.logit_rows) == len(host.context_lens)
        assert host.page_table.max() == 0
        self.batches.append(host)
        self.any_sampled.append(bool((rows["temperature"] > 0).any()))
        return Drawn(torch.zeros(len(rows), dtype=torch.int64), {})


@pytest.mark.parametrize(("of_draft", "served"), [(5, 9), (9, 5), (40, 90), (90, 40)])
def test_a_draft_model_rehearses_its_largest_batches_and_longest_contexts(
    of_draft: int, served: int
) -> None:
    decoder, longest = HeardDecoder(of_draft), min(of_draft, served)
    options = options_of(served, 4)
    DraftModel(cast(Any, decoder), cast(Any, TokenPages(1, 4)), options).rehearse()
    largest, *others = decoder.batches
    assert len(largest.token_ids) == min(MOST_TOKENS, 3 * longest)
    assert largest.context_lens.tolist() == [longest] * 3
    # A few long and a few short contexts may take other kernels.
    contexts = [batch.context_lens.tolist() for batch in others]
    assert sorted(contexts) == [[1], [longest], [longest] * 3]
    assert all(len(batch.token_ids) == len(batch.context_lens) for batch in others)
    assert set(decoder.any_sampled) == {False, True}


class HeardHeads:
    """Has `count` heads, and computes nothing."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[tuple[int, int]] = []

    def logits(self, states: torch.Tensor, count: int) -> torch.Tensor:
        self.asked.append((len(states), count))
        return torch.zeros(count, len(states), 8)


class Target(DraftDecoder):
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def draw(self, logits: torch.Tensor, rows: SampleRows, last_tokens: torch.Tensor) -> Drawn:
        assert len(logits) == len(rows)
        return Drawn(torch.zeros(len(rows), dtype=torch.int64), {})


@pytest.mark.parametrize(("count", "max_draft_tokens"), [(5, 3), (3, 5)])
def test_heads_rehearse_the_most_drafts_of_the_most_sequences(
    count: int, max_draft_tokens: int
) -> None:
    heads, states = HeardHeads(count), StatePages(torch.ones(1, 4, 8), None)
    options = options_of(90, max_draft_tokens)
    DraftMedusa(cast(Any, heads), cast(Any, Target()), states, options).rehearse()
    assert set(heads.asked) == {(3, 3)}
