"""Requests of a simulated trace: the order in which they come, and their results.

In an open loop each comes when the trace says, whatever became of the one before. In a closed loop
callers react. A request that follows another comes `think_seconds` after that one's completion has
ended, or was refused. Only requests that follow none come when the trace says. Knows neither the
scheduler nor how figures are made of records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from heapq import heapify, heappop, heappush

import msgspec
from msgspec.structs import replace

from aioserve.errors import TraceError
from aioserve.simulation.cost import StepsOutside
from aioserve.simulation.gaps import Spread
from aioserve.traces.trace_request import TraceRequest

__all__ = [
    "Arrivals",
    "Ending",
    "RequestRecord",
    "SimulationResult",
    "SpeculationMetrics",
    "recorded_length",
]


class Ending(Enum):
    """Ways in which a request ends, simulated or sent to a server."""

    FINISHED = "finished"
    """The completion is as long as in the trace."""
    CUT_SHORT = "cut short"
    """The completion was truncated by `max_tokens`, `max_model_len` or the KV memory."""
    REFUSED = "refused"
    """The policy answered NEVER, or dropped it while it ran."""
    TOO_LONG = "too long"
    """The prompt and one more token exceed `max_model_len`, or don't fit the KV memory. The engine
    refuses such a request at once.
    """
    FAILED = "failed"
    """A measured server answered with an error, too late, or not to the end. Simulated requests
    never end like this.
    """
    OVERDUE = "overdue"
    """It hadn't ended at its deadline, and was ended there."""


class RequestRecord(msgspec.Struct, gc=False):
    """Result of one request; times in seconds on the trace's clock."""

    request: TraceRequest
    ending: Ending | None = None
    """Ending of the request; None until it has ended."""
    output_tokens: int = 0
    started_seconds: float | None = None
    """Begin of its first step."""
    first_token_seconds: float | None = None
    end_seconds: float | None = None
    wait_tokens: int | None = None
    """Tokens that steps computed for others between its arrival and its first token, or until the
    policy refused it.
    """
    cached_tokens: int = 0
    """Leading tokens that were in the cache when its first step began."""
    max_gap_seconds: float | None = None
    """Longest time between two tokens of its completion; None for fewer than two."""


class SpeculationMetrics(msgspec.Struct, frozen=True):
    """Draft tokens of a run, and the number that was right."""

    drafted_tokens: int
    """Draft tokens that steps verified."""
    accepted_tokens: int
    """Draft tokens that were right."""
    acceptance: float | None
    """Share of draft tokens that were right; None if there were none."""
    tokens_per_step: float | None
    """Mean tokens of completions that a step brought a sequence; None if no tokens came."""
    drafted: tuple[int, ...]
    """Draft tokens by their place: entry 0 counts those directly after a sequence's last token."""
    accepted: tuple[int, ...]
    """Draft tokens by place that were right, with all before them in their step."""

    @classmethod
    def of(
        cls, drafted: Sequence[int], accepted: Sequence[int], num_tokens: int, sequence_steps: int
    ) -> SpeculationMetrics:
        """Count draft tokens by place, of a run whose steps brought `num_tokens` tokens.

        `sequence_steps` counts a step once for each sequence that it brought tokens.
        """
        verified, right = sum(drafted), sum(accepted)
        return cls(
            drafted_tokens=verified,
            accepted_tokens=right,
            acceptance=right / verified if verified else None,
            tokens_per_step=num_tokens / sequence_steps if sequence_steps else None,
            drafted=tuple(drafted),
            accepted=tuple(accepted),
        )


