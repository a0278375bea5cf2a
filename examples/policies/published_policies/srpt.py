"""Shortest remaining processing time, by forecasts of the answers' lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["ShortestRemaining"]


class ShortestRemaining(SchedulingPolicy):
    """Run the requests first that are soon done; they take the slots of longer ones.

    The remaining work of a request is the forecast of its answer, less the tokens that it has
    generated. A tenth of its uncached tokens is added: a prompt's tokens are computed together. A
    request without a forecast counts as long as its limit. With `preempt`, a running request gives
    way to one with less than half of its remaining work.

    Schrage: "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline",
    Operations Research 1968.

    For answers of language models with forecasts, Qiu et al.: "Efficient Interactive LLM Serving
    with Proxy Model-based Sequence Length Prediction", 2024.
    """

    def __init__(self, *, preempt: bool = True) -> None:
        self.preempts = preempt

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=_remaining)

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        if not self.preempts or not view.num_waiting:
            return
        first = sorted(view.waiting, key=_remaining)
        longest = sorted(running, key=_remaining, reverse=True)
        slots = view.max_num_seqs - view.num_running
        for request, victim in zip(first[max(0, slots) :], longest, strict=False):
            if 2 * _remaining(request) >= _remaining(victim):
                return
            yield victim


def _remaining(request: RequestView) -> float:
    forecast = request.predicted_output_tokens or request.max_tokens
    return max(1, forecast - request.generated_tokens) + request.uncached_tokens / 10


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("srpt", ShortestRemaining, "shortest remaining time first, by forecasts")]
