"""Virtual token counters per tenant, with weights."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)
from aioserve_plugins._waiting_changes import by_arrival, waits

__all__ = ["FairShare"]


class FairShare(SchedulingPolicy):
    """Starts a request of the tenant that has been served least.

    Each tenant has a counter of the service it got, divided by its weight. This is the virtual
    token counter of Sheng et al., "Fairness in Serving LLMs", OSDI 2024. A prompt token counts 1,
    when its request starts. A generated token counts `output_cost`, when it is known. Tokens that
    the cache saved, or that a preemption makes compute again, are free. A tenant that had nothing
    waiting is lifted to the least counter of the others, so that no tenant saves up service by not
    asking. Within a tenant requests start in order of arrival.

    `weights` are by tenant, 1 by default; requests without a tenant share one account. Of the
    tenants without requests, the `max_idle_tenants` latest are remembered.

    Running requests give way if the counter of their tenant is too far ahead of a waiting one. The
    limit is `lead_tokens`, plus the largest charge of that tenant for one prompt, since the order
    of starts alone causes that much.

    They give way to as many requests as can start in this step and would bring those behind up to
    that limit. The tenant furthest ahead gives way first, and of its requests the one that loses
    the least work.

    As long as only sequence slots are short, the lead over a tenant that waits all the time is
    bounded. The bound is this limit, plus the charges of the steps until that tenant can start. It
    doesn't depend on the length of completions or the number of running requests. While memory is
    short, none gives way unless that makes enough room. With None, running requests run to their
    end.

    Raises `ConfigError` for a weight or `lead_tokens` that isn't positive and finite, an
    `output_cost` that is negative or not finite, or a `max_idle_tenants` below 0.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        output_cost: float = 2.0,
        max_idle_tenants: int = 1024,
        lead_tokens: float | None = 16_384.0,
    ) -> None:
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigError(f"weights must be a mapping of tenants to numbers, got {weights!r}")
        self.weights: dict[str | None, float] = {} if weights is None else {**weights}
        for tenant, weight in self.weights.items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(
                    f"weights must be positive and finite, got {weight!r} for {tenant!r}"
                )
        if not isinstance(output_cost, int | float) or not 0 <= output_cost < math.inf:
            raise ConfigError(f"output_cost must be finite and at least 0, got {output_cost!r}")
        if not isinstance(max_idle_tenants, int) or max_idle_tenants < 0:
            raise ConfigError(f"max_idle_tenants must be an int >= 0, got {max_idle_tenants!r}")
        if lead_tokens is not None and not (
            isinstance(lead_tokens, int | float) and 0 < lead_tokens < math.inf
        ):
            raise ConfigError(f"lead_tokens must be positive and finite, got {lead_tokens!r}")
        self.lead_tokens = lead_tokens
        self.output_cost = output_cost
        self.max_idle_tenants = max_idle_tenants
        self._counters: dict[str | None, float] = {}
        self._idle: dict[str | None, None] = {}
        """Tenants that are remembered without requests, the longest idle first."""
        self._live: defaultdict[str | None, dict[RequestView, None]] = defaultdict(dict)
        """Requests that haven't ended, in order of arrival."""
        self._charged: dict[RequestView, int] = {}
        """Generated tokens charged to each request that has started."""
        self._longest: dict[str | None, float] = {}
        """Largest charge for one prompt, of each tenant with requests."""
        self._last: str | None = None
        """Tenant of the request that started last."""
        self._level = 0.0
        """Highest counter so far of a tenant whose request started last. A tenant begins there if
        it comes while none waits."""

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        self._charge_all_generated()
        return self._by_service(waiting, self._counters)

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        if self.lead_tokens is None or not view.num_waiting:
            return ()
        self._charge_all_generated()
        most = max(self._excess(tenant) for tenant in {request.tenant for request in running})
        behind = [t for t in self._live if self._counter(t) < most]
        if not any(self._is_backlogged(tenant) for tenant in behind):
            return ()
        return self._give_way(running, view.waiting, view)

    def _excess(self, tenant: str | None) -> float:
        """Counter of a tenant less the lead that it may have. Tenants below this may take its
        sequence slots."""
        return self._counter(tenant) - (self.lead_tokens or 0) - self._longest.get(tenant, 0.0)

    def _give_way(
        self, running: Sequence[RequestView], waiting: Sequence[RequestView], view: SchedulerView
    ) -> list[RequestView]:
        """Running requests whose slots and pages are enough for requests that are behind them and
        could start in this step."""
        ahead = sorted(
            running, key=lambda r: (self._excess(r.tenant), -r.lost_tokens, r.arrival_index)
        )
        slots = view.max_num_seqs - sum(request.num_samples for request in view.running)
        pages = view.pages_free + view.pages_cached + view.pages_fenced - view.pages_reserved
        tokens = view.max_num_batched_tokens
        counters = {**self._counters}
        giving: list[RequestView] = []
        for request in self._by_service(waiting, counters):
            counter = counters.get(request.tenant, 0.0)
            slots -= request.num_samples
            pages -= request.pages_to_start + view.pages_reserved_for(request)
            for_this: list[RequestView] = []
            while slots < 0 or pages < 0:
                if not ahead or self._excess(ahead[-1].tenant) <= counter:
                    return giving
                leaving = ahead.pop()
                for_this.append(leaving)
                slots += leaving.num_samples
                pages += leaving.reclaimable_pages + view.pages_reserved_for(leaving)
            giving += for_this
            uncached = request.uncached_tokens
            tokens -= uncached
            if tokens <= 0 or not ahead or self._excess(ahead[-1].tenant) <= counter:
                return giving
            if request not in self._charged:
                counters[request.tenant] = counter + self._cost(request.tenant, uncached)
        return giving

    def _by_service(
        self, waiting: Sequence[RequestView], counters: Mapping[str | None, float]
    ) -> Iterator[RequestView]:
        """Yield waiting requests by the service of their tenants. The counters are read anew after
        each, since one that has started was charged. A tenant's requests are looked at only as they
        are asked for."""
        queues = {
            tenant: (r for r in live if not r.is_running and waits(r, waiting))
            for tenant, live in self._live.items()
        }
        heap: list[tuple[float, int, str | None, RequestView]] = []

        def push_next(tenant: str | None) -> None:
            request = next(queues[tenant], None)
            if request is not None:
                counter = counters.get(tenant, 0.0)
                heapq.heappush(heap, (counter, request.arrival_index, tenant, request))

        for tenant in queues:
            push_next(tenant)
        while heap:
            tenant, request = heap[0][2:]
            yield request
            heapq.heappop(heap)
            push_next(tenant)

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not request.pages and request not in self._charged:
            self._rise()
            self._last = request.tenant
            cost = self._charge(request, request.uncached_tokens)
            self._longest[request.tenant] = max(cost, self._longest.get(request.tenant, 0.0))
            self._charged[request] = 0
        return budget_tokens

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._charge_all_generated()
        backlogged = self._backlogged()
        self._rise()
        least = min((self._counter(tenant) for tenant in backlogged), default=self._level)
        for request in requests:
            tenant = request.tenant
            self._idle.pop(tenant, None)
            self._live[tenant][request] = None
            if request.pages:  # a further sample: its prompt is computed
                self._charged[request] = 0
                self._live[tenant] = dict.fromkeys(sorted(self._live[tenant], key=by_arrival))
            elif tenant not in backlogged:
                self._counters[tenant] = max(self._counter(tenant), least)

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._charge_generated(request)
            self._charged.pop(request, None)
            live = self._live[request.tenant]
            live.pop(request, None)
            if not live:
                self._leave(request.tenant)

    def _backlogged(self) -> set[str | None]:
        return {tenant for tenant in self._live if self._is_backlogged(tenant)}

    def _is_backlogged(self, tenant: str | None) -> bool:
        """True if a request of the tenant waits. The oldest ones run, so few are passed before the
        first."""
        return any(map(_waits, self._live[tenant]))

    def _rise(self) -> None:
        self._level = max(self._level, self._counter(self._last))

    def _leave(self, tenant: str | None) -> None:
        del self._live[tenant]
        self._longest.pop(tenant, None)
        self._idle[tenant] = None
        if len(self._idle) > self.max_idle_tenants:
            longest = next(iter(self._idle))
            del self._idle[longest]
            self._counters.pop(longest, None)

    def _charge_all_generated(self) -> None:
        for request in self._charged:
            self._charge_generated(request)

    def _charge_generated(self, request: RequestView) -> None:
        charged = self._charged.get(request)
        if charged is not None and request.generated_tokens > charged:
            self._charge(request, self.output_cost * (request.generated_tokens - charged))
            self._charged[request] = request.generated_tokens

    def _charge(self, request: RequestView, tokens: float) -> float:
        cost = self._cost(request.tenant, tokens)
        self._counters[request.tenant] = self._counter(request.tenant) + cost
        return cost

    def _cost(self, tenant: str | None, tokens: float) -> float:
        return tokens / self.weights.get(tenant, 1.0)

    def _counter(self, tenant: str | None) -> float:
        return self._counters.get(tenant, 0.0)


def _waits(request: RequestView) -> bool:
    return not request.pages and not request.is_held


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("fair_share", FairShare, "the tenant that got least service first")]
