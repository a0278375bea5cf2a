"""Chunked prefill in rotation: every prompt that waits advances."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["RoundRobin"]


class RoundRobin(SchedulingPolicy):
    """Computes at most `chunk_size` tokens of a prompt per step, and each prompt in its turn.

    A prompt that has had its turn goes to the end of the rotation, behind those that have arrived
    since: a short prompt waits for one chunk of each prompt before it instead of for all of them.
    Requests start in order of arrival. Raises `ConfigError` for a `chunk_size` below 1.
    """

    def __init__(self, *, chunk_size: int = 256) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ConfigError(f"chunk_size must be an int of at least 1, got {chunk_size!r}")
        self.chunk_size = chunk_size
        self._rotation: dict[RequestView, None] = {}
        """Every request that hasn't ended, the one whose turn is next first."""
        self._step = 0
        self._shares: dict[RequestView, int] = {}
        """Tokens of this step for each prompt whose turn it is."""
        self._expected = 0
        """Requests for whose start this step's shares leave room."""
        self._started = 0
        self._blocked = False
        """Room was left in vain: none is left until a request has ended."""

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if view.step != self._step:
            self._step = view.step
            self._deal(view)
        if not request.pages:
            self._shares[request] = self.chunk_size
            self._started += 1
        return min(self._shares.get(request, 0), budget_tokens)

    def _deal(self, view: SchedulerView) -> None:
        """Those that had their turn go to the end; those at the front share this step's tokens."""
        for request in self._shares:
            if request.pages and request in self._rotation:
                del self._rotation[request]
                self._rotation[request] = None
        self._blocked |= self._started < self._expected
        self._shares, self._expected, self._started = {}, 0, 0
        left = view.max_num_batched_tokens - sum(_decodes(r) for r in self._rotation)
        seats = view.max_num_seqs - view.num_running
        pages = view.pages_free + view.pages_cached
        for request in self._rotation:
            if left <= 0:
                return
            if not request.pages:
                known = request.prompt_tokens + request.generated_tokens
                pages -= -(-known // view.page_size)
                seats -= request.num_samples
                if self._blocked or pages < 0 or seats < 0:
                    continue
                self._expected += 1
            elif _decodes(request):
                continue
            self._shares[request] = min(self.chunk_size, request.uncached_tokens, left)
            left -= self._shares[request]

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._rotation.update(dict.fromkeys(requests))

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._blocked = False
        for request in requests:
            self._rotation.pop(request, None)


def _decodes(request: RequestView) -> bool:
    return request.pages > 0 and request.uncached_tokens <= 1


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("round_robin", RoundRobin, "a chunk of every prompt in turn")]
