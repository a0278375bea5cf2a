"""What plugins are told of requests and steps: small frozen values."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from aioserve.arguments import EMPTY_MAPPING
from aioserve.request import FinishReason, InterTokenLatency, Request

__all__ = ["RequestInfo", "RequestSummary", "StepInfo", "StepPart", "info_of"]


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    """A request whose prompt's length is known."""

    request_id: str
    tenant: str | None
    """On whose behalf it was sent, where the caller said so."""
    prompt_tokens: int
    max_tokens: int
    """Most tokens that each answer may have, whether the caller or the model limits it."""
    num_samples: int
    priority: int
    ttft_target_seconds: float | None
    tpot_target_seconds: float | None
    deadline_seconds: float | None
    arrival_seconds: float
    """When it was submitted, on the clock of the engine's event loop."""
    metadata: MappingProxyType[str, str] = EMPTY_MAPPING
    """What the caller tells of it in words of their own; read-only."""
    session_id: str | None = None
    """Which conversation or agent it is part of, where the caller said so."""
    predicted_output_tokens: int | None = None
    """How long the caller expects each answer to be, where they said so."""


def info_of(request: Request) -> RequestInfo:
    """What plugins are told of `request`."""
    return RequestInfo(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        num_samples=request.num_samples,
        priority=request.priority,
        ttft_target_seconds=request.ttft_target_seconds,
        tpot_target_seconds=request.tpot_target_seconds,
        deadline_seconds=request.deadline_seconds,
        arrival_seconds=request.arrival_seconds,
        metadata=request.metadata,
        session_id=request.session_id,
        predicted_output_tokens=request.predicted_output_tokens,
    )


class StepPart(msgspec.Struct, frozen=True, gc=False):
    """What a step computed of one sequence."""

    request_id: str
    sample: int
    """Which of the request's answers the sequence is, from 0."""
    start_tokens: int
    """The KV of so many tokens was there before: cached, or computed by earlier steps."""
    num_tokens: int
    """Computed behind them."""
    num_sampled: int
    """Tokens drawn: 0 while a prompt is computed in part, several where samples begin to differ."""
    is_decode: bool
    """One token of the answer was computed, to draw the next; else tokens of the prompt were, or
    those of both that a preemption cost."""


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """A step that was committed, and the engine as it was then."""

    step: int
    end_seconds: float
    """When it was committed, on the clock of the engine's event loop."""
    num_sequences: int
    computed_tokens: int
    num_preempted: int
    """Sequences that gave their pages back while it was planned."""
    failed: bool
    """It raised, and the requests in it ended with `StepError`."""
    num_running: int
    num_waiting: int
    pages_free: int
    pages_cached: int
    """Held by the prefix cache alone."""
    pages_fenced: int = 0
    """Given back, and free as soon as the step in flight is done."""
    pages_held_by_requests: int = 0
    begin_seconds: float = 0.0
    """When it was launched, or the step before it ended, on the same clock."""
    parts: tuple[StepPart, ...] = ()
    """In batch order; those of requests that have ended meanwhile are left out."""
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
    """Tokens of all its samples together."""
    first_token_seconds: float | None
    """From its arrival; None if it had no token."""
    total_seconds: float
    """From its arrival."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it started."""
    encoding_seconds: float | None = None
    """This and what follows is in the `Timings` of its caller too."""
    queued_seconds: float | None = None
    inter_token_latency: InterTokenLatency | None = None
    preemptions: int = 0
    device_seconds: float = 0.0
    arrival_seconds: float = 0.0
    """That of its `RequestInfo`."""
