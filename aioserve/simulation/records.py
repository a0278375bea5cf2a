"""Results of a simulated trace: a record of each request, and counts over all steps.

Plain values; knows neither the scheduler nor how figures are made of them.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from aioserve.simulation.spread import Spread
from aioserve.simulation.table_steps import StepsOutside
from aioserve.traces.request import TraceRequest

__all__ = ["Ending", "RequestRecord", "SimulationResult", "recorded_length"]


class Ending(Enum):
    """Ways in which a simulated request ends."""

    FINISHED = "finished"
    """The completion is as long as in the trace."""
    CUT_SHORT = "cut short"
    """The completion was truncated: it was as long as `max_tokens`, `max_model_len` or the KV
    memory allows before its end."""
    REFUSED = "refused"
    """The policy answered NEVER, or dropped it while it ran."""
    TOO_LONG = "too long"
    """The prompt and one more token are more than `max_model_len`, or don't fit the KV memory: the
    engine refuses such a request at once."""


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
    policy refused it."""
    cached_tokens: int = 0
    """Leading tokens that were in the cache when its first step began."""
    max_gap_seconds: float | None = None
    """Longest time between two tokens of its completion; None where it has fewer than two."""


class SimulationResult(msgspec.Struct, frozen=True):
    """Every request's record, in order of arrival, and what was counted over the whole run."""

    requests: tuple[RequestRecord, ...]
    page_size: int
    num_pages: int
    """Pages of the memory; where `unbounded`, as many as could ever be needed."""
    seconds: float
    """Time from the first arrival until the last request has ended and the last step is done."""
    busy_seconds: float
    """Seconds of those in steps."""
    steps: int
    tokens_computed: int
    """Tokens computed, with those of preempted requests computed again, and the one that a step
    with overlap computes of a completion before its end is known."""
    tokens_prefilled: int
    tokens_cached: int
    """Prompt tokens found in the cache, those of preempted requests that began again included."""
    preemptions: int
    policy_faults: int
    """Steps that first come, first served decided, since the policy raised or answered nonsense."""
    pages_held_mean: float
    """Pages that requests hold, over the time of steps; what the cache alone holds is left out."""
    pages_held_max: int
    service_gap_tokens: int | None
    """Most by which the tokens computed for one client ran ahead of another's while both had
    requests waiting all the time (Sheng et al., "Fairness in Serving LLMs", OSDI 2024); None where
    the trace has fewer than two clients."""
    unbounded: bool = False
    """Whether memory had no limit."""
    gap_seconds: Spread | None = None
    """Time between one token and the next of the same completion, over all tokens that came; None
    where no completion has two."""
    steps_outside: StepsOutside | None = None
    """Steps that the cost table was not measured for; None where the cost model is no table."""
    pages_swapped_out: int | None = None
    """Pages copied to the host; None where it has none."""
    pages_swapped_in: int | None = None


def recorded_length(request: TraceRequest) -> int:
    """Tokens of prompt and completion."""
    return request.prompt_tokens + max(1, request.output_tokens)
