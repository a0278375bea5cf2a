"""Chunked prefill in rotation: every waiting prompt advances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)
from aioserve_plugins._shared_beginnings import SharedBeginnings

__all__ = ["RoundRobin"]


class RoundRobin(SchedulingPolicy):
    """Computes at most `chunk_size` tokens of a prompt per step, and each prompt in its turn.

    A prompt that has had its turn goes to the end of the rotation, behind prompts that have arrived
    since. A short prompt therefore waits for one chunk of each prompt before it, and not for all of
    them.

    Requests start in order of arrival, with one exception. If another prompt is computing the page
    that a request needs next, the request waits and finds it cached. It waits for at most
    `patience` times its length.

    With `adaptive`, the share of prompts in a step falls with the number of decoding sequences.
    Steps are then short when many wait for their next token. It is the step's whole budget when
    none decodes, `chunk_size` tokens when decodes take all sequence slots, and in proportion
    between.

    Raises `ConfigError` for a `chunk_size` below 1, an `adaptive` that isn't a bool, or a
    `patience` that isn't finite and at least 0.
    """

    def __init__(
        self, *, chunk_size: int = 256, adaptive: bool = False, patience: float = 64.0
    ) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ConfigError(f"chunk_size must be an int of at least 1, got {chunk_size!r}")
        if not isinstance(adaptive, bool):
            raise ConfigError(f"adaptive must be True or False, got {adaptive!r}")
        if not isinstance(patience, int | float) or not 0 <= patience < math.inf:
            raise ConfigError(f"patience must be finite and at least 0, got {patience!r}")
        self.chunk_size = chunk_size
        self.adaptive = adaptive
        self.patience = patience
        self._beginnings = SharedBeginnings()
        self._put_off: set[RequestView] = set()
        """Requests that wait for a page that another one computes."""
        self._rotation: dict[RequestView, int] = {}
        """Every request that hasn't ended, the next in turn first, each with its ticket. Tickets
        grow along the rotation."""
        self._last_ticket = 0
        self._step = -1
        self._shares: dict[RequestView, int] = {}
        """Tokens of this step for each prompt that has its turn."""
        self._left = 0
        """Tokens of this step that prompts may still take, with `adaptive`."""
        self._expected = 0
        """Requests that may start in the room that this step's shares leave."""
        self._started = 0
        self._blocked = False
        """True if room was left in vain. Then none is left until a request has ended."""

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return math.ceil(self.patience * (request.prompt_tokens + request.generated_tokens))

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        beginnings = self._beginnings
        beginnings.begin((r for r in view.running if _computes(r)), view.page_size)
        self._put_off.clear()
        for request in waiting:
            if self.adaptive and self._step == view.step and not self._left:
                return
            waited = view.processed_tokens - request.arrival_processed_tokens
            if waited < self.starvation_bound_tokens(request) and beginnings.has_next_of(request):
                self._put_off.add(request)
                continue
            yield request
            if _computes(request):
                beginnings.add(request)

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if view.step != self._step:
            self._step = view.step
            self._deal(view)
        if not request.pages:
            self._shares[request] = self.chunk_size
            self._started += 1
        tokens = min(self._shares.get(request, 0), budget_tokens)
        if self.adaptive:
            tokens = min(tokens, self._left)
            self._left -= tokens
        return tokens

    def _deal(self, view: SchedulerView) -> None:
        """Move prompts that had their turn to the end. Prompts at the front share this
        step's tokens."""
        for request in self._shares:
            if request.is_running:
                del self._rotation[request]
                self._take_ticket(request)
        self._blocked |= self._started < self._expected
        self._shares, self._expected, self._started = {}, 0, 0
        computing = [request for request in view.running if _computes(request)]
        self._left = left = self._tokens_for_prompts(view, view.num_running - len(computing))
        for request in self._in_turn(computing, view):
            if left <= 0:
                return
            self._expected += not request.is_running
            self._shares[request] = min(self.chunk_size, request.uncached_tokens, left)
            left -= self._shares[request]

    def _in_turn(
        self, computing: Sequence[RequestView], view: SchedulerView
    ) -> Iterator[RequestView]:
        """Requests that are being computed or may start, in the order of the rotation. If none may
        start, the waiting ones aren't looked at."""
        slots = view.max_num_seqs - view.num_running
        pages = view.pages_free + view.pages_cached
        last = 0
        for request, ticket in self._rotation.items():
            if self._blocked or slots <= 0:
                break
            last = ticket
            if request.is_running:
                if _computes(request):
                    yield request
            elif request not in self._put_off:
                known = request.prompt_tokens + request.generated_tokens
                pages -= -(-known // view.page_size)
                slots -= request.num_samples
                if pages < 0 or slots < 0:
                    break
                yield request
        tickets = {request: self._rotation.get(request, 0) for request in computing}
        for request in sorted(computing, key=tickets.__getitem__):
            if tickets[request] > last:
                yield request

    def _take_ticket(self, request: RequestView) -> None:
        self._last_ticket += 1
        self._rotation[request] = self._last_ticket

    def _tokens_for_prompts(self, view: SchedulerView, decoding: int) -> int:
        left = max(0, view.max_num_batched_tokens - decoding)
        if not self.adaptive:
            return left
        free = 1 - decoding / view.max_num_seqs
        return min(left, max(self.chunk_size, int(free * view.max_num_batched_tokens)))

    def arrived(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._take_ticket(request)

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._blocked = False
        for request in requests:
            self._rotation.pop(request, None)
            self._put_off.discard(request)
            self._shares.pop(request, None)
            self._beginnings.forget(request)


def _computes(request: RequestView) -> bool:
    return request.is_running and request.uncached_tokens > 1


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("round_robin", RoundRobin, "a chunk of every prompt in turn")]
