"""Metrics of a simulated run, of its requests and of the memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from aioserve.paging.pages import capacity_tokens, full_pages
from aioserve.simulation.cost import StepsOutside
from aioserve.simulation.gaps import Spread, spread_of
from aioserve.simulation.records import (
    Ending,
    RequestRecord,
    SimulationResult,
    SpeculationMetrics,
)
from aioserve.traces.trace_request import TraceRequest

__all__ = [
    "Goodput",
    "GroupMetrics",
    "Metrics",
    "SpeculationMetrics",
    "Spread",
    "StepsOutside",
    "Targets",
    "block_hits",
    "e2e_seconds",
    "goodput_of",
    "group_metrics",
    "has_answer",
    "measure_of",
    "met_targets",
    "metrics_of",
    "queue_seconds",
    "spread_over",
    "targets_of",
    "tpot_seconds",
    "ttft_seconds",
]


MOST_TARGETS_TOLD = 3


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The different targets that requests have, each in ascending order."""

    ttft_seconds: tuple[float, ...] = ()
    tpot_seconds: tuple[float, ...] = ()
    deadline_seconds: tuple[float, ...] = ()

    @property
    def description(self) -> str:
        """The targets in words; empty without any."""
        asked = [
            ("first token within {} s", self.ttft_seconds, 1),
            ("further tokens every {} ms", self.tpot_seconds, 1000),
            ("ended after {} s", self.deadline_seconds, 1),
        ]
        return ", ".join([form.format(_span(v, factor)) for form, v, factor in asked if v])


def _span(values: Sequence[float], factor: float) -> str:
    """Return the values in words, or only the least and the largest of many."""
    texts = [f"{value * factor:,.6g}" for value in values]
    if len(texts) > MOST_TARGETS_TOLD:
        return f"{texts[0]} to {texts[-1]}"
    return " or ".join(texts)


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met their targets. A request without targets meets them when its completion has
    ended.
    """

    requests: int
    share: float
    """Share of all requests, refused ones included."""
    requests_per_second: float


class GroupMetrics(msgspec.Struct, frozen=True):
    """Metrics of one tenant or one class."""

    requests: int
    finished: int
    tokens: int
    """Tokens in prompts and completions of requests that finished."""
    ttft_seconds: Spread | None
    max_wait_tokens: int
    goodput: Goodput | None = None
    """Goodput of the group; None if no request of the run has a target."""


class Metrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Metrics of a run. Times are in seconds; a spread is None if there is nothing to measure."""

    requests: int
    finished: int
    cut_short: int
    """Finished requests with a truncated completion: shorter than in the trace because of
    `max_tokens`, `max_model_len` or full KV memory. They count like others in all figures.
    """
    refused: int
    """Requests refused by the policy. Like requests that are too long, they never get a first
    token, and count as infinite in the percentiles of all times but the gaps. Their number is
    `Spread.never`. Overdue requests count as infinite too, except in times that they completed
    before.
    """
    too_long: int
    """Requests whose prompts leave no room for a token in the KV memory or in `max_model_len`."""
    overdue: int | None
    """Requests that were ended at their deadline; None if no request has one."""
    seconds: float
    busy_seconds: float
    """Seconds in steps."""
    busy_share: float
    """Share of `seconds`."""
    steps: int
    output_tokens: int
    output_tokens_per_second: float
    ttft_seconds: Spread | None
    """Time from arrival to the first token."""
    tpot_seconds: Spread | None
    """Mean time between the tokens of a completion, of completions with two or more."""
    e2e_seconds: Spread | None
    """Time from arrival to the last token."""
    queue_seconds: Spread | None
    """Time from arrival to the beginning of the first step."""
    gap_seconds: Spread | None
    """Time between consecutive tokens of a completion, over all tokens. The longest are stalls,
    which the mean of a completion hides.
    """
    goodput: Goodput | None
    """Goodput; None without targets."""
    max_wait_tokens: int
    """Most tokens that were computed for others between a request's arrival and its first token, or
    its refusal.
    """
    service_gap_tokens: int | None
    tenants: dict[str, GroupMetrics]
    """Metrics of tenants by name, if the trace names them."""
    classes: dict[str, GroupMetrics]
    """Metrics of classes by name, if the trace names them."""
    blocks: int
    """Prefix blocks of the requests that started."""
    block_hits: int
    """Prefix blocks found in the cache when their request started."""
    block_hit_share: float | None
    token_hit_share: float | None
    """Share of the prompt tokens of requests that started."""
    tokens_computed: int
    tokens_prefilled: int
    """Prompt tokens computed. Requests that began again make it more than the prompts less the
    hits.
    """
    preemptions: int
    policy_faults: int
    """Steps that first come, first served decided, because the policy raised or answered
    nonsense.
    """
    steps_outside: StepsOutside | None
    """Steps that the cost table was not measured for; None if the cost model is no table."""
    num_pages: int
    page_size: int
    kv_occupancy_mean: float | None
    """Share of pages that requests hold, averaged over the time of steps. Pages of the cache alone
    can be evicted, and don't count. None if memory has no limit.
    """
    kv_occupancy_max: float | None
    pages_swapped_out: int | None
    """Pages copied to the host; None if it has no pages."""
    pages_swapped_in: int | None
    speculation: SpeculationMetrics | None = None
    """Draft tokens of a drafter; None, and left out of JSON, without a drafter."""


