"""Read-only views of a request and of the scheduler, which a policy sees."""

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
    """One request as a policy sees it: the caller's hints, and its state. Read-only. Stays valid
    until the request has finished; it then holds no pages."""

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
        """Time of arrival, in seconds on the clock of `SchedulerView.now_seconds`."""
        return self._sequence.request.arrival_seconds

    @property
    def first_token_seconds(self) -> float | None:
        """Time when the first token was known, in seconds on the clock of
        `SchedulerView.now_seconds`. None before."""
        return self._sequence.first_token_seconds

    @property
    def last_token_seconds(self) -> float | None:
        """Time when the latest token was known, in seconds on that clock. None before the first
        token."""
        return self._sequence.last_token_seconds

    @property
    def mean_gap_seconds(self) -> float | None:
        """Mean seconds per known token after the first, which `tpot_target_seconds` limits. None
        until there is a second token."""
        first, last = self._sequence.first_token_seconds, self._sequence.last_token_seconds
        gaps = self.generated_tokens - 1
        return None if first is None or last is None or gaps < 1 else (last - first) / gaps

    @property
    def is_running(self) -> bool:
        """True if it has a sequence slot, and pages."""
        return self._sequence.phase is Phase.RUNNING

    @property
    def is_held(self) -> bool:
        """True if it can't go on now: its reader is behind, or its next mask is missing."""
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
        """Most tokens that the completion may have. This is a cap and no forecast: it may end long
        before."""
        return self._sequence.request.max_tokens

    @property
    def computed_tokens(self) -> int:
        """Known tokens of prompt and completion whose KV is in the request's pages. Includes tokens
        that launched steps compute and those found in the cache. 0 while it waits."""
        return self._sequence.num_computed

    @property
    def num_samples(self) -> int:
        """Completions of one prompt that this request stands for. They run as one until the prompt
        is computed, and separately from then on."""
        return 1 + len(self._sequence.pending_samples)

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need no computing. A waiting request counts those in the prefix cache
        now, a running one those found when it started."""
        sequence = self._sequence
        return self._found() if sequence.slot < 0 else sequence.lease.cached

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, without the cached ones."""
        sequence = self._sequence
        return sequence.remaining - (self._found() if sequence.slot < 0 else 0)

    @property
    def _has_ended(self) -> bool:
        """True once it has ended. Its lease then tells nothing about pages."""
        return self._sequence.phase is Phase.FINISHED

    def _found(self) -> int:
        sequence = self._sequence
        return self._memory.claims.peek(sequence.lease, sequence.known_ids, sequence.num_cacheable)

    def prefix_key(self, num_tokens: int) -> bytes:
        """16 bytes that identify the first `num_tokens` tokens, or all if the request has fewer.
        Two requests have equal keys exactly if these tokens are equal and their KV may be shared.

        A BLAKE2b hash, so "exactly" holds up to a chance of 2**-64.
        """
        return self._sequence.prefix_key(num_tokens)

    @property
    def pages(self) -> int:
        """KV pages held, shared ones included; 0 after the end."""
        return 0 if self._has_ended else self._sequence.lease.num_held

    @property
    def pages_to_start(self) -> int:
        """Free or cached pages that a waiting request would take: new ones, and found ones that no
        other request uses. 0 for others."""
        sequence, memory = self._sequence, self._memory
        if sequence.phase is not Phase.WAITING:
            return 0
        limit = sequence.num_cacheable
        return memory.claims.pages_needed(sequence.lease, sequence.known_ids, limit).total

    @property
    def reclaimable_pages(self) -> int:
        """Pages that no other request uses, which come back if this one is preempted. 0 after the
        end."""
        return 0 if self._has_ended else self._memory.num_reclaimable(self._sequence.lease)

    @property
    def lost_tokens(self) -> int:
        """Computed tokens that no running request shares. After a preemption they may have to be
        computed again or copied back. 0 after the end."""
        lease = self._sequence.lease
        return 0 if self._has_ended else lease.computed - self._memory.num_shared_tokens(lease)

    @property
    def in_flight(self) -> bool:
        """True while a launched step works on the request: its pages come back after that step."""
        return self._sequence.lease.last_step > self._memory.pool.done_step

    @property
    def preemptions(self) -> int:
        """Number of times that the request gave its pages back and started over."""
        return self._sequence.epoch

    @property
    def arrival_processed_tokens(self) -> int:
        """Value of `SchedulerView.processed_tokens` at arrival. The difference measures the wait in
        tokens of work, which ages fairly on slow and fast machines alike."""
        return self._sequence.arrival_processed_tokens

    def __repr__(self) -> str:
        return f"RequestView({self.request_id!r}, uncached_tokens={self.uncached_tokens})"


class Pin(msgspec.Struct, frozen=True, gc=False):
    """A prefix whose pages the prefix cache keeps, because a policy asked for it when a request
    ended."""

    number: int
    """Unique, and growing in the order in which prefixes were pinned."""
    request_id: str
    session_id: str | None
    tenant: str | None
    tokens: int
    """Leading tokens of the request that are kept."""
    pages: int


class ViewSource(Protocol):
    """Source of what a `SchedulerView` doesn't hold in its fields."""

    times: StepTimes

    def views_of_running(self) -> Sequence[RequestView]: ...
    def views_of_waiting(self) -> Sequence[RequestView]: ...
    def pages_reserved(self) -> int: ...
    def pages_reserved_for(self, request: RequestView) -> int: ...


class SchedulerView(msgspec.Struct, frozen=True):
    """The scheduler as a policy sees it while one step is planned."""

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
    """Pages that only the prefix cache holds. They are evicted when a request needs them."""
    pages_fenced: int
    """Pages given back. They are free once the last step that may touch them is done."""
    num_running: int
    num_waiting: int
    """Requests that wait, held ones included."""
    pages_pinned: int
    """Pages kept by pins. One that two pins share counts twice."""
    _source: ViewSource

    @property
    def running(self) -> Sequence[RequestView]:
        """All requests with a sequence slot, in order of arrival. Made anew on each access: take it
        once."""
        return self._source.views_of_running()

    @property
    def waiting(self) -> Sequence[RequestView]:
        """All requests that wait for a slot and aren't held, in order of arrival. Made anew on each
        access: take it once."""
        return self._source.views_of_waiting()

    @property
    def num_prefilling(self) -> int:
        """Running requests with more than one token to compute. Counted on each access."""
        return sum([request.uncached_tokens > 1 for request in self.running])

    @property
    def num_decoding(self) -> int:
        """Running requests with at most one token to compute. Counted on each access."""
        return self.num_running - self.num_prefilling

    @property
    def last_steps(self) -> tuple[StepSummary, ...]:
        """Summaries of the last 32 steps that are done and haven't failed, oldest first."""
        return self._source.times.recent

    @property
    def pages_reserved(self) -> int:
        """Pages kept for the completions of running requests, by the engine's
        `output_reserve_tokens`. Counted on each access."""
        return self._source.pages_reserved()

    def pages_reserved_for(self, request: RequestView) -> int:
        """Pages that `output_reserve_tokens` keeps for the completion of a running request, or
        would keep if it ran. 0 after the end."""
        return self._source.pages_reserved_for(request)

    def estimate(
        self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0
    ) -> float | None:
        """Estimate the seconds of a step with these tokens of prompts and these decodes, which
        attends to `context_tokens` tokens in all.

        A linear fit through the steps that were measured; later steps count more. None until enough
        were measured. The first eight steps of an engine don't count.
        """
        return self._source.times.estimate(prefill_tokens, decodes, context_tokens)
