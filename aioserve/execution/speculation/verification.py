"""Which token each row of a step has, where its guesses have a say.

    sampler match        each row draws as if there were no guess: what is kept are guesses that are
                         what was drawn, and the tokens are those of an engine without speculation
    rejection sampling   a row whose guess was drawn from a known distribution keeps it as often as
                         can be without changing how often a token comes; all others as above

Either way a guess is kept where it is its row's token (`verified_rows`). A guess that was not drawn
is certain to its drafter, and then both keep the same share of guesses.
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

__all__ = ["DrawnGuesses", "RejectionSampling", "SamplerMatch", "Verification"]


class Verification(Protocol):
    """Chosen once for an engine; called on the thread of the steps."""

    def reads_logits(self, step: StepArrays) -> bool:
        """Whether `draw` wants to be called with the logits of this step. Elsewhere its rows may be
        drawn from before they are all there."""
        ...

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        """A token of each row, as `Backend.draw`, from edited logits, float32 `[S, V]`."""
        ...


class DrawnGuesses(Protocol):
    """A drafter that tells what it drew its guesses from."""

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """Probabilities that the guesses of a slot in the current step were drawn by, float32 `[V]`
        for each; none where they weren't drawn, or there are none."""
        ...


class SamplerMatch:
    """Guesses that are what is drawn anyway."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reads_logits(self, step: StepArrays) -> bool:
        return False

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        return self._backend.draw(logits, step.samples, last_tokens)


class RejectionSampling:
    """Guesses by the rule of `aioserve.sampling.rejection`. A backend on the CPU."""

    def __init__(self, backend: Backend, drafter: DrawnGuesses) -> None:
        self._backend = backend
        self._drafter = drafter

    def reads_logits(self, step: StepArrays) -> bool:
        return bool(self._drawn_guesses(step))

    def draw(self, logits: Tensor, step: StepArrays, last_tokens: Tensor) -> Drawn:
        drawn = self._backend.draw(logits, step.samples, last_tokens)
        found = [each for each in self._drawn_guesses(step) if each[0] not in drawn.row_errors]
        if not found:
            return drawn
        at, firsts, guesses, q = zip(*found, strict=True)
        chosen = np.zeros(len(step.samples), np.int64)
        chosen[list(at)] = 1
        rows = step.samples.repeated(chosen.tolist(), step.samples.positions[chosen > 0])
        rows = replace(rows, slots=np.array(firsts, np.int64))  # the spare slot is anybody's
        p = self._backend.probabilities(logits[list(at)], rows)
        token_ids = drawn.token_ids.clone()
        token_ids[list(at)] = tokens_by_rejection(
            self._backend, p, torch.stack(q), torch.tensor(guesses), rows
        )
        return Drawn(token_ids, drawn.row_errors)

    def _drawn_guesses(self, step: StepArrays) -> list[tuple[int, int, int, Tensor]]:
        """Each row whose guess was drawn, by index, with the first of those that follow each other,
        the guess and what it was drawn by."""
        if step.verified is None:
            return []
        return [
            (row, first, guess, distribution)
            for first, ids in step.verified.guesses.items()
            if (own := self._drafter.distributions(int(step.samples.slots[first + len(ids)])))
            for row, guess, distribution in zip(
                range(first, first + len(ids)), ids, own[: len(ids)], strict=True
            )
        ]
