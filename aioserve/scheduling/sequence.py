"""State of one sequence: its request, its tokens, and how far they are computed.

A sequence has known ids (prompt and generated). Its lease says how many of them are `computed`,
which means that their KV is in pages. Whole prompts, chunks, prefix hits and recomputation after
preemption are all "tokens not yet computed". Steps overlap, so a sequence may have `pending`
tokens: a launched step samples them, and only the device knows their ids.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.kv.lease import KVLease
from aioserve.kv.namespace import alone_key
from aioserve.request import FinishReason, Request
from aioserve.scheduling.account import RequestAccount
from aioserve.scheduling.parts.pooling_state import PoolingState
from aioserve.scheduling.speculation.drafts import SequenceDrafts
from aioserve.steps.plan import SampleRow, WorkItem

__all__ = ["NO_SLOT", "Entry", "PageIds", "Phase", "Run", "SequenceState"]

NO_SLOT = -1
DROPPED = -2
"""Slot of a run that is over while its sequence goes on in the same slot."""
MAX_POLICY_PREEMPTIONS = 8
"""Most preemptions at the policy's wish between two tokens of one sequence."""


PageIds = npt.NDArray[np.int32]


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PENDING_SAMPLE = "pending sample"
    """Further sample of a prompt. It begins when the first sample has computed the prompt."""
    FINISHED = "finished"


class Run:
    """One run of a sequence. It lasts until the sequence ends, begins again, or goes back to a
    token whose mask came late. Results of steps launched for a run that is over are dropped."""

    __slots__ = ("lease", "sequence", "slot")

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence: SequenceState = sequence
        self.slot: int = sequence.slot
        self.lease: KVLease = sequence.lease

    @property
    def goes_on(self) -> bool:
        """True unless the sequence has ended, begun again, or gone back since."""
        return self.sequence.slot == self.slot


Entry = tuple[Run, WorkItem, PageIds]
"""A sequence's run in a launched step, its item, and the pages that the item reads. An item has one
entry per row, in order, or a single entry if it has no rows."""


