"""Extras that rows of a step ask for, beyond a draw from the model's own logits.

    logits ──► edits ──► draw ──► tokens ──► each slot's history
       └────────────────────────────┴──────► log-probabilities

    logits of a beam ──► log-probabilities ──► edits ──┬──► draw ──► tokens
                                                       └──► log-probabilities that are told

Steps in which no row asks for anything have none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aioserve.sampling.edits import RowEdits
from aioserve.sampling.logprobs import LogprobRows, MostLikely

__all__ = ["RowExtras", "StepExtras"]


@dataclass(slots=True, frozen=True)
class RowExtras:
    """Extras of one step with S sampled rows of logits, and N more rows that are only scored."""

    edits: RowEdits | None
    logprobs: LogprobRows | None

    def before_draw(self, logits: Tensor, num_samples: int) -> StepExtras:
        """Prepare the extras of the model's `logits`, float32 `[S + N, V]`. Takes all memory that
        is needed. Rows of beams change in place."""
        if self.edits is not None:
            self.edits.apply_to_logprobs(logits[:num_samples])
        most_likely = None if self.logprobs is None else MostLikely(self.logprobs, logits)
        sampled = logits[:num_samples]
        if self.edits is not None:
            sampled = sampled if most_likely is None else sampled.clone()
            self.edits.apply(sampled)
        return StepExtras(sampled, self.edits, most_likely)


@dataclass(slots=True, frozen=True)
class StepExtras:
    """Extras of one step on the device, while it is computed."""

    sampled: Tensor
    """float32 `[S, V]`: logits to draw from."""
    edits: RowEdits | None
    most_likely: MostLikely | None

    def after_draw(self, token_ids: Tensor) -> None:
        """Note the tokens drawn: `token_ids`, int64 `[S]`."""
        if self.edits is not None:
            self.edits.note(token_ids)
        if self.most_likely is not None:
            self.most_likely.note(token_ids)