COPIED = set(Metrics.__struct_fields__) & set(SimulationResult.__struct_fields__) - {"requests"}
"""Figures that are copied from a result."""


def measure_of(field: str, factor: float = 1) -> Callable[[Any], Any]:
    """Return a function of metrics: their value at `field`, times `factor`.

    `field` has dots into the parts of a part. The value is None if there was nothing to measure.
    """
    parts = field.split(".")

    def value_of(metrics: Any) -> Any:
        value = metrics
        for part in parts:
            value = getattr(value, part)
            if value is None:
                return None
        return value if factor == 1 else value * factor

    return value_of


WITHOUT_ANSWER = (Ending.REFUSED, Ending.TOO_LONG, Ending.FAILED, Ending.OVERDUE)


def metrics_of(result: SimulationResult) -> Metrics:
    """Return the metrics of a run, with goodput if some request has a target."""
    records = result.requests
    started = [r for r in records if r.started_seconds is not None]
    blocks = sum(len(r.request.block_ids) for r in started)
    hits = sum(block_hits(r, result.page_size) for r in started)
    prompts = sum(r.request.prompt_tokens for r in started)
    output_tokens = sum(r.output_tokens for r in records)
    seconds = result.seconds
    timed = seconds if any(r.request.has_target for r in records) else None
    return Metrics(
        requests=len(records),
        finished=sum(has_answer(r) for r in records),
        cut_short=sum(r.ending is Ending.CUT_SHORT for r in records),
        refused=sum(r.ending is Ending.REFUSED for r in records),
        too_long=sum(r.ending is Ending.TOO_LONG for r in records),
        overdue=_overdue(records),
        busy_share=result.busy_seconds / seconds if seconds else 0.0,
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds if seconds else 0.0,
        ttft_seconds=spread_over(records, ttft_seconds),
        tpot_seconds=spread_over(records, tpot_seconds, at_least_tokens=2),
        e2e_seconds=spread_over(records, e2e_seconds),
        queue_seconds=spread_over(records, queue_seconds),
        goodput=None if timed is None else goodput_of(records, timed),
        max_wait_tokens=_max_wait_tokens(records),
        tenants=group_metrics(records, attrgetter("tenant"), timed),
        classes=group_metrics(records, attrgetter("request_class"), timed),
        blocks=blocks,
        block_hits=hits,
        block_hit_share=hits / blocks if blocks else None,
        token_hit_share=sum(r.cached_tokens for r in started) / prompts if prompts else None,
        kv_occupancy_mean=_share(result.pages_held_mean, result),
        kv_occupancy_max=_share(result.pages_held_max, result),
        **{name: getattr(result, name) for name in COPIED},
    )


def _share(pages: float, result: SimulationResult) -> float | None:
    return None if result.unbounded else pages / result.num_pages


def block_hits(record: RequestRecord, page_size: int) -> int:
    """Return the prefix blocks of a request that were found in the cache when it started.

    The cache can't have the end of a prompt that doesn't fill a page, and the last token is always
    computed. A cached block counts as found even so.
    """
    request = record.request
    whole, rest = divmod(record.cached_tokens, request.block_tokens)
    reachable = capacity_tokens(full_pages(request.prompt_tokens - 1, page_size), page_size)
    if rest and record.cached_tokens >= reachable:
        whole += 1
    return min(whole, len(request.block_ids))


