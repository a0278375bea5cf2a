"""Which token each row of a step has, where its draft tokens have a say.

    sampler match        each row draws as if there were no draft token; one that is what was drawn
                         is kept, and the tokens are those of an engine without speculation
    rejection sampling   a row whose draft token was drawn from a known distribution keeps it as
                         often as can be without changing how often a token comes; all others as
                         above

Either way a draft token is kept where it is its row's token (`verified_rows`). Other drafters
propose tokens without probabilities, and then both rules keep equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aioserve.execution.batch import StepArrays
from aioserve.ops import Backend, Drawn
from aioserve.sampling.rejection import tokens_by_rejection

__all__ = ["RejectionSampling", "SampledDrafts", "SamplerMatch", "Verification"]


class Verification(Protocol):
    """Chosen once for an engine; called on the thread of the steps."""

    def reads_logits(self, step: StepArrays) -> bool:
        """Whether `draw` wants to be called with the logits of this step. Elsewhere its rows may be
        drawn from before they are all there."""
        ...

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        """A token of each row, as `Backend.draw`, from edited logits, float32 `[S, V]`."""
        ...


class SampledDrafts(Protocol):
    """A drafter that tells what it drew its draft tokens from."""

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """Probabilities that the draft tokens of a slot in the current step were drawn by, float32
        `[V]` for each; none where they weren't drawn, or there are none."""
        ...


class SamplerMatch:
    """Draft tokens that are what is drawn anyway."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reads_logits(self, step: StepArrays) -> bool:
        return False

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        return self._backend.draw(logits, step.samples, last_tokens)


class RejectionSampling:
    """Draft tokens by the rule of `aioserve.sampling.rejection`. A backend on the CPU."""

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
        rows = replace(rows, slots=np.array(firsts, np.int64))  # the spare slot is anybody's
        p = self._backend.probabilities(logits[list(at)], rows)
        token_ids = drawn.token_ids.clone()
        token_ids[list(at)] = tokens_by_rejection(
            self._backend, p, torch.stack(q), torch.tensor(draft_tokens), rows
        )
        return Drawn(token_ids, drawn.row_errors)

    def _sampled_drafts(self, step: StepArrays) -> list[tuple[int, int, int, Tensor]]:
        """Each row whose draft token was drawn, by index, with the first of those that follow each
        other, the draft token and what it was drawn by."""
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
