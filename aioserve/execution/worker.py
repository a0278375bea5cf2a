"""The contract between the host of steps and the workers that compute them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.execution.step_arrays import StepArrays
from aioserve.steps.outcome import StepOutcome

__all__ = ["PendingStep", "Worker"]


class PendingStep(Protocol):
    """A step that a worker has begun. If the device runs ahead of the host, further steps may
    begin before it has ended."""

    def outcome(self) -> StepOutcome:
        """Wait for its end, on any thread. Call it once, in the order of the steps.

        Raises what the step raised, and `RunnerFailedError` if no other step can succeed.
        """
        ...


class Worker(Protocol):
    """A model with its weights, its KV pages and the last token of each slot.

    A `Placement` loads its weights, measures the memory left for pages, allocates these and makes
    it. Its tokens depend only on the blocks that it is given: it sees no plan and runs no drafter.
    All calls come in the order of the steps, from one thread.
    """

    @property
    def max_in_flight(self) -> int:
        """Most steps that may be begun without their outcomes being read."""
        ...

    def step(self, block: StepArrays) -> PendingStep:
        """Begin a step: copy its pages, then compute its batch, if it has one.

        A worker that computes at once raises the step's error here, others from `outcome`.
        """
        ...

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages, one copy after the other, after the steps that were begun.

        These must be fewer than `max_in_flight`. `copies`, int32 `[n, 5]`, are those of
        `Backend.copy_pages`. They are done on return.
        """
        ...

    def close(self) -> None:
        """Free its resources. No call comes afterwards."""
        ...
