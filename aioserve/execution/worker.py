"""The contract between the host of steps and what computes them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.execution.batch import StepArrays
from aioserve.steps.outcome import StepOutcome

__all__ = ["Worker"]


class Worker(Protocol):
    """A model with its weights, its KV pages and the last token of each slot.

    Its tokens follow from the arrays that it is given alone: it sees no plan and runs no drafter.
    All calls come in the order of the steps, from one thread, and each is waited for.
    """

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages, one copy after the other, before the step that `copies`, int32 `[n, 5]`, are
        of. They are as `Backend.copy_pages` takes them."""
        ...

    def step(self, block: StepArrays) -> StepOutcome:
        """Compute a step, whose pages are copied. Raises `InvariantError` for one that has nothing
        to compute, and whatever a failed step raises."""
        ...
