"""Figures of requests that a load generator sent to a server, named as the simulator's.

A record's times are seconds since the load began. A request arrives when it is sent, so the
generator's own lateness is in no latency; it is reported separately. Knows no HTTP.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.simulation.gaps import Spread, spread_of, weighted_spread
from aioserve.simulation.metrics import (
    Goodput,
    GroupMetrics,
    e2e_seconds,
    goodput_of,
    group_metrics,
    has_answer,
    spread_over,
    tpot_seconds,
    ttft_seconds,
)
from aioserve.simulation.records import Ending, RequestRecord

__all__ = [
    "Failure",
    "GeneratorMetrics",
    "ServedMetrics",
    "ServedRequest",
    "served_metrics_of",
    "token_gaps_of",
]

MAX_BUSY_SHARE = 0.8
MAX_LATE_SECONDS = 0.01
"""Longest lateness, in seconds, of a generator that keeps up: a later one measures itself."""


class ServedRequest(msgspec.Struct):
    """One request that was sent, or was to be sent."""

    record: RequestRecord
    """Record of the request. Its ending is None until its stream has ended, and stays so if the
    load was interrupted. Once the server reports counts, `request.prompt_tokens` is its count.
    """
    is_sent: bool = False
    late_seconds: float = 0.0
    """Time from when it was due, and there was room for it, until it was sent."""
    held_seconds: float = 0.0
    """Time from when it was due until there was room among the concurrent requests."""
    failure: str = ""
    """Kind of the error; empty without one."""
    detail: str = ""
    """Message of the server or the connection."""
    chunks: int = 0
    """Chunks that carried a token or more."""
    gap_seconds: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """Times between one of those chunks and the next."""
    has_usage: bool = False
    """True if the server reported its counts. Otherwise each chunk counts as a token."""


class Failure(msgspec.Struct, frozen=True):
    """Requests that ended with the same kind of error."""

    requests: int
    first: str
    """Message of the first of them."""


class GeneratorMetrics(msgspec.Struct, frozen=True):
    """Metrics of the load generator itself. Times are in seconds."""

    late_seconds: Spread | None
    """Time from when a request was due until it was sent, without the time that `concurrency` held
    it.
    """
    held_seconds: Spread | None
    """Time from when a request was due until fewer than `concurrency` were under way; None if
    nothing was held.
    """
    loop_lag_seconds: Spread | None
    """Lateness of a task that sleeps 1 ms at a time."""
    busy_share: float
    """Processor time of the generator, as a share of the time of the load; at most about 1."""

    @property
    def findings(self) -> list[str]:
        """Signs that it didn't keep up, in words; empty if it did."""
        found: list[str] = []
        if self.busy_share > MAX_BUSY_SHARE:
            found.append(f"it was busy for {self.busy_share:.0%} of the time")
        for spread, what in (
            (self.late_seconds, "requests were sent {:.1f} ms late"),
            (self.loop_lag_seconds, "its event loop woke {:.1f} ms late"),
        ):
            if spread is not None and spread.p99 > MAX_LATE_SECONDS:
                found.append(what.format(spread.p99 * 1000) + " at the 99th percentile")
        return found


class ServedMetrics(msgspec.Struct, frozen=True):
    """Metrics of a load. Times are in seconds from the sending of a request.

    A spread is None if there is nothing to measure.
    """

    requests: int
    """Requests that ended: finished, refused or failed."""
    finished: int
    cut_short: int
    """Finished requests with fewer tokens than were asked for."""
    refused: int
    """Requests that the server answered with 429 or 503. Like failed ones, they count as infinite
    in the percentiles of all times but the gaps.
    """
    failed: int
    failures: dict[str, Failure]
    """Requests that were refused or failed, by kind."""
    unfinished: int
    """Requests under way when the load was interrupted: only the tokens include them."""
    not_sent: int
    """Requests whose turn didn't come before the load ended."""
    without_text: int
    """Finished requests without a visible token: they have no time to first token."""
    without_usage: int
    """Finished requests whose counts the server didn't report: each chunk counts as a token."""
    seconds: float
    """Time from the first request until the last has ended."""
    prompt_tokens: int
    """Tokens in prompts of requests that finished."""
    cached_tokens: int
    """Prompt tokens among them that the server found in its cache, if it reports them."""
    output_tokens: int
    """All tokens that came."""
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_seconds: Spread | None
    """Time to the first token."""
    tpot_seconds: Spread | None
    """Mean time between the tokens of a completion, of completions with two or more."""
    gap_seconds: Spread | None
    """Time between one chunk with tokens and the next of the same completion."""
    e2e_seconds: Spread | None
    """Time to the last token."""
    tokens_per_chunk: float | None
    goodput: Goodput | None
    """Goodput; None without targets."""
    tenants: dict[str, GroupMetrics]
    """Metrics of tenants by name, if the trace names them."""
    classes: dict[str, GroupMetrics]
    """Metrics of classes by name, if the trace names them."""
    generator: GeneratorMetrics


