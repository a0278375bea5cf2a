"""Virtual token counter: fair shares for tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["VirtualTokenCounter"]


class VirtualTokenCounter(SchedulingPolicy):
    """Start a request of the tenant that was served least.

    A prompt token counts one, when its request starts, and a generated token `output_cost`. A
    tenant that comes back counts at least as much as the least of those that wait, so that nobody
    saves up. The bundled `fair_share` does the same with weights, and with bounds on its memory.

    Sheng et al.: "Fairness in Serving Large Language Models", OSDI 2024.
    """

    def __init__(self, *, output_cost: float = 2.0) -> None:
        self.output_cost = output_cost
        self._served: dict[str | None, float] = {}
        self._live: dict[RequestView, tuple[int, int]] = {}
        """Waiting and running requests, with the counted tokens of prompt and answer."""

    def arrived(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            if request.generated_tokens or request.tenant in {r.tenant for r in self._live}:
                continue
            least = min((self._served[r.tenant] for r in self._live), default=0.0)
            self._served[request.tenant] = max(self._served.get(request.tenant, 0.0), least)
        self._live.update(dict.fromkeys(requests, (0, 0)))

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._count(request)
            self._live.pop(request, None)

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        for request in self._live:
            self._count(request)
        queues: dict[str | None, list[RequestView]] = {}
        for request in reversed(waiting):
            queues.setdefault(request.tenant, []).append(request)
        ahead = {tenant: self._served.get(tenant, 0.0) for tenant in queues}
        while queues:
            tenant = min(queues, key=lambda one: (ahead[one], queues[one][-1].arrival_index))
            request = queues[tenant].pop()
            ahead[tenant] += request.uncached_tokens
            if not queues[tenant]:
                del queues[tenant]
            yield request

    def _count(self, request: RequestView) -> None:
        prompt, generated = self._live.get(request, (0, 0))
        new = 0.0
        if not prompt and request.computed_tokens:
            prompt = request.prompt_tokens
            new += prompt - request.cached_tokens
        new += self.output_cost * (request.generated_tokens - generated)
        self._served[request.tenant] = self._served.get(request.tenant, 0.0) + new
        self._live[request] = (prompt, request.generated_tokens)


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("vtc", VirtualTokenCounter, "the tenant that was served least first")]
