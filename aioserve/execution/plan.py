"""What crosses between the scheduler and a runner: frozen values, no tensors.

A `StepPlan` says what one engine step computes; a `StepOutcome` says what came of it. The
scheduler builds the one and consumes the other, so both run unchanged in a simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.request import SamplingParams

__all__ = ["PENDING_TOKEN", "CopyKind", "PageCopy", "StepOutcome", "StepPlan", "WorkItem"]

PENDING_TOKEN = -1
"""Stands for the token that the previous step samples for the same slot. It never leaves the core:
the runner replaces it on the device before the forward pass."""


class CopyKind(Enum):
    """Between which storages a page is copied."""

    DEVICE = "device"
    """Within the device: a shared page before it is written, or the valid part of a cached one."""
    TO_HOST = "to host"
    FROM_HOST = "from host"


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """The KV of the first `num_tokens` tokens of page `source` goes to page `target`, all layers.

    Pages on the host have numbers of their own.
    """

    kind: CopyKind
    source: int
    target: int
    num_tokens: int


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """`count` tokens of one sequence, from position `start`, in one step.

    The KV of positions `[0, start)` is in the sequence's pages already; this item computes
    `[start, start + count)`. With `sampling` set, the item reaches the last known token and the
    step samples the token at position `start + count`.

    An item of `count` 0 is a fork: it computes nothing and samples from the same last row as the
    item before it, with its own parameters, seed and slot. Its pages are that item's.
    """

    sequence_id: int
    epoch: int
    """How often the sequence had been preempted when this was planned: a result of an earlier
    epoch is dropped."""
    slot: int
    """Row of the sequence in the runner's last-token buffer."""
    start: int
    count: int
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    """`count` ids; the last may be `PENDING_TOKEN`."""
    page_ids: npt.NDArray[np.int32]
    """int32 `[ceil((start + count) / page_size)]` or longer: pages in order of position."""
    sampling: SamplingParams | None
    seed: int
    """Key of the request's noise; with the sampled position it decides every random draw."""


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One engine step: what to compute, in batch order. Decodes come first."""

    step: int
    items: tuple[WorkItem, ...]
    preempted: tuple[int, ...] = ()
    """Ids of the sequences that gave their pages back since the step before was planned."""
    copies: tuple[PageCopy, ...] = ()
    """Done one after the other, in this order, before anything of `items` is written: a page may
    be the target of one copy and the source of a later one."""

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(item.count for item in self.items)


class StepOutcome(msgspec.Struct, frozen=True, gc=False):
    """What a step produced, aligned with the plan's items."""

    step: int
    token_ids: tuple[int, ...]
    """One id per item, in the plan's order; `PENDING_TOKEN` where the item doesn't sample."""
    row_errors: dict[int, str] = {}
    """Index of an item -> why its logits could not be sampled (for example NaN)."""
