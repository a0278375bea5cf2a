"""The interface between a scheduling policy and the mechanism that asks it.

A policy answers questions over read-only views. It owns no queue and no page, so it can be slow or
unfair, and it can't lose a request or corrupt memory: the mechanism checks every answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.scheduling.memory import KVMemory
    from aioserve.scheduling.sequence import SequenceState

__all__ = ["Refusal", "RequestView", "SchedulerView", "SchedulingPolicy", "Verdict"]

MAX_REASON_CHARS = 1000


class Verdict(Enum):
    """A policy's answer to "may this request start?"."""

    NOW = "now"
    LATER = "later"
    """Ask again in the next step. With nothing running the mechanism starts the request anyway:
    an engine that has work never stands still."""
    NEVER = "never"
    """Refuse the request: its stream raises `RequestRejectedError`."""


class Refusal(msgspec.Struct, frozen=True):
    """`Verdict.NEVER` with a reason, which stands in the message of `RequestRejectedError`.

    Raises `ConfigError` for a reason that isn't a str of 1 to 1000 characters.
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not 1 <= len(self.reason) <= MAX_REASON_CHARS:
            raise ConfigError(
                f"reason must be a str of 1 to {MAX_REASON_CHARS} characters, got {self.reason!r}"
            )


class RequestView:
    """What a policy sees of one request. Read-only; valid until the request has finished."""

    __slots__ = ("_key", "_memory", "_state")

    def __init__(self, state: SequenceState, memory: KVMemory) -> None:
        self._state = state
        self._memory = memory
        self._key = (-1, b"")
        """The last prefix key, and of how many tokens: policies ask for the same in step after
        step, and it takes a look at each token to find."""

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def arrival_index(self) -> int:
        """Place in the order of arrival: unique, growing, kept through preemption."""
        return self._state.sequence_id

    @property
    def arrival_seconds(self) -> float:
        """When the request arrived, on the clock of `SchedulerView.now_seconds`."""
        return self._state.arrival_seconds

    @property
    def tenant(self) -> str | None:
        """On whose behalf the request was sent, where the caller said so."""
        return self._state.tenant

    @property
    def ttft_target_seconds(self) -> float | None:
        """How soon after its arrival the first token is wanted, where the caller said so."""
        return self._state.ttft_target_seconds

    @property
    def tpot_target_seconds(self) -> float | None:
        """How long each further token may take on average, where the caller said so."""
        return self._state.tpot_target_seconds

    @property
    def first_token_seconds(self) -> float | None:
        """When the first token was known, on the clock of `SchedulerView.now_seconds`; None until
        it is."""
        return self._state.first_token_seconds

    @property
    def prompt_tokens(self) -> int:
        return self._state.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled and known so far."""
        return self._state.num_known - self._state.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens that the answer may have."""
        return self._state.max_length - self._state.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in the request's pages, launched steps and those found in the cache
        included; 0 while it waits."""
        return self._state.computed

    @property
    def num_samples(self) -> int:
        """Answers to one prompt that this request stands for: they run as one until the prompt is
        computed, and each for itself from then on."""
        return 1 + len(self._state.unborn)

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need no computing: for a waiting request those found in the prefix
        cache now, for a running one those found when it began."""
        state = self._state
        return self._memory.peek(state) if state.slot < 0 else state.cached

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, the cached ones left out."""
        state = self._state
        return state.remaining - (self._memory.peek(state) if state.slot < 0 else 0)

    def prefix_key(self, num_tokens: int) -> bytes:
        """16 bytes, equal for two requests exactly if their first `num_tokens` tokens are equal
        and the KV of them may be shared (BLAKE2b, so "exactly" up to a chance of 2**-64). Of a
        request that has fewer, all tokens count."""
        count = min(num_tokens, self._state.num_known)
        if count != self._key[0]:
            namespace = self._state.namespace
            key = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
            key.update(self._state.ids(0, count))
            self._key = (count, key.digest())
        return self._key[1]

    @property
    def pages(self) -> int:
        """KV pages held, shared ones included."""
        return len(self._state.page_table)

    @property
    def reclaimable_pages(self) -> int:
        """Pages that nobody else uses: they come back if the request is preempted."""
        return self._memory.num_reclaimable(self._state)

    @property
    def lost_tokens(self) -> int:
        """Computed tokens that no running request shares: they may have to be computed again, or
        copied back, if the request is preempted."""
        return self._state.computed - self._memory.num_shared_tokens(self._state)

    @property
    def in_flight(self) -> bool:
        """Whether a launched step works on the request: its pages come back after that step."""
        return self._state.last_step > self._memory.pool.done_step

    @property
    def preemptions(self) -> int:
        """How often the request gave its pages back and started over."""
        return self._state.epoch

    @property
    def arrival_processed_tokens(self) -> int:
        """`SchedulerView.processed_tokens` at arrival; the difference measures the wait in tokens
        of work, which ages fairly on slow and fast machines alike."""
        return self._state.arrival_processed_tokens

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


class SchedulingPolicy:
    """Decides what runs next. Override the questions that matter; the defaults are first come,
    first served.

        class ShortestPromptFirst(SchedulingPolicy):
            def order(self, waiting, view):
                return sorted(waiting, key=lambda request: request.uncached_tokens)

    Methods are plain and synchronous and run on the event loop, so they must be quick. One that
    raises, or gives an answer that isn't one, is logged and first come, first served decides for
    the rest of that step.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Waiting requests in the order to start them; those left out wait.

        `waiting` is in order of arrival. Admission stops at the first request that doesn't fit
        the free pages, so that a large request isn't overtaken for ever.
        """
        return waiting

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        """Whether a request may start in this step. It does if there is memory for it. A `Refusal`
        is `Verdict.NEVER` with a reason for the caller."""
        return Verdict.NOW

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        """Prompt tokens to compute in this step, 0 to `budget_tokens`.

        `budget_tokens` is what is left of the step's token budget, and at most what the request
        still needs. Sequences that decode are not asked: they take their one token first.
        """
        return budget_tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        """The request to preempt when `need_pages` more pages are needed.

        `running` holds those that may be preempted: each arrived after the request in need, or
        waits for its own reader. By default the request that loses the least work among those
        whose pages cover the need, and of equal ones one whose pages come back at once; where none
        covers the need, the one that brings back the most pages.
        """
        pages = {request: request.reclaimable_pages for request in running}
        covering = [request for request in running if pages[request] >= need_pages]
        if covering:
            return min(covering, key=lambda r: (r.lost_tokens, r.in_flight, -r.arrival_index))
        return max(running, key=lambda r: (pages[r], r.arrival_index))

    def starvation_bound_tokens(self, request: RequestView) -> int | None:
        """The most that `request` may be overtaken: once that many tokens have been processed since
        it arrived, no request that arrived later starts before it.

        0 is order of arrival, None (the default) promises nothing. It is a declaration, held by
        `aioserve.testing.check_policy`; the mechanism doesn't ask.
        """
        return None

    def arrived(self, requests: Sequence[RequestView]) -> None:
        """These requests entered the queue since the last step was planned."""

    def step_finished(self, step: int, tokens: int) -> None:
        """Step number `step` is done; it computed `tokens` tokens."""

    def finished(self, requests: Sequence[RequestView]) -> None:
        """These requests have ended, for whatever reason."""
