"""The contract between the host of steps and what computes them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.execution.batch import StepArrays
from aioserve.steps.outcome import StepOutcome

__all__ = ["PendingStep", "Worker"]


class PendingStep(Protocol):
    """A step that a worker has begun. On a device that runs ahead of the host, others may be begun
    before it has ended."""

    def outcome(self) -> StepOutcome:
        """Wait for its end, on any thread. To be called once, in the order of the steps.

        Raises what the step raised, and `RunnerFailedError` where no other step can succeed.
        """
        ...


class Worker(Protocol):
    """A model with its weights, its KV pages and the last token of each slot.

    A `Placement` loads its weights, measures what is left for pages, allocates these and makes it.
    Its tokens follow from the blocks that it is given alone: it sees no plan and runs no drafter.
    All calls come in the order of the steps, from one thread.
    """

    @property
    def max_in_flight(self) -> int:
        """Most steps that are begun and whose outcome isn't read."""
        ...

    def step(self, block: StepArrays) -> PendingStep:
        """Begin a step: copy its pages, then compute its batch, if it has one.

        A worker that computes at once raises what the step raises; else `outcome` does.
        """
        ...

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages, one copy after the other, behind the steps that were begun, which are fewer
        than `max_in_flight`. `copies`, int32 `[n, 5]`, are as `Backend.copy_pages` takes them. They
        are made when it returns."""
        ...

    def close(self) -> None:
        """Give back what it has. No call comes afterwards."""
        ...
