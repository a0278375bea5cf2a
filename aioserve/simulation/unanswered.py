"""Explains in words why no request got a completion under a policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from aioserve.arguments import counted
from aioserve.simulation.metrics import Metrics

__all__ = ["unanswered", "unanswered_at_rates"]


def unanswered(found: Mapping[str, Sequence[Metrics]]) -> list[str]:
    """Sentences, one for each policy under which no request has finished: there is little or
    nothing to draw of it."""
    return [
        _sentence(name, runs)
        for name, runs in found.items()
        if not any(metrics.finished for metrics in runs)
    ]


def unanswered_at_rates(runs: Iterable[tuple[str, float, Sequence[Metrics]]]) -> list[str]:
    """Sentences for policies at several rates: one for each policy, with the rates at which no
    request has finished with any seed."""
    tried: defaultdict[str, list[float]] = defaultdict(list)
    unfinished: defaultdict[str, dict[float, Sequence[Metrics]]] = defaultdict(dict)
    for name, rate, seeds in runs:
        tried[name].append(rate)
        if not any(metrics.finished for metrics in seeds):
            unfinished[name][rate] = seeds
    found: dict[str, list[Metrics]] = {}
    for name, by_rate in unfinished.items():
        rates = ", ".join(f"{rate:,.6g}" for rate in sorted(by_rate))
        at = "any rate" if len(by_rate) == len(tried[name]) else f"{rates} requests/s"
        found[f"{name} at {at}"] = [metrics for seeds in by_rate.values() for metrics in seeds]
    return unanswered(found)


def _sentence(name: str, runs: Sequence[Metrics]) -> str:
    too_long = sum(metrics.too_long for metrics in runs)
    refused = sum(metrics.refused for metrics in runs)
    causes: list[str] = []
    if too_long:
        pages = counted(runs[0].num_pages, "page", form=",")
        memory = f"{pages} of {counted(runs[0].page_size, 'token')}"
        requests = counted(too_long, "request was", "requests were", form=",")
        causes.append(f"{requests} too long for the model or the memory of {memory}")
    if refused:
        requests = counted(refused, "request was", "requests were", form=",")
        causes.append(f"{requests} refused by the policy")
    steps = "" if any(metrics.steps for metrics in runs) else " No step ran."
    return f"Under {name} no request got a completion: {' and '.join(causes)}.{steps}"
