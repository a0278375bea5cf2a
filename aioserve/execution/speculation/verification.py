"""The token of each row of a step, in view of its draft tokens.

    sampler match        each row draws as if there were no draft token; one that is what was drawn
                         is kept, and the tokens are those of an engine without speculation
    rejection sampling   a row whose draft token was drawn from a known distribution keeps it as
                         often as can be without changing how often a token comes; all others as
                         above

Either way a draft token is accepted if it is its row's token (`verified_rows`). If a drafter gives
no probabilities, both rules accept equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aioserve.execution.step_arrays import StepArrays
from aioserve.ops import Backend, Drawn
from aioserve.sampling.rejection import tokens_by_rejection

__all__ = ["RejectionSampling", "SampledDrafts", "SamplerMatch", "Verification"]


class Verification(Protocol):
    """Rule that is chosen once for an engine. Called on the step thread."""

    def reads_logits(self, step: StepArrays) -> bool:
        """True if `draw` needs all logits of this step at once. Otherwise rows may be drawn from
        before all of them are there."""
        ...

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        """Return a token of each row, as `Backend.draw` does, from edited logits, float32 `[S,
        V]`."""
        ...


class SampledDrafts(Protocol):
    """A drafter that knows the distributions its draft tokens were drawn from."""

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """Return the distributions of a slot's draft tokens in the current step, float32 `[V]`
        each.

        Empty if they weren't drawn, or if there are none.
        """
        ...


class SamplerMatch:
    """Accepts draft tokens that equal the drawn tokens."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reads_logits(self, step: StepArrays) -> bool:
        return False

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        return self._backend.draw(logits, step.samples, last_tokens)


class RejectionSampling:
    """Accepts draft tokens by the rule of `aioserve.sampling.rejection`. Needs a backend on the
    CPU."""

    def __init__(self, backend: Backend, drafter: SampledDrafts) -> None:
        self._backend = backend
        self._drafter = drafter

    def reads_logits(self, step: StepArrays) -> bool:
        return bool(self._sampled_drafts(step))

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        drawn = self._backend.draw(logits, step.samples, last_tokens)
        found = [each for each in self._sampled_drafts(step) if each[0] not in drawn.row_errors]
        if not found:
            return drawn
        at, firsts, draft_tokens, q = zip(*found, strict=True)
        chosen = np.zeros(len(step.samples), np.int64)
        chosen[list(at)] = 1
        rows = step.samples.repeated(chosen.tolist(), step.samples.positions[chosen > 0])
        rows = replace(rows, slots=np.array(firsts, np.int64))  # the spare slot may be shared
        p = self._backend.probabilities(logits[list(at)], rows)
        token_ids = drawn.token_ids.clone()
        token_ids[list(at)] = tokens_by_rejection(
            self._backend, p, torch.stack(q), torch.tensor(draft_tokens), rows
        )
        return Drawn(token_ids, drawn.row_errors)

    def _sampled_drafts(self, step: StepArrays) -> list[tuple[int, int, int, Tensor]]:
        """List each row whose draft token was drawn: its index, the first row of its chain, the
        draft token, and the token's distribution."""
        if step.verified is None:
            return []
        return [
            (row, first, draft_token, distribution)
            for first, ids in step.verified.draft_tokens.items()
            if (own := self._drafter.distributions(int(step.samples.slots[first + len(ids)])))
            for row, draft_token, distribution in zip(
                range(first, first + len(ids)), ids, own[: len(ids)], strict=True
            )
        ]
