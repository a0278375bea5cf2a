"""One sequence as the scheduler knows it: what is known, what is computed, which pages it holds.

A sequence has known ids (prompt and generated) and a count `computed` of those whose KV is in its
pages. Whole prompts, chunks, prefix hits and recomputation after preemption are all "tokens not yet
computed".
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import PageTable
from aioserve.kv.prefix_tree import NO_RECEIPT
from aioserve.request import FinishReason, SamplingParams
from aioserve.scheduling.policy import RequestView

if TYPE_CHECKING:
    from aioserve.scheduling.memory import KVMemory

__all__ = ["NO_SLOT", "Phase", "SequenceState", "SwappedPages"]

NO_SLOT = -1


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    UNBORN = "unborn"
    """A further sample of a prompt: begins when the first one has computed it."""
    FINISHED = "finished"


class SwappedPages(msgspec.Struct, frozen=True, gc=False):
    """Pages of a preempted sequence that were copied to the host."""

    first: int
    """Index in the page table of the first of them."""
    host_page_ids: npt.NDArray[np.int32]
    computed: int
    """Tokens computed when they were copied, those of the pages before `first` included."""
    step: int
    """Number of the step that copies them."""


class SequenceState:
    """Mutable, and changed by the scheduler and its memory alone."""

    __slots__ = (
        "_known_ids",
        "arrival_processed_tokens",
        "arrival_seconds",
        "borrowed",
        "cached",
        "computed",
        "end_ids",
        "epoch",
        "first_token_seconds",
        "inherited_step",
        "last_step",
        "max_length",
        "namespace",
        "num_known",
        "page_table",
        "params",
        "paused",
        "pending",
        "phase",
        "prompt_tokens",
        "proven_pages",
        "published",
        "receipt",
        "request_id",
        "seed",
        "sequence_id",
        "shares_last_page",
        "slot",
        "swapped",
        "tenant",
        "tpot_target_seconds",
        "ttft_target_seconds",
        "unborn",
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
        namespace: bytes,
        arrival_seconds: float,
        arrival_processed_tokens: int,
        tenant: str | None,
        ttft_target_seconds: float | None,
        tpot_target_seconds: float | None,
        memory: KVMemory,
    ) -> None:
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.end_ids = end_ids
        self.max_length = max_length
        """Prompt and answer together, in tokens."""
        self.namespace = namespace
        self.arrival_seconds = arrival_seconds
        self.arrival_processed_tokens = arrival_processed_tokens
        self.tenant = tenant
        self.ttft_target_seconds = ttft_target_seconds
        self.tpot_target_seconds = tpot_target_seconds
        self.first_token_seconds: float | None = None
        self.prompt_tokens = len(prompt_ids)
        self.num_known = len(prompt_ids)
        self._known_ids = prompt_ids
        self.unborn: list[SequenceState] = []
        """Further samples of the prompt, which fork off when it is computed."""
        self.phase = Phase.WAITING
        self.epoch = 0
        self.last_step = NO_STEP
        """Number of the last step that mentions this sequence; its pages are fenced until then."""
        self.paused = False
        """The reader is behind: planned again when it has caught up."""
        self.swapped: SwappedPages | None = None
        self.view = RequestView(self, memory)
        self._begin()

    def _begin(self) -> None:
        self.pending = 0
        """Tokens that launched steps sample and the host has not seen yet."""
        self.computed = 0
        """Tokens whose KV is in pages once every launched step is done."""
        self.page_table = PageTable()
        self.shares_last_page = False
        """The last page may be another sample's too: it is copied before it is written."""
        self.receipt = NO_RECEIPT
        """The lock on this sequence's path in the prefix tree."""
        self.published = 0
        """Pages that the path covers."""
        self.cached = 0
        """Leading tokens whose KV was there when it began: in the prefix tree, on the host, or that
        of the sample it forked from."""
        self.borrowed = 0
        """Leading tokens among which is KV that others computed."""
        self.inherited_step = NO_STEP
        """Number of the last step that should have written some of them, where the prefix tree
        doesn't know it."""
        self.proven_pages = self.page_table.page_ids
        """Those over which its last token was sampled: their KV is made of numbers."""
        self.slot = NO_SLOT

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

    def begins_like(self, other: SequenceState, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of both are known, equal and in one namespace."""
        return (
            self.namespace == other.namespace
            and min(self.num_known, other.num_known) >= num_tokens
            and np.array_equal(self.ids(0, num_tokens), other.ids(0, num_tokens))
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Add one sampled id; why the sequence ends with it, if it does."""
        known = self.num_known
        if known == len(self._known_ids):
            grown = np.empty(2 * known + 16, dtype=np.int32)
            grown[:known] = self._known_ids
            self._known_ids = grown
        self._known_ids[known] = token_id
        self.num_known = known + 1
        if token_id in self.end_ids:
            return FinishReason.STOP
        if known + 1 >= self.max_length:
            return FinishReason.LENGTH
        return None

    def restart(self) -> None:
        """Forget what was computed, after its pages were given back."""
        self._begin()
        self.epoch += 1
        self.phase = Phase.WAITING

    def __repr__(self) -> str:
        return f"sequence {self.sequence_id} ({self.phase.value})"
