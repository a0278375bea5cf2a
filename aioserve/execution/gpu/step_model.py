"""The contract of models on a device, as the runner drives them: pack on the host, enqueue on a
stream.

    pinned block        pack(step)            the host writes, while the device may run other steps
        │ copy_to_device
    inputs              enqueue(...)          kernels read them, keys and values, slots' tokens
        │
    results             ResultShape           and each slot's last token stays in the model's memory
        │ copy_to_host
    pinned block        outcome(...)

Nothing is read back in between: the host knows everything that decides the shape of a launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.gpu.device import DeviceMemory, HostMemory
from aioserve.execution.step_arrays import StepArrays
from aioserve.ops.batch import STATUS_ERRORS
from aioserve.sampling_params import MAX_LOGPROBS
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import MAX_SCORED_TOKENS

__all__ = ["PackedStep", "ResultShape", "StepModel", "outcome_of"]


@dataclass(slots=True, frozen=True)
class ResultShape:
    """Layout of a step's results, from their first byte on, without gaps:

    token_ids  int64 [S]          sampled
    statuses   int32 [S]          indices of `aioserve.ops.batch.STATUS_ERRORS`
    logprobs   float32 [R, 1 + K] as `aioserve.sampling.logprobs.MostLikely` has its values
    top_ids    int32 [R, K]       its ids
    pooled     float32 [P, H]     sums of hidden states
    """

    num_rows: int
    """S, including padding, whose rows come last."""
    num_logprobs: int = 0
    """R"""
    num_most_likely: int = 0
    """K"""
    num_pooled: int = 0
    """P"""
    hidden_size: int = 0
    """H"""

    @classmethod
    def largest(cls, max_rows: int, max_pooled: int, hidden_size: int) -> ResultShape:
        """Return the shape of steps that sample up to `max_rows` rows and pool `max_pooled`
        items."""
        scored = max_rows + MAX_SCORED_TOKENS
        return cls(max_rows, scored, MAX_LOGPROBS, max_pooled, hidden_size)

    @property
    def token_ids(self) -> slice:
        return slice(0, 8 * self.num_rows)

    @property
    def statuses(self) -> slice:
        return slice(8 * self.num_rows, 12 * self.num_rows)

    @property
    def logprobs(self) -> slice:
        start = 12 * self.num_rows
        return slice(start, start + 4 * self.num_logprobs * (1 + self.num_most_likely))

    @property
    def top_ids(self) -> slice:
        start = self.logprobs.stop
        return slice(start, start + 4 * self.num_logprobs * self.num_most_likely)

    @property
    def pooled(self) -> slice:
        start = self.top_ids.stop
        return slice(start, start + 4 * self.num_pooled * self.hidden_size)

    @property
    def num_bytes(self) -> int:
        return self.pooled.stop


class PackedStep(Protocol):
    """One step's inputs in a pinned block, with the calls that compute it once they are on the
    device."""

    @property
    def num_bytes(self) -> int:
        """Bytes at the start of the block that the device needs."""
        ...

    @property
    def result_shape(self) -> ResultShape:
        """Shape of the results that `enqueue` leaves."""
        ...

    @property
    def variant(self) -> Hashable:
        """Key of the kernels that it launches, as far as these depend on more than its size."""
        ...

    def enqueue(self, inputs: DeviceMemory, results: DeviceMemory) -> None:
        """Compute the step on the current stream, from `inputs` and the model's own memory.

        It leaves results as `result_shape` says. The launch that writes the slots' tokens is
        followed by no allocation, so that a step that ran out of memory may be enqueued again. A
        replay of its capture computes the `inputs` of that time, if these have the same padded size
        and variant.
        """
        ...

    def finish(self, inputs: DeviceMemory, results: DeviceMemory) -> None:
        """Enqueue what no graph can contain, after `enqueue` or a replay.

        That is the sampling of a padded step whose rows ask for more than a draw. Does nothing for
        other steps.
        """
        ...


class StepModel(Protocol):
    """A model with its KV pages and its slots, in the memory of one device."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        ...

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with its own page tables."""
        ...

    @property
    def max_input_bytes(self) -> int:
        """Input bytes of the largest step."""
        ...

    @property
    def max_result_bytes(self) -> int:
        """Result bytes of the largest step, padding included."""
        ...

    def pack(self, step: StepArrays, target: HostMemory, padded_to: int | None) -> PackedStep:
        """Write the inputs of a step with a batch.

        With `padded_to`, it must be a step of decodes with a row each, and is padded to that number
        of sequences. Keys, values and tokens of padding go to a page and a slot that are never
        read.
        """
        ...

    @property
    def variants(self) -> Sequence[Hashable]:
        """Variants of padded steps that are captured beforehand. Each size and variant has its
        own graph."""
        ...

    def pack_padding(self, target: HostMemory, padded_to: int, variant: Hashable) -> PackedStep:
        """Write the inputs of `padded_to` sequences of padding, as for a step of a variant."""
        ...

    def copy_pages(self, table: HostMemory, num_copies: int) -> None:
        """Copy pages on the current stream, one copy after the other.

        `table` begins with int32 `[num_copies, 5]`, as in `Backend.copy_pages`. It must not change
        until they are done. Cache 0 is the device's, 1 the host's.
        """
        ...


def outcome_of(step: StepArrays, results: npt.NDArray[np.uint8], shape: ResultShape) -> StepOutcome:
    """Read the outcome from a step's results. Raises `InvariantError` for an unknown status."""
    rows = len(step.samples)
    statuses = results[shape.statuses].view(np.int32)[:rows]
    row_errors: dict[int, str] = {}
    for row in np.flatnonzero(statuses).tolist():
        status = int(statuses[row])
        error = STATUS_ERRORS[status] if 0 < status < len(STATUS_ERRORS) else None
        if error is None:
            raise InvariantError(f"step {step.step}: row {row} has the status {status}")
        row_errors[row] = error
    token_ids = results[shape.token_ids].view(np.int64)[:rows]
    count, width = shape.num_logprobs, shape.num_most_likely
    values = results[shape.logprobs].view(np.float32).reshape(count, 1 + width)
    top_ids = results[shape.top_ids].view(np.int32).reshape(count, width)
    sums = results[shape.pooled].view(np.float32).reshape(shape.num_pooled, shape.hidden_size)
    # Copied, because the results may be overwritten by another step before they are read.
    return step.outcome(token_ids.tolist(), row_errors, (values, top_ids), sums.copy())
