"""FastServe's skip-join multi-level feedback queue, with proactive preemption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["SkipJoinMLFQ"]

Rank = tuple[int, int]


class SkipJoinMLFQ(SchedulingPolicy):
    """Lower the level of requests as their answers get long, since nobody knows the lengths ahead.

    Requests of higher levels take the slots and pages of lower ones. A request joins at the level
    that its prompt's length alone would have brought it to. Level 0 is for up to `prompt_tokens`,
    and each doubling is one level more. At level k it stays for `quantum_tokens * 2**k` tokens.
    Once `patience_tokens` have been processed since it arrived, it is back at 0.

    Wu et al.: "Fast Distributed Inference Serving for Large Language Models", arXiv 2305.05920,
    2023.
    """

    def __init__(
        self,
        *,
        quantum_tokens: int = 32,
        prompt_tokens: int = 512,
        patience_tokens: int = 1_000_000,
    ) -> None:
        for name, value in (("quantum_tokens", quantum_tokens), ("prompt_tokens", prompt_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}")
        if patience_tokens < 0:
            raise ConfigError(f"patience_tokens must be at least 0, got {patience_tokens!r}")
        self.quantum_tokens = quantum_tokens
        self.prompt_tokens = prompt_tokens
        self.patience_tokens = patience_tokens

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return self.patience_tokens

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: self._rank(request, view))

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        if not view.num_waiting:
            return
        first = sorted(view.waiting, key=lambda request: self._rank(request, view))
        lowest = sorted(running, key=lambda request: self._rank(request, view), reverse=True)
        slots = view.max_num_seqs - view.num_running
        pages = view.pages_free + view.pages_cached
        for request in first[: view.max_num_seqs]:
            needed = -(-request.uncached_tokens // view.page_size) + 1
            while lowest and (slots < request.num_samples or pages < needed):
                if self._rank(lowest[-1], view)[0] <= self._rank(request, view)[0]:
                    lowest.pop()
                    continue
                victim = lowest.pop(0)
                if self._rank(victim, view)[0] <= self._rank(request, view)[0]:
                    return
                slots, pages = slots + 1, pages + victim.reclaimable_pages
                yield victim
            if slots < request.num_samples or pages < needed:
                return
            slots, pages = slots - request.num_samples, pages - needed

    def _rank(self, request: RequestView, view: SchedulerView) -> Rank:
        level = max(0, (request.prompt_tokens - 1) // self.prompt_tokens).bit_length()
        left = request.generated_tokens
        while left >= self.quantum_tokens << level:
            left -= self.quantum_tokens << level
            level += 1
        waited = view.processed_tokens - request.arrival_processed_tokens
        return (0 if waited >= self.patience_tokens else level), request.arrival_index


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("fastserve", SkipJoinMLFQ, "a feedback queue that preempts long answers")]
