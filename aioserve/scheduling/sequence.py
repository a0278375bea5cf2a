"""One sequence as the scheduler knows it: its request, its tokens, and how far they are computed.

A sequence has known ids (prompt and generated), and its lease says how many of them are `computed`:
have their KV in pages. Whole prompts, chunks, prefix hits and recomputation after preemption are
all "tokens not yet computed". Where steps overlap, a sequence that is being sampled has a `pending`
token, whose id only the device knows.
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
"""The slot of a run that is over while its sequence goes on in the same slot."""
MAX_POLICY_PREEMPTIONS = 8
"""Preemptions at the policy's wish between two tokens of one answer."""


PageIds = npt.NDArray[np.int32]


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PENDING_SAMPLE = "pending sample"
    """A further sample of a prompt: begins when the first one has computed it."""
    FINISHED = "finished"


class Run:
    """What a sequence has from its start until it ends, begins again, or goes back to a token whose
    mask came late: steps launched before that work for a run that is over."""

    __slots__ = ("lease", "sequence", "slot")

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence: SequenceState = sequence
        self.slot: int = sequence.slot
        self.lease: KVLease = sequence.lease

    @property
    def goes_on(self) -> bool:
        """Whether the sequence has neither ended, nor begun again, nor gone back."""
        return self.sequence.slot == self.slot


Entry = tuple[Run, WorkItem, PageIds]
"""A sequence's run in a launched step, its item, and the pages that this reads: one entry for each
row of an item, in order, or one for an item without rows."""