class SimulationResult(msgspec.Struct, frozen=True):
    """Every request's record, in order of arrival, and counts of the whole run."""

    requests: tuple[RequestRecord, ...]
    page_size: int
    num_pages: int
    """Pages of the memory; if `unbounded`, as many as could ever be needed."""
    seconds: float
    """Time from the first arrival until the last request has ended and the last step is done."""
    busy_seconds: float
    """Seconds of `seconds` in steps."""
    steps: int
    tokens_computed: int
    """Tokens computed, recomputed ones of preempted requests included. With overlap, a step also
    computes one token of a completion before its end is known.
    """
    tokens_prefilled: int
    tokens_cached: int
    """Prompt tokens found in the cache, those of preempted requests that began again included."""
    preemptions: int
    policy_faults: int
    """Steps that first come, first served decided, because the policy raised or answered
    nonsense.
    """
    pages_held_mean: float
    """Pages that requests hold, averaged over the time of steps; pages of the cache alone are left
    out.
    """
    pages_held_max: int
    service_gap_tokens: int | None
    """Most by which one tenant's computed tokens ran ahead of another's while both always had
    requests waiting. See Sheng et al., "Fairness in Serving LLMs", OSDI 2024. None for fewer than
    two tenants.
    """
    unbounded: bool = False
    """True if memory had no limit."""
    gap_seconds: Spread | None = None
    """Time between consecutive tokens of a completion, over all tokens; None if no completion has
    two.
    """
    steps_outside: StepsOutside | None = None
    """Steps that the cost table was not measured for; None if the cost model is no table."""
    pages_swapped_out: int | None = None
    """Pages copied to the host; None if it has no pages."""
    pages_swapped_in: int | None = None
    speculation: SpeculationMetrics | None = None
    """Draft tokens of the run; None without a drafter."""


def recorded_length(request: TraceRequest) -> int:
    """Return the tokens of prompt and completion."""
    return request.prompt_tokens + max(1, request.output_tokens)


class Arrivals:
    """Arrivals of one run. `ordered` is the trace by arrival.

    One event loop takes requests in, one after the other. Each takes `intake_seconds` from its
    arrival, or from the intake of the one before if that is later. Raises `TraceError` if a request
    of a closed loop follows no earlier one.
    """

    def __init__(
        self,
        ordered: list[TraceRequest],
        *,
        closed_loop: bool = False,
        intake_seconds: float = 0.0,
    ) -> None:
        self._intake_seconds = intake_seconds
        self.records: list[RequestRecord] = [RequestRecord(request) for request in ordered]
        """Records of all requests, in the order of the trace."""
        self.taken_in_seconds: float = -math.inf
        """Time at which the scheduler had the last request; minus infinity before the first."""
        self._coming: list[tuple[float, int]] = []
        """Times of arrival, with places in `records`."""
        self._followers = defaultdict[int, list[int]](list)
        """Places of followers, by the number of the request that they follow."""
        seen: set[int] = set()
        for place, request in enumerate(ordered):
            if not closed_loop or request.follows is None:
                self._coming.append((request.arrival_seconds, place))
            elif request.follows in seen:
                self._followers[request.follows].append(place)
            else:
                raise TraceError(
                    f"request {request.number} follows request {request.follows}, which doesn't "
                    "come before it in the trace"
                )
            seen.add(request.number)
        heapify(self._coming)

    @property
    def next_seconds(self) -> float | None:
        """Time at which the scheduler has the next request, as far as is known now; None without
        one.
        """
        if not self._coming:
            return None
        return max(self._coming[0][0], self.taken_in_seconds) + self._intake_seconds

    def take(self, now_seconds: float) -> RequestRecord | None:
        """Return the next request, if the scheduler has it by now."""
        due = self.next_seconds
        if due is None or due > now_seconds:
            return None
        self.taken_in_seconds = due
        return self.records[heappop(self._coming)[1]]

    def ended(self, record: RequestRecord, now_seconds: float) -> None:
        """Schedule the requests that follow it, after their time to think."""
        for place in self._followers.pop(record.request.number, ()):
            request = self.records[place].request
            arrival = now_seconds + request.think_seconds
            self.records[place].request = replace(request, arrival_seconds=arrival)
            heappush(self._coming, (arrival, place))

    def by_time(self) -> tuple[RequestRecord, ...]:
        """Return all records, in the order in which their requests came."""
        return tuple(sorted(self.records, key=lambda record: record.request.arrival_seconds))