def served_metrics_of(
    served: Sequence[ServedRequest],
    seconds: float,
    *,
    loop_lag_seconds: Iterable[float] = (),
    busy_share: float = 0.0,
) -> ServedMetrics:
    """Return the metrics of a load that took `seconds`, with goodput if some request has a
    target.
    """
    sent = [one for one in served if one.is_sent]
    ended = [one for one in sent if one.record.ending is not None]
    records = [one.record for one in ended]
    finished = [one for one in ended if has_answer(one.record)]
    prompt_tokens = sum(one.record.request.prompt_tokens for one in finished)
    output_tokens = sum(one.record.output_tokens for one in sent)
    chunks = sum(one.chunks for one in sent)
    held = [one.held_seconds for one in sent]
    timed = seconds if any(record.request.has_target for record in records) else None
    per_second = 1 / seconds if seconds else 0.0
    return ServedMetrics(
        requests=len(records),
        finished=len(finished),
        cut_short=_count(records, Ending.CUT_SHORT),
        refused=_count(records, Ending.REFUSED),
        failed=_count(records, Ending.FAILED),
        failures=_failures(ended),
        unfinished=len(sent) - len(ended),
        not_sent=len(served) - len(sent),
        without_text=sum(one.record.first_token_seconds is None for one in finished),
        without_usage=sum(not one.has_usage for one in finished),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(one.record.cached_tokens for one in finished),
        output_tokens=output_tokens,
        requests_per_second=len(finished) * per_second,
        prompt_tokens_per_second=prompt_tokens * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=(prompt_tokens + output_tokens) * per_second,
        ttft_seconds=spread_over(records, ttft_seconds),
        tpot_seconds=spread_over(records, tpot_seconds, at_least_tokens=2),
        gap_seconds=weighted_spread(*token_gaps_of(sent)),
        e2e_seconds=spread_over(records, e2e_seconds),
        tokens_per_chunk=output_tokens / chunks if chunks else None,
        goodput=None if timed is None else goodput_of(records, timed),
        tenants=group_metrics(records, attrgetter("tenant"), timed),
        classes=group_metrics(records, attrgetter("request_class"), timed),
        generator=GeneratorMetrics(
            late_seconds=spread_of(one.late_seconds for one in sent),
            held_seconds=spread_of(held) if any(held) else None,
            loop_lag_seconds=spread_of(loop_lag_seconds),
            busy_share=busy_share,
        ),
    )


def token_gaps_of(
    served: Iterable[ServedRequest],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return all times between chunks, in no order, and the count of each, which is 1."""
    gaps = np.concatenate([np.empty(0), *(np.array(one.gap_seconds) for one in served)])
    return gaps, np.ones(len(gaps), np.int64)


# -- parts


def _count(records: Iterable[RequestRecord], ending: Ending) -> int:
    return sum(record.ending is ending for record in records)


def _failures(ended: Iterable[ServedRequest]) -> dict[str, Failure]:
    """Return failures by their kind, the most frequent first."""
    wrong = [one for one in ended if one.failure]
    firsts = {one.failure: one.detail for one in reversed(wrong)}
    counts = Counter(one.failure for one in wrong)
    return {kind: Failure(count, firsts[kind]) for kind, count in counts.most_common()}
