"""Record of a simulated run, step by step, for charts: only on request.

Knows neither metrics nor how charts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.steps.plan import StepPlan

__all__ = ["Preempted", "Span", "StepSample", "Timeline"]


class StepSample(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step; times in seconds on the trace's clock."""

    began_seconds: float
    ended_seconds: float
    waiting: int
    """Requests that wait while it runs."""
    running: int
    prefill_tokens: int
    """Tokens of prompts, and of completions that are computed again after a preemption."""
    decode_tokens: int
    """One token for each sequence that goes on with its completion."""
    pages_held: int
    """Pages held by requests."""
    pages_cached: int
    """Pages held by the prefix cache alone: they can be evicted."""


class Span(msgspec.Struct, gc=False):
    """Time in which steps computed tokens of one request: one chunk of prefill, or consecutive
    decoding steps.
    """

    request: int
    """Number of the request in the trace."""
    decodes: bool
    began_seconds: float
    ended_seconds: float
    tokens: int
    last_step: int
    """Number of the last step in it."""


class Preempted(msgspec.Struct, frozen=True, gc=False):
    request: int
    seconds: float


class Timeline:
    """The steps of one run. Pass an empty one to `simulate`, which fills it."""

    def __init__(self) -> None:
        self.steps: list[StepSample] = []
        self.spans: list[Span] = []
        """Spans in the order in which they began."""
        self.preemptions: list[Preempted] = []
        self.token_gaps: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] = (
            np.empty(0, np.float64),
            np.empty(0, np.int64),
        )
        """Seconds between two tokens of one completion, in no order, and the count of each; known
        when the run has ended.
        """
        self._decoding: dict[int, Span] = {}
        """The last decoding span of each request."""

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return one field of every step: float64 `[len(self)]`."""
        return np.array([getattr(step, name) for step in self.steps], np.float64)

    def add(
        self,
        plan: StepPlan,
        *,
        requests: Sequence[int],
        decodes: Sequence[bool],
        preempted: Sequence[int],
        began_seconds: float,
        ended_seconds: float,
        waiting: int,
        running: int,
        pages_held: int,
        pages_cached: int,
    ) -> None:
        """Record one step.

        `requests` and `decodes` are aligned with the plan's items: the request's number in the
        trace, and True if it goes on with a completion. Numbers of requests that gave their pages
        back are in `preempted`.
        """
        prefill = decode = 0
        step, spans, decoding = plan.step, self.spans, self._decoding
        for item, request, goes_on in zip(plan.items, requests, decodes, strict=True):
            if goes_on:
                decode += item.count
                span = decoding.get(request)
                if span is not None and span.last_step == step - 1:
                    span.ended_seconds = ended_seconds
                    span.tokens += item.count
                    span.last_step = step
                    continue
            else:
                prefill += item.count
            span = Span(request, goes_on, began_seconds, ended_seconds, item.count, step)
            spans.append(span)
            if goes_on:
                decoding[request] = span
        self.preemptions += [Preempted(request, began_seconds) for request in preempted]
        self.steps.append(
            StepSample(
                began_seconds=began_seconds,
                ended_seconds=ended_seconds,
                waiting=waiting,
                running=running,
                prefill_tokens=prefill,
                decode_tokens=decode,
                pages_held=pages_held,
                pages_cached=pages_cached,
            )
        )
