"""One sequence as the scheduler knows it: what is known, what is computed, which pages it holds.

A sequence has known ids (prompt and generated) and a count `computed` of those whose KV is in its
pages. Whole prompts, chunks and recomputation after preemption are all "tokens not yet computed".
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import PageTable
from aioserve.request import FinishReason, SamplingParams
from aioserve.scheduling.policy import RequestView

__all__ = ["Phase", "SequenceState"]

NO_SLOT = -1


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SequenceState:
    """Mutable, and changed by the scheduler alone."""

    __slots__ = (
        "_known_ids",
        "arrival_processed_tokens",
        "arrival_seconds",
        "computed",
        "end_ids",
        "epoch",
        "last_step",
        "max_length",
        "num_known",
        "page_table",
        "params",
        "paused",
        "pending",
        "phase",
        "prompt_tokens",
        "request_id",
        "seed",
        "sequence_id",
        "slot",
        "view",
    )

    def __init__(
        self,
        sequence_id: int,
        request_id: str,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: frozenset[int],
        max_length: int,
        arrival_seconds: float,
        arrival_processed_tokens: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.end_ids = end_ids
        self.max_length = max_length
        """Prompt and answer together, in tokens."""
        self.arrival_seconds = arrival_seconds
        self.arrival_processed_tokens = arrival_processed_tokens
        self.prompt_tokens = len(prompt_ids)
        self.num_known = len(prompt_ids)
        self._known_ids = prompt_ids
        self.pending = 0
        """Tokens that launched steps sample and the host has not seen yet."""
        self.computed = 0
        """Tokens whose KV is in pages once every launched step is done."""
        self.page_table = PageTable()
        self.slot = NO_SLOT
        self.epoch = 0
        self.last_step = NO_STEP
        """Number of the last step that mentions this sequence; its pages are fenced until then."""
        self.phase = Phase.WAITING
        self.paused = False
        """The reader is behind: planned again when it has caught up."""
        self.view = RequestView(self)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one is sampled, the pending one included."""
        return self.num_known + self.pending - self.computed

    @property
    def exhausted(self) -> bool:
        """Every token that the answer may have is known or being sampled."""
        return self.num_known + self.pending >= self.max_length

    def ids(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Known ids `[start, start + count)`: an int32 view that later appends don't change."""
        return self._known_ids[start : start + count]

    def append(self, token_id: int) -> FinishReason | None:
        """Add one sampled id; why the sequence ends with it, if it does."""
        if self.num_known == len(self._known_ids):
            grown = np.empty(2 * self.num_known + 16, dtype=np.int32)
            grown[: self.num_known] = self._known_ids
            self._known_ids = grown
        self._known_ids[self.num_known] = token_id
        self.num_known += 1
        if token_id in self.end_ids:
            return FinishReason.STOP
        if self.num_known >= self.max_length:
            return FinishReason.LENGTH
        return None

    def restart(self) -> None:
        """Forget what was computed, after its pages were given back."""
        self.computed = 0
        self.pending = 0
        self.epoch += 1
        self.page_table = PageTable()
        self.slot = NO_SLOT
        self.phase = Phase.WAITING
