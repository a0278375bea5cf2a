"""Draft tokens by a head with its own KV pages, which reads states of the target's layers.

    target      states of a b c d e             it drew f
    first batch b c d e f beside a b c d e  ->  g and a state of the head's own
    second      g beside that state         ->  h

The next step computes the states of f and of accepted draft tokens, from which the head computes
its entries anew. The last token of a shared page was taken in together with the next token of one
of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aioserve.execution.speculation.drafts.computed_drafter import DraftOptions
from aioserve.execution.speculation.drafts.paged_drafter import PagedDrafter
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.models.decoder import Decoder
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.ops import Drawn, HostBatch, KVCache, SampleRows
from aioserve.steps.plan import StepPlan

__all__ = ["DraftHead"]


class DraftHead(PagedDrafter[torch.Tensor]):
    """Draft tokens of a head for `target`, whose steps keep the states that the head reads."""

    lag = 1
    keeps_draft_tokens = False

    def __init__(
        self,
        head: DecoderHead,
        target: Decoder,
        cache: KVCache,
        states: StatePages,
        options: DraftOptions,
    ) -> None:
        super().__init__(target.backend, cache, head.max_model_len, options)
        self._head = head
        self._target = target
        self._states = states

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "head": self._head.kind,
            "dtype": str(self._head.dtype).removeprefix("torch."),
            "kv_cache_bytes": self._cache.storage.nbytes,
            **self._states.facts,
        }

    @property
    def states(self) -> StatePages:
        return self._states

    def rehearse(self) -> None:
        self._states.clear(0)
        super().rehearse()

    def follow(self, plan: StepPlan) -> None:
        self._states.copy(plan.copies)
        super().follow(plan)

    @property
    def _kept_states(self) -> torch.Tensor:
        return self._target.kept_states

    def _compute(
        self, host: HostBatch, samples: SampleRows | None, passed: torch.Tensor | None
    ) -> tuple[Drawn | None, torch.Tensor | None]:
        head, cache, fuses = self._head, self._cache, passed is None
        rows = self._states.at(host.token_locations[0]) if passed is None else passed
        batch = self._backend.prepare(host, cache, self._last_tokens)
        if samples is not None and not self._tells_of(samples):
            return head.draw(rows, batch, cache, samples, self._last_tokens, fuses=fuses)
        logits, hidden = head.forward(rows, batch, cache, fuses=fuses)
        return (None, None) if samples is None else (self._draw(logits, samples), hidden)

    def _picked(self, passed: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor | None:
        return None if passed is None else passed[list(rows)]
