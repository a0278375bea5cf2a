"""What a policy sees: read-only projections of a request and of the scheduler."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from aioserve.kv.memory import KVMemory
from aioserve.scheduling.sequence import Phase, SequenceState

__all__ = ["RequestView", "SchedulerView"]


class RequestView:
    """What a policy sees of one request. Read-only; valid until the request has finished, and then
    it holds no pages."""

    __slots__ = ("_key", "_memory", "_sequence")

    def __init__(self, sequence: SequenceState, memory: KVMemory) -> None:
        self._sequence = sequence
        self._memory = memory
        self._key = (-1, b"")
        """The last prefix key, and of how many tokens: policies ask for the same in step after
        step, and it takes a look at each token to find."""

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
    def tenant(self) -> str | None:
        """On whose behalf the request was sent, where the caller said so."""
        return self._sequence.request.tenant

    @property
    def priority(self) -> int:
        """As the caller gave it, 0 unless it did: what it means is up to the policy."""
        return self._sequence.request.priority

    @property
    def ttft_target_seconds(self) -> float | None:
        """How soon after its arrival the first token is wanted, where the caller said so."""
        return self._sequence.request.ttft_target_seconds

    @property
    def tpot_target_seconds(self) -> float | None:
        """How long each further token may take on average, where the caller said so."""
        return self._sequence.request.tpot_target_seconds

    @property
    def deadline_seconds(self) -> float | None:
        """How long after its arrival the request is ended, unless it has ended before; None where
        the caller gave it all the time there is."""
        return self._sequence.request.deadline_seconds

    @property
    def first_token_seconds(self) -> float | None:
        """When the first token was known, on the clock of `SchedulerView.now_seconds`; None until
        it is."""
        return self._sequence.first_token_seconds

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
        """Tokens whose KV is in the request's pages, launched steps and those found in the cache
        included; 0 while it waits."""
        return self._sequence.lease.computed

    @property
    def num_samples(self) -> int:
        """Answers to one prompt that this request stands for: they run as one until the prompt is
        computed, and each for itself from then on."""
        return 1 + len(self._sequence.unborn)

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
        return self._memory.peek(sequence.lease, sequence.known_ids, sequence.num_cacheable)

    def prefix_key(self, num_tokens: int) -> bytes:
        """16 bytes, equal for two requests exactly if their first `num_tokens` tokens are equal
        and the KV of them may be shared (BLAKE2b, so "exactly" up to a chance of 2**-64). Of a
        request that has fewer, all tokens count."""
        count = min(num_tokens, self._sequence.num_known)
        if count != self._key[0]:
            namespace = self._sequence.request.namespace
            key = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
            key.update(self._sequence.ids(0, count))
            self._key = (count, key.digest())
        return self._key[1]

    @property
    def pages(self) -> int:
        """KV pages held, shared ones included; 0 after the end."""
        return 0 if self._has_ended else self._sequence.lease.num_pages

    @property
    def reclaimable_pages(self) -> int:
        """Pages that nobody else uses: they come back if the request is preempted; 0 after the
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


class SchedulerView(msgspec.Struct, frozen=True, gc=False):
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