class SequenceState:
    """Mutable, and changed by the scheduler alone; its lease by the KV memory alone."""

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
        """Account of the request, so of all its samples."""
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
        """The known ids, and room for more behind them."""
        self._id_memory: memoryview = self.id_buffer.data
        """The same memory: one id is written to it in a third of the time."""
        self.pending: int = 0
        """Tokens that launched steps sample and the host has not seen yet, or the most that there
        may be of them."""
        self.lease: KVLease = KVLease(request.namespace)
        self.pending_samples: list[SequenceState] = []
        """Further samples of the prompt, which fork off when it is computed."""
        self.phase = Phase.PENDING_SAMPLE if sample else Phase.WAITING
        self.epoch: int = 0
        """How often it gave its pages back and began again."""
        self.precedence: int = 0
        """Given by the policy when it hears of the sequence, and then fixed."""
        self.num_displaced: int = 0
        """Others that gave way to it since it waits."""
        self.preemptions_without_progress: int = 0
        """How often it was preempted, at the policy's wish, since it had `known_when_taken`."""
        self.known_when_taken: int = 0
        self.paused: bool = False
        """The reader is behind: planned again when it has caught up."""
        self._prefix_key: tuple[int, bytes] = (-1, b"")
        """The last one, and of how many tokens: policies ask for the same in step after step, and
        it takes a look at each token to find."""
        self.view: Any = None
        """What plugins see of it: a `RequestView`, which looks at the sequence."""
        self._begin()
        self._begin_parts(request, is_first=not sample)

    def _begin_parts(self, request: Request, *, is_first: bool) -> None:
        """What parts of its steps keep of it (`aioserve.scheduling.parts`)."""
        self.scored: int = self.prompt_tokens
        """Position of the first token of the prompt whose log-probability is wanted and not yet
        known; the end of the prompt where there is none."""
        if request.score_from is not None and is_first:
            self.scored = request.score_from
        self.pooling: PoolingState | None = None
        """Where the request asks for hidden states."""
        if request.pooled is not None:
            self.pooling = PoolingState(request.pooled)
        self.constrained: bool = request.params.is_guided
        """Each of its tokens is drawn under a mask, which comes while the step runs."""
        self.masked_to: int = -1
        """Where it is constrained: how many tokens are known, or forced, before the last one that
        there is a mask for."""
        self.forced_ids: tuple[int, ...] = ()
        """Tokens that a grammar forces and that are drawn all the same: the last ones of those up
        to `masked_to`."""
        self.drafts: SequenceDrafts | None = None
        """Where steps may verify draft tokens for it."""
        self.forced_in_flight: int = 0
        """How many tokens launched steps sample that are known all the same: they were forced.
        While it isn't known that these steps had their masks, nothing more is published."""
        self.score_at: int = self.scored
        """As `scored`, with what launched steps score."""

    def _begin(self) -> None:
        self.slot: int = NO_SLOT
        self.run: Run = Run(self)
        self.decode_rows: tuple[SampleRow, ...] = ()
        """What a step that computes one token samples."""
        self.proven_pages: npt.NDArray[np.int32] = self.lease.page_ids
        """Pages covered by the last sampled token, so known to hold no NaN."""

    @property
    def known_ids(self) -> npt.NDArray[np.int32]:
        """All known ids: an int32 view `[num_known]` that later appends don't change."""
        return self.id_buffer[: self.num_known]

    @property
    def final_ids(self) -> npt.NDArray[np.int32]:
        """Known ids that won't be computed again while the sequence runs. The last one will where
        the mask of what is behind it comes late, which that of a first token never does."""
        is_final = not self.constrained or self.num_known == self.prompt_tokens
        return self.id_buffer[: self.num_known if is_final else self.num_known - 1]

    @property
    def waits_for_mask(self) -> bool:
        """Whether all known tokens are computed and nothing is drawn behind them: the mask came
        late."""
        return self.phase is Phase.RUNNING and not self.pending and not self.remaining

    @property
    def family(self) -> tuple[SequenceState, ...]:
        """The sequence, and the samples that are to fork off it."""
        return (self, *self.pending_samples)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one is sampled, the pending one included."""
        return self.num_known + self.pending - self.lease.computed

    @property
    def num_computed(self) -> int:
        """Known tokens whose KV is in its pages, or will be by launched steps. These compute more:
        tokens that nobody knows yet, and draft tokens, of which some may be wrong."""
        return min(self.lease.computed, self.num_known)

    @property
    def is_masked(self) -> bool:
        """True if there is a mask for the token behind the known ones. If that token is forced, all
        forced tokens have masks as well."""
        return self.masked_to >= self.num_known

    @property
    def is_held(self) -> bool:
        """Whether it can't be planned now: its reader is behind, or what may come next isn't known,
        of it or of a sample that is to fork off it."""
        if self.paused or not self.constrained:
            return self.paused
        return not all(one.is_masked for one in self.family)

    @property
    def unverified_tokens(self) -> int:
        """Pending tokens that are draft tokens, so that the next item may begin sooner."""
        return 0 if self.drafts is None else self.drafts.unverified_tokens

    @property
    def num_cacheable(self) -> int | None:
        """Leading tokens that may be taken from what is cached; None where any may. To score a
        token, the one before it must be computed."""
        limit = None if self.score_at >= self.prompt_tokens else self.score_at - 1
        if self.pooling is not None and (other := self.pooling.num_cacheable) is not None:
            return other if limit is None else min(limit, other)
        return limit

    def num_scored_by(self, end: int) -> int:
        """How many tokens are scored when those up to position `end` are computed next."""
        return max(0, min(end + 1, self.prompt_tokens) - self.score_at)

    @property
    def may_be_taken(self) -> bool:
        """Whether a policy may have it preempted although none ahead of it is in need: so often
        and no more for each token that it comes to know, so that every answer gets to its end."""
        return (
            self.num_known > self.known_when_taken
            or self.preemptions_without_progress < MAX_POLICY_PREEMPTIONS
        )

    def count_taken(self) -> None:
        """It is preempted at the policy's wish."""
        if self.num_known > self.known_when_taken:
            self.known_when_taken, self.preemptions_without_progress = self.num_known, 0
        self.preemptions_without_progress += 1

    @property
    def exhausted(self) -> bool:
        """Every token that the answer may have is known or being sampled."""
        return self.num_known + self.pending >= self.max_length

    def ids(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Known ids `[start, start + count)`: an int32 view that later appends don't change."""
        return self.id_buffer[start : start + count]

    def prefix_key(self, num_tokens: int) -> bytes:
        """Do what `RequestView.prefix_key` says."""
        count = min(num_tokens, self.num_known)
        if count != self._prefix_key[0]:
            namespace = self.request.namespace
            key = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
            key.update(self.ids(0, count).data)
            self._prefix_key = (count, key.digest())
        return self._prefix_key[1]

    def begins_like(self, other: SequenceState, num_tokens: int) -> bool:
        """Return true if the first `num_tokens` tokens of both are known and equal."""
        return min(self.num_known, other.num_known) >= num_tokens and np.array_equal(
            self.ids(0, num_tokens), other.ids(0, num_tokens)
        )

    def take_slot(self, slot: int) -> None:
        self.slot = slot
        self.run = Run(self)
        self.decode_rows = (SampleRow(offset=0, slot=slot),)

    def go_back(self) -> None:
        """Launched steps work for a run that is over. Slot and pages stay its own."""
        self.run.slot = DROPPED
        self.run = Run(self)

    def append(self, token_id: int) -> FinishReason | None:
        """Add one sampled id; why the sequence ends with it, if it does."""
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
        """What it found in the prefix tree is worth nothing: it is about to begin again."""
        if self.first_token_seconds is None:
            self.account.lose_found(self.sequence_id)

    def restart(self) -> None:
        """Forget what was computed, after its pages and its slot were given back."""
        self.lease = self.lease.successor()
        self._begin()
        self.epoch += 1
        self.phase = Phase.WAITING

    @property
    def is_alone(self) -> bool:
        """True if it shares no KV with other requests."""
        return self.lease.namespace != self.request.namespace

    def share_nothing(self) -> None:
        """From now on it reads no KV that another computed, and none reads its own. It is waiting
        and has nothing."""
        self.lease.namespace = alone_key(self.request.namespace, self.sequence_id)

    def __repr__(self) -> str:
        return f"sequence {self.sequence_id} ({self.phase.value})"