def ttft_seconds(record: RequestRecord) -> float | None:
    """Return the time from arrival to the first token; None without one."""
    if record.first_token_seconds is None:
        return None
    return record.first_token_seconds - record.request.arrival_seconds


def tpot_seconds(record: RequestRecord) -> float | None:
    """Return the mean time between the tokens of a whole completion; None for fewer than two."""
    first, end = record.first_token_seconds, record.end_seconds
    if not has_answer(record) or record.output_tokens < 2:
        return None
    if first is None or end is None:
        return None
    return (end - first) / (record.output_tokens - 1)


def e2e_seconds(record: RequestRecord) -> float | None:
    """Return the time from arrival to the last token; None if the completion never finished."""
    if record.end_seconds is None or not has_answer(record):
        return None
    return record.end_seconds - record.request.arrival_seconds


def met_targets(record: RequestRecord) -> bool:
    """True if the completion has ended, within the targets that its request has."""
    ttft, tpot, request = ttft_seconds(record), tpot_seconds(record), record.request
    if ttft is None or not has_answer(record):
        return False
    return (request.ttft_target_seconds is None or ttft <= request.ttft_target_seconds) and (
        request.tpot_target_seconds is None or tpot is None or tpot <= request.tpot_target_seconds
    )


def targets_of(requests: Iterable[TraceRequest]) -> Targets | None:
    """Return the targets of these requests; None if none has any."""
    asked = [request for request in requests if request.has_target]
    if not asked:
        return None

    def values(name: str) -> tuple[float, ...]:
        return tuple(sorted({v for r in asked if (v := getattr(r, name)) is not None}))

    return Targets(
        ttft_seconds=values("ttft_target_seconds"),
        tpot_seconds=values("tpot_target_seconds"),
        deadline_seconds=values("deadline_seconds"),
    )


def has_answer(record: RequestRecord) -> bool:
    """True if the completion ended where the trace says, or at the limit of its length."""
    return record.ending in (Ending.FINISHED, Ending.CUT_SHORT)


def queue_seconds(record: RequestRecord) -> float | None:
    """Return the time from arrival to the beginning of the first step; None without one."""
    if record.started_seconds is None:
        return None
    return record.started_seconds - record.request.arrival_seconds


def _max_wait_tokens(records: Sequence[RequestRecord]) -> int:
    return max((r.wait_tokens for r in records if r.wait_tokens is not None), default=0)


def _overdue(records: Sequence[RequestRecord]) -> int | None:
    if all(r.request.deadline_seconds is None for r in records):
        return None
    return sum(r.ending is Ending.OVERDUE for r in records)


def goodput_of(records: Sequence[RequestRecord], seconds: float) -> Goodput:
    """Return the goodput of requests of `seconds` seconds."""
    good = sum(map(met_targets, records))
    return Goodput(
        good, good / len(records) if records else 0.0, good / seconds if seconds else 0.0
    )


def group_metrics(
    records: Sequence[RequestRecord],
    name_of: Callable[[TraceRequest], str],
    seconds: float | None,
) -> dict[str, GroupMetrics]:
    """Return metrics by the names that requests have, with goodput unless `seconds` is None."""
    by_name: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if name := name_of(record.request):
            by_name[name].append(record)
    return {
        name: GroupMetrics(
            requests=len(theirs),
            finished=sum(has_answer(r) for r in theirs),
            tokens=sum(r.request.prompt_tokens + r.output_tokens for r in theirs if has_answer(r)),
            ttft_seconds=spread_over(theirs, ttft_seconds),
            max_wait_tokens=_max_wait_tokens(theirs),
            goodput=None if seconds is None else goodput_of(theirs, seconds),
        )
        for name, theirs in sorted(by_name.items())
    }


def spread_over(
    records: Sequence[RequestRecord],
    measure: Callable[[RequestRecord], float | None],
    *,
    at_least_tokens: int = 1,
) -> Spread | None:
    """Return the spread of a measure.

    Refused and failed requests have no value. They count as never if their completions would have
    had `at_least_tokens` tokens.
    """
    values = [measure(record) for record in records]
    never = sum(
        value is None
        and record.ending in WITHOUT_ANSWER
        and max(1, record.request.output_tokens) >= at_least_tokens
        for record, value in zip(records, values, strict=True)
    )
    return spread_of(values, never=never)
