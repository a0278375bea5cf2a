"""Figures of a run for people: their labels, units and formats.

Each is a field of `Metrics`, so `Metrics` has everything that is shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from aioserve.arguments import counted
from aioserve.simulation.metrics import Metrics, measure_of

__all__ = [
    "FIGURES",
    "GROUPS",
    "GROUP_FIGURES",
    "MISSING",
    "NEVER",
    "Figure",
    "Group",
    "group_rows",
    "rows",
    "shown_figures",
    "text_of",
    "unanswered",
    "unanswered_at_rates",
]

MISSING = "-"
NEVER = "never"
"""Text of an infinite time: too many requests got no completion."""


class Figure(msgspec.Struct, frozen=True):
    """One figure: its place in the metrics, and its format."""

    label: str
    field: str
    """Field of the metrics, with dots into the parts of a part."""
    form: str = "{:,}"
    factor: float = 1
    better: Literal["more", "less"] | None = None
    """Direction that is better; None if the figure tells what happened, and not how well."""

    @property
    def is_share(self) -> bool:
        """True if it is shown in percent."""
        return self.form.endswith("%}")

    def of(self, metrics: object) -> Any:
        """Return the value; None if there was nothing to measure."""
        return measure_of(self.field)(metrics)

    def text(self, metrics: object) -> str:
        return self.show(self.of(metrics))

    def show(self, value: float | None) -> str:
        return text_of(None if value is None else value * self.factor, self.form)


def text_of(value: float | None, form: str = "{:,.2f}", *, missing: str = MISSING) -> str:
    """Return the text of a value; `missing` if there was nothing to measure."""
    if value is None:
        return missing
    return NEVER if value == math.inf else form.format(value)


def _percentiles(
    label: str,
    field: str,
    unit: str,
    factor: float = 1,
    names: tuple[str, ...] = ("p50", "p90", "p99"),
) -> list[Figure]:
    return [
        Figure(f"{label} {name}, {unit}", f"{field}.{name}", "{:,.2f}", factor, "less")
        for name in names
    ]


FIGURES = (
    Figure("finished", "finished", better="more"),
    Figure("of those, cut short", "cut_short"),
    Figure("refused by the policy", "refused", better="less"),
    Figure("too long for memory or model", "too_long"),
    Figure("ended at their deadline", "overdue", better="less"),
    *_percentiles("time to first token", "ttft_seconds", "s"),
    *_percentiles("time per output token", "tpot_seconds", "ms", 1000),
    *_percentiles("gap between tokens", "gap_seconds", "ms", 1000, ("p50", "p99", "max")),
    *_percentiles("in the queue", "queue_seconds", "s"),
    *_percentiles("whole answer", "e2e_seconds", "s"),
    Figure("met their targets", "goodput.share", "{:.1%}", better="more"),
    Figure("goodput, requests/s", "goodput.requests_per_second", "{:,.3f}", better="more"),
    Figure("output tokens/s", "output_tokens_per_second", "{:,.1f}", better="more"),
    Figure("longest wait, tokens", "max_wait_tokens", better="less"),
    Figure("gap between tenants, tokens", "service_gap_tokens", better="less"),
    Figure("prefix blocks found", "block_hit_share", "{:.1%}", better="more"),
    Figure("prompt tokens found", "token_hit_share", "{:.1%}", better="more"),
    Figure("tokens per step of a sequence", "speculation.tokens_per_step", "{:,.2f}"),
    Figure("draft tokens verified", "speculation.drafted_tokens"),
    Figure("of those, right", "speculation.acceptance", "{:.1%}"),
    Figure("preemptions", "preemptions", better="less"),
    Figure("pages swapped out", "pages_swapped_out"),
    Figure("pages swapped in", "pages_swapped_in"),
    Figure("steps with a fault of the policy", "policy_faults", better="less"),
    Figure("KV pages held, mean", "kv_occupancy_mean", "{:.1%}"),
    Figure("KV pages held, most", "kv_occupancy_max", "{:.1%}"),
    Figure("time in steps", "busy_share", "{:.1%}"),
    Figure("steps", "steps"),
    Figure("of those, not measured", "steps_outside.share", "{:.1%}"),
    Figure("simulated time, s", "seconds", "{:,.1f}"),
)
ONLY_WHERE_MEASURED = (
    "overdue",
    "goodput",
    "service_gap_tokens",
    "pages_swapped_out",
    "pages_swapped_in",
    "speculation",
    "steps_outside",
)

Group = Literal["tenants", "classes"]
GROUPS: dict[Group, str] = {"tenants": "tenant", "classes": "class"}
"""Fields of `Metrics` with metrics by name, and the word for one of these."""
GROUP_FIGURES = (
    Figure("tokens served", "tokens"),
    Figure("time to first token p99, s", "ttft_seconds.p99", "{:,.2f}"),
    Figure("longest wait, tokens", "max_wait_tokens"),
    Figure("met their targets", "goodput.share", "{:.1%}"),
)
"""Figures of each tenant, or class, under each policy."""


def shown_figures(found: Mapping[str, Metrics]) -> list[Figure]:
    """Return the figures that were measured under some policy, or are always shown."""
    shown: list[Figure] = []
    for figure in FIGURES:
        head = figure.field.partition(".")[0]
        if head in ONLY_WHERE_MEASURED and all(getattr(m, head) is None for m in found.values()):
            continue
        shown.append(figure)
    return shown


def rows(found: Mapping[str, Metrics]) -> list[tuple[str, list[str]]]:
    """Return the label of every figure, and its text under each policy."""
    return [
        (figure.label, [figure.text(metrics) for metrics in found.values()])
        for figure in shown_figures(found)
    ]


def group_rows(
    found: Mapping[str, Metrics], group: Group
) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return rows of tenants, or of classes, by figure.

    Each entry is a figure's label and a row for each tenant or class. A row is its name with its
    number of requests, and the text under each policy. Empty if the trace names none.
    """
    by_policy = [getattr(metrics, group) for metrics in found.values()]
    return [
        (
            figure.label,
            [
                (f"{name} ({theirs.requests:,})", [figure.text(one[name]) for one in by_policy])
                for name, theirs in by_policy[0].items()
            ],
        )
        for figure in GROUP_FIGURES
        if any(figure.of(one) is not None for groups in by_policy for one in groups.values())
    ]


def unanswered(found: Mapping[str, Sequence[Metrics]]) -> list[str]:
    """Return a sentence for each policy under which no request has finished.

    There is little or nothing to draw of these.
    """
    return [
        _sentence(name, runs)
        for name, runs in found.items()
        if not any(metrics.finished for metrics in runs)
    ]


def unanswered_at_rates(runs: Iterable[tuple[str, float, Sequence[Metrics]]]) -> list[str]:
    """Return a sentence for each policy with rates at which no request has finished with any
    seed.
    """
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
    overdue = sum(metrics.overdue or 0 for metrics in runs)
    causes: list[str] = []
    if too_long:
        pages = counted(runs[0].num_pages, "page", form=",")
        memory = f"{pages} of {counted(runs[0].page_size, 'token')}"
        requests = counted(too_long, "request was", "requests were", form=",")
        causes.append(f"{requests} too long for the model or the memory of {memory}")
    if refused:
        requests = counted(refused, "request was", "requests were", form=",")
        causes.append(f"{requests} refused by the policy")
    if overdue:
        requests = counted(overdue, "request was", "requests were", form=",")
        causes.append(f"{requests} ended at the deadline")
    steps = "" if any(metrics.steps for metrics in runs) else " No step ran."
    return f"Under {name} no request got a completion: {' and '.join(causes)}.{steps}"