class SequenceState:
    """Mutable. Only the scheduler changes it; only the KV memory changes its lease."""

    __slots__ = (
        "_id_memory",
        "_prefix_key",
        "account",
        "arrival_processed_tokens",
        "constrained",
        "decode_rows",
        "drafts",
        "end_ids",
        "epoch",
        "first_token_seconds",
        "forced_ids",
        "forced_in_flight",
        "id_buffer",
        "known_when_taken",
        "last_token_seconds",
        "lease",
        "masked_to",
        "max_length",
        "num_displaced",
        "num_known",
        "paused",
        "pending",
        "pending_samples",
        "phase",
        "pooling",
        "precedence",
        "preemptions_without_progress",
        "prompt_tokens",
        "proven_pages",
        "request",
        "run",
        "score_at",
        "scored",
        "seed",
        "sequence_id",
        "slot",
        "view",
        "wants_output",
    )

    def __init__(
        self,
        request: Request,
        account: RequestAccount,
        *,
        sequence_id: int,
        sample: int,
        arrival_processed_tokens: int,
    ) -> None:
        self.request: Request = request
        self.account: RequestAccount = account
        """Account of the request, shared by all its samples."""
        self.sequence_id: int = sequence_id
        """Unique, and growing in order of arrival."""
        self.seed: int = request.seed_of(sample)
        self.wants_output: bool = request.answers
        self.end_ids: frozenset[int] = request.end_ids
        self.max_length: int = request.max_length
        self.arrival_processed_tokens: int = arrival_processed_tokens
        self.first_token_seconds: float | None = None
        self.last_token_seconds: float | None = None
        self.prompt_tokens: int = request.prompt_tokens
        self.num_known: int = self.prompt_tokens
        self.id_buffer: npt.NDArray[np.int32] = request.prompt_ids
        """Known ids, with room for more after them."""
        self._id_memory: memoryview = self.id_buffer.data
        """View of the memory of `id_buffer`: writing one id through it takes a third of the
        time."""
        self.pending: int = 0
        """Tokens that launched steps sample and the host has not seen yet. An upper bound where
        draft tokens are in flight."""
        self.lease: KVLease = KVLease(request.namespace)
        self.pending_samples: list[SequenceState] = []
        """Further samples of the prompt, which fork off when it is computed."""
        self.phase = Phase.PENDING_SAMPLE if sample else Phase.WAITING
        self.epoch: int = 0
        """Number of times that it gave its pages back and began again."""
        self.precedence: int = 0
        """Set by the policy when it hears of the sequence, and fixed from then on."""
        self.num_displaced: int = 0
        """Number of sequences preempted for this one while it waits."""
        self.preemptions_without_progress: int = 0
        """Number of preemptions at the policy's wish since it had `known_when_taken` tokens."""
        self.known_when_taken: int = 0
        self.paused: bool = False
        """True while the reader is behind. No work is planned meanwhile."""
        self._prefix_key: tuple[int, bytes] = (-1, b"")
        """Last prefix key, after its number of tokens. Policies ask for the same key in step after
        step, and hashing reads every token."""
        self.view: Any = None
        """The `RequestView` that plugins see of this sequence."""
        self._begin()
        self._begin_parts(request, is_first=not sample)

    def _begin_parts(self, request: Request, *, is_first: bool) -> None:
        """Initialize the fields that belong to parts of a step (`aioserve.scheduling.parts`)."""
        self.scored: int = self.prompt_tokens
        """Position of the first prompt token whose log-probability is wanted and not yet known. The
        end of the prompt if no more are wanted."""
        if request.score_from is not None and is_first:
            self.scored = request.score_from
        self.pooling: PoolingState | None = None
        """State of pooling, if the request asks for hidden states."""
        if request.pooled is not None:
            self.pooling = PoolingState(request.pooled)
        self.constrained: bool = request.params.is_guided
        """True if each token is drawn under a mask, which arrives while the step runs."""
        self.masked_to: int = -1
        """Position of the last token that there is a mask for; -1 before the first mask."""
        self.forced_ids: tuple[int, ...] = ()
        """Tokens that a grammar forces, but that steps draw nevertheless. They end just before
        position `masked_to`."""
        self.drafts: SequenceDrafts | None = None
        """State of draft tokens, if steps may verify some for this sequence."""
        self.forced_in_flight: int = 0
        """Number of tokens sampled by launched steps that are known already, because they were
        forced.

        Nothing more is published meanwhile, since these steps may have run without their masks.
        """
        self.score_at: int = self.scored
        """`scored`, moved past what launched steps score."""

    def _begin(self) -> None:
        self.slot: int = NO_SLOT
        self.run: Run = Run(self)
        self.decode_rows: tuple[SampleRow, ...] = ()
        """Rows of an item that computes one token."""
        self.proven_pages: npt.NDArray[np.int32] = self.lease.page_ids
        """Pages covered by the last sampled token, so known to hold no NaN."""

    @property
    def known_ids(self) -> npt.NDArray[np.int32]:
        """All known ids: an int32 view `[num_known]` that later appends don't change."""
        return self.id_buffer[: self.num_known]

    @property
    def final_ids(self) -> npt.NDArray[np.int32]:
        """Known ids whose KV won't be computed again while the sequence runs.

        The last known token of a constrained sequence is computed again if the mask after it comes
        late. If the mask of its first token is late, the sequence begins again instead.
        """
        is_final = not self.constrained or self.num_known == self.prompt_tokens
        return self.id_buffer[: self.num_known if is_final else self.num_known - 1]

    @property
    def waits_for_mask(self) -> bool:
        """True if all known tokens are computed and no token is being drawn after them, because the
        mask came late."""
        return self.phase is Phase.RUNNING and not self.pending and not self.remaining

    @property
    def family(self) -> tuple[SequenceState, ...]:
        """The sequence, and the samples that will fork off it."""
        return (self, *self.pending_samples)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one is sampled, the pending ones included."""
        return self.num_known + self.pending - self.lease.computed

    @property
    def num_computed(self) -> int:
        """Known tokens whose KV is in the pages, or will be by launched steps. Those steps also
        compute pending tokens, and draft tokens that may be wrong."""
        return min(self.lease.computed, self.num_known)

    @property
    def is_masked(self) -> bool:
        """True if there is a mask for the token after the known ones. If that token is forced, all
        forced tokens have masks as well."""
        return self.masked_to >= self.num_known

    @property
    def is_held(self) -> bool:
        """True if no work can be planned now. Either the reader is behind, or the mask for the
        sequence or a sample that will fork off it is missing."""
        if self.paused or not self.constrained:
            return self.paused
        return not all(one.is_masked for one in self.family)

    @property
    def unverified_tokens(self) -> int:
        """Pending tokens that are draft tokens. If some are rejected, the next item begins
        earlier."""
        return 0 if self.drafts is None else self.drafts.unverified_tokens

    @property
    def num_cacheable(self) -> int | None:
        """Most leading tokens that may be taken from the cache; None for no limit. The token before
        a scored one must be computed."""
        limit = None if self.score_at >= self.prompt_tokens else self.score_at - 1
        if self.pooling is not None and (other := self.pooling.num_cacheable) is not None:
            return other if limit is None else min(limit, other)
        return limit

    def num_scored_by(self, end: int) -> int:
        """Number of prompt tokens scored by an item that computes the tokens up to position
        `end`."""
        return max(0, min(end + 1, self.prompt_tokens) - self.score_at)

    @property
    def may_be_taken(self) -> bool:
        """True while the policy may still preempt this sequence voluntarily. Limited to
        `MAX_POLICY_PREEMPTIONS` times per known token, so that every run ends."""
        return (
            self.num_known > self.known_when_taken
            or self.preemptions_without_progress < MAX_POLICY_PREEMPTIONS
        )

    def count_taken(self) -> None:
        """Count a preemption at the policy's wish."""
        if self.num_known > self.known_when_taken:
            self.known_when_taken, self.preemptions_without_progress = self.num_known, 0
        self.preemptions_without_progress += 1

    @property
    def exhausted(self) -> bool:
        """True if every token that the completion may have is known or being sampled."""
        return self.num_known + self.pending >= self.max_length

    def ids(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Known ids `[start, start + count)`: an int32 view that later appends don't change."""
        return self.id_buffer[start : start + count]

    def prefix_key(self, num_tokens: int) -> bytes:
        """Compute `RequestView.prefix_key`."""
        count = min(num_tokens, self.num_known)
        if count != self._prefix_key[0]:
            namespace = self.request.namespace
            key = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
            key.update(self.ids(0, count).data)
            self._prefix_key = (count, key.digest())
        return self._prefix_key[1]

    def begins_like(self, other: SequenceState, num_tokens: int) -> bool:
        """Return True if the first `num_tokens` tokens of both are known and equal."""
        return min(self.num_known, other.num_known) >= num_tokens and np.array_equal(
            self.ids(0, num_tokens), other.ids(0, num_tokens)
        )

    def take_slot(self, slot: int) -> None:
        self.slot = slot
        self.run = Run(self)
        self.decode_rows = (SampleRow(offset=0, slot=slot),)

    def go_back(self) -> None:
        """Begin a new run in the same slot, with the same pages. Results of launched steps are
        dropped."""
        self.run.slot = DROPPED
        self.run = Run(self)

    def append(self, token_id: int) -> FinishReason | None:
        """Add one sampled id. Return the reason if the sequence ends with it."""
        known = self.num_known
        if known == len(self._id_memory):
            self.grow_ids(known)
        self._id_memory[known] = token_id
        self.num_known = known + 1
        if token_id in self.end_ids:
            return FinishReason.STOP
        if known + 1 >= self.max_length:
            return FinishReason.LENGTH
        return None

    def grow_ids(self, num_tokens: int) -> None:
        """Make room for more than `num_tokens` ids in the buffer."""
        grown = np.empty(2 * num_tokens + 16, dtype=np.int32)
        grown[: self.num_known] = self.known_ids
        self.id_buffer, self._id_memory = grown, grown.data

    def lose_found(self) -> None:
        """Forget in the account what the sequence found in the prefix tree: it is lost, and the
        sequence is about to begin again."""
        if self.first_token_seconds is None:
            self.account.lose_found(self.sequence_id)

    def restart(self) -> None:
        """Forget what was computed, after pages and slot were given back."""
        self.lease = self.lease.successor()
        self._begin()
        self.epoch += 1
        self.phase = Phase.WAITING

    @property
    def is_alone(self) -> bool:
        """True if it shares no KV with other requests."""
        return self.lease.namespace != self.request.namespace

    def share_nothing(self) -> None:
        """Read no KV of other requests from now on, and let no other request read its own. Call
        only while the sequence waits and holds nothing."""
        self.lease.namespace = alone_key(self.request.namespace, self.sequence_id)

    def __repr__(self) -> str:
        return f"sequence {self.sequence_id} ({self.phase.value})"
