"""Small frozen values that tell plugins of requests and steps."""

from __future__ import annotations

import msgspec

from aioserve.hints import SchedulingHints
from aioserve.request import FinishReason, InterTokenLatency, Request

__all__ = ["RequestInfo", "RequestSummary", "StepInfo", "StepPart", "info_of"]


class RequestInfo(SchedulingHints, frozen=True, kw_only=True, gc=False):
    """A request with a prompt of known length, and what the caller told of it."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    """Most tokens that each completion may have, whether the caller or the model limits it."""
    num_samples: int
    arrival_seconds: float
    """Time of its submission, on the clock of the engine's event loop."""


def info_of(request: Request) -> RequestInfo:
    """Info of `request` for plugins."""
    return RequestInfo(
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        num_samples=request.num_samples,
        arrival_seconds=request.arrival_seconds,
        **msgspec.structs.asdict(request.hints),
    )


class StepPart(msgspec.Struct, frozen=True, gc=False):
    """Part of a step: what it computed of one sequence."""

    request_id: str
    sample: int
    """Number, from 0, of the sequence among the request's completions."""
    start_tokens: int
    """Tokens with KV from before: cached, or computed by earlier steps."""
    num_tokens: int
    """Tokens computed behind them."""
    num_sampled: int
    """Tokens drawn: 0 while a prompt is computed in part, several where samples begin to differ."""
    is_decode: bool
    """Whether one token of the completion was computed, to draw the next; else tokens of the prompt
    were, or those of both that a preemption cost."""


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """A step that was committed, and the engine as it was then."""

    step: int
    end_seconds: float
    """Time of its commit, on the clock of the engine's event loop."""
    num_sequences: int
    computed_tokens: int
    num_preempted: int
    """Sequences that gave their pages back while it was planned."""
    failed: bool
    """Whether it raised, and the requests in it ended with `StepError`."""
    num_running: int
    num_waiting: int
    pages_free: int
    pages_cached: int
    """Pages held by the prefix cache alone."""
    pages_fenced: int = 0
    """Pages released, and free as soon as the step in flight is done."""
    pages_held_by_requests: int = 0
    begin_seconds: float = 0.0
    """Time when it was launched, or the step before it ended, on the same clock."""
    parts: tuple[StepPart, ...] = ()
    """Parts in batch order, without those of requests that have ended meanwhile."""
    preempted: tuple[tuple[str, int], ...] = ()
    """Request and sample of each sequence that gave its pages back and goes on."""


class RequestSummary(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended."""

    request_id: str
    tenant: str | None
    finish_reason: FinishReason
    error: str | None
    """Name and message of the error that ended it, if one did."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all its completions together."""
    first_token_seconds: float | None
    """Time from its arrival; None if it had no token."""
    total_seconds: float
    """Time from its arrival."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it started."""
    encoding_seconds: float | None = None
    """Time of encoding. This and the fields below are in the `Timings` of its caller too."""
    queued_seconds: float | None = None
    inter_token_latency: InterTokenLatency | None = None
    preemptions: int = 0
    device_seconds: float = 0.0
    arrival_seconds: float = 0.0
    """Arrival, as in its `RequestInfo`."""
