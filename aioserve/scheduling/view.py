"""What a policy sees: read-only projections of a request and of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from aioserve.hints import SchedulingHints
from aioserve.kv.memory import KVMemory
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.step_times import StepSummary, StepTimes

__all__ = ["Pin", "RequestView", "SchedulerView", "ViewSource"]


class RequestView(SchedulingHints, frozen=True, kw_only=True, eq=False, weakref=False):
    """What a policy sees of one request: what the caller told of it, and where it is. Read-only;
    valid until the request has finished, and then it holds no pages."""

    _sequence: SequenceState
    _memory: KVMemory

    @property
    def request_id(self) -> str:
        return self._sequence.request.request_id

    @property
    def arrival_index(self) -> int:
        """Place in the order of arrival: unique, growing, kept through preemption."""
        return self._sequence.sequence_id

    @property
    def arrival_seconds(self) -> float:
        """When the request arrived, on the clock of `SchedulerView.now_seconds`."""
        return self._sequence.request.arrival_seconds

    @property
    def first_token_seconds(self) -> float | None:
        """When the first token was known, on the clock of `SchedulerView.now_seconds`; None until
        it is."""
        return self._sequence.first_token_seconds

    @property
    def last_token_seconds(self) -> float | None:
        """When the last token so far was known, on that clock; None until one is."""
        return self._sequence.last_token_seconds

    @property
    def mean_gap_seconds(self) -> float | None:
        """How long each token took on average that was known behind the first: what
        `tpot_target_seconds` is about. None until there is one."""
        first, last = self._sequence.first_token_seconds, self._sequence.last_token_seconds
        gaps = self.generated_tokens - 1
        return None if first is None or last is None or gaps < 1 else (last - first) / gaps

    @property
    def is_running(self) -> bool:
        """Whether it has a sequence slot, and pages."""
        return self._sequence.phase is Phase.RUNNING

    @property
    def is_held(self) -> bool:
        """Whether it can't go on now: its reader is behind, or it isn't known yet what may come
        next."""
        return self._sequence.is_held

    @property
    def prompt_tokens(self) -> int:
        return self._sequence.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled and known so far."""
        return self._sequence.num_known - self._sequence.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens that the answer may have. A cap, and no forecast: it may end long before."""
        return self._sequence.request.max_tokens

    @property
    def computed_tokens(self) -> int:
        """Known tokens, of prompt and answer, whose KV is in the request's pages, those that
        launched steps compute and those found in the cache included; 0 while it waits."""
        return self._sequence.num_computed

    @property
    def num_samples(self) -> int:
        """Answers to one prompt that this request stands for: they run as one until the prompt is
        computed, and each for itself from then on."""
        return 1 + len(self._sequence.pending_samples)

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need no computing: for a waiting request those found in the prefix
        cache now, for a running one those found when it began."""
        sequence = self._sequence
        return self._found() if sequence.slot < 0 else sequence.lease.cached

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, the cached ones left out."""
        sequence = self._sequence
        return sequence.remaining - (self._found() if sequence.slot < 0 else 0)

    @property
    def _has_ended(self) -> bool:
        """Its lease is over, and has nothing more to say of pages."""
        return self._sequence.phase is Phase.FINISHED

    def _found(self) -> int:
        sequence = self._sequence
        return self._memory.claims.peek(sequence.lease, sequence.known_ids, sequence.num_cacheable)

    def prefix_key(self, num_tokens: int) -> bytes:
        """16 bytes, equal for two requests exactly if their first `num_tokens` tokens are equal
        and the KV of them may be shared (BLAKE2b, so "exactly" up to a chance of 2**-64). Of a
        request that has fewer, all tokens count."""
        return self._sequence.prefix_key(num_tokens)

    @property
    def pages(self) -> int:
        """KV pages held, shared ones included; 0 after the end."""
        return 0 if self._has_ended else self._sequence.lease.num_held

    @property
    def pages_to_start(self) -> int:
        """Pages that a waiting request would take of those that are free or cached: new ones, and
        those that it finds and no other uses. 0 for others."""
        sequence, memory = self._sequence, self._memory
        if sequence.phase is not Phase.WAITING:
            return 0
        limit = sequence.num_cacheable
        return memory.claims.pages_needed(sequence.lease, sequence.known_ids, limit).total

    @property
    def reclaimable_pages(self) -> int:
        """Pages that no other uses: they come back if the request is preempted; 0 after the
        end."""
        return 0 if self._has_ended else self._memory.num_reclaimable(self._sequence.lease)

    @property
    def lost_tokens(self) -> int:
        """Computed tokens that no running request shares: they may have to be computed again, or
        copied back, if the request is preempted; 0 after the end."""
        lease = self._sequence.lease
        return 0 if self._has_ended else lease.computed - self._memory.num_shared_tokens(lease)

    @property
    def in_flight(self) -> bool:
        """Whether a launched step works on the request: its pages come back after that step."""
        return self._sequence.lease.last_step > self._memory.pool.done_step

    @property
    def preemptions(self) -> int:
        """How often the request gave its pages back and started over."""
        return self._sequence.epoch

    @property
    def arrival_processed_tokens(self) -> int:
        """`SchedulerView.processed_tokens` at arrival; the difference measures the wait in tokens
        of work, which ages fairly on slow and fast machines alike."""
        return self._sequence.arrival_processed_tokens

    def __repr__(self) -> str:
        return f"RequestView({self.request_id!r}, uncached_tokens={self.uncached_tokens})"


class Pin(msgspec.Struct, frozen=True, gc=False):
    """A prefix whose pages the prefix cache keeps, as a policy asked for when a request ended."""

    number: int
    """Unique, and growing in the order in which prefixes were pinned."""
    request_id: str
    session_id: str | None
    tenant: str | None
    tokens: int
    """Leading tokens of the request that are kept."""
    pages: int


class ViewSource(Protocol):
    """Where a `SchedulerView` looks when it is asked for more than its fields."""

    times: StepTimes

    def views_of_running(self) -> Sequence[RequestView]: ...
    def views_of_waiting(self) -> Sequence[RequestView]: ...
    def pages_reserved(self) -> int: ...
    def pages_reserved_for(self, request: RequestView) -> int: ...


class SchedulerView(msgspec.Struct, frozen=True):
    """What a policy sees of the scheduler while one step is planned."""

    step: int
    now_seconds: float
    processed_tokens: int
    """Tokens computed by all steps so far."""
    max_num_batched_tokens: int
    max_num_seqs: int
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Held by the prefix cache alone: evicted when a request needs them."""
    pages_fenced: int
    """Given back, and free as soon as the step that may still touch them is done."""
    num_running: int
    num_waiting: int
    """Requests that wait, held ones included."""
    pages_pinned: int
    """Kept by pins; one that two pins share counts twice."""
    _source: ViewSource

    @property
    def running(self) -> Sequence[RequestView]:
        """All that have a sequence slot, in order of arrival. Made anew each time: take it once."""
        return self._source.views_of_running()

    @property
    def waiting(self) -> Sequence[RequestView]:
        """All that wait for one and aren't held, in order of arrival. Made anew each time: take it
        once."""
        return self._source.views_of_waiting()

    @property
    def num_prefilling(self) -> int:
        """Running requests with more than one token to compute. They are counted each time."""
        return sum([request.uncached_tokens > 1 for request in self.running])

    @property
    def num_decoding(self) -> int:
        """Running requests that need one token to be computed, or none more."""
        return self.num_running - self.num_prefilling

    @property
    def last_steps(self) -> tuple[StepSummary, ...]:
        """The last 32 steps that are done and haven't failed, oldest first: what they computed, and
        how long."""
        return self._source.times.recent

    @property
    def pages_reserved(self) -> int:
        """Pages kept for the answers of those that run, by the engine's `output_reserve_tokens`.
        They are counted each time."""
        return self._source.pages_reserved()

    def pages_reserved_for(self, request: RequestView) -> int:
        """Pages that `output_reserve_tokens` keeps for the answer of one that runs, or would keep
        if it did; 0 after the end."""
        return self._source.pages_reserved_for(request)

    def estimate(
        self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0
    ) -> float | None:
        """Seconds that a step would take which computes so many tokens of prompts and so many
        decodes, and attends to so many tokens in all: a line through the steps that were measured,
        the latest counting most. None until some were, the first eight of an engine left out."""
        return self._source.times.estimate(prefill_tokens, decodes, context_tokens)
