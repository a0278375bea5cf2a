"""Observers and admission checks of an engine: what they are told and asked.

Observers are told what happened in batches, after a step was committed and never per token. An
observer that keeps failing is detached. The first admission check that refuses a request decides.
Must not know the engine or a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from aioserve.arguments import MadeByNames
from aioserve.errors import RequestRejectedError
from aioserve.hints import SchedulingHints
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault
from aioserve.request import FinishReason, Request
from aioserve.scheduling.policy import Refusal
from aioserve.timings import InterTokenLatency

__all__ = [
    "MAX_FAILURES",
    "Admission",
    "Observer",
    "Observers",
    "RequestInfo",
    "RequestSummary",
    "StepInfo",
    "StepPart",
    "info_of",
    "refusal_of",
]


logger: logging.Logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failures in a row in the same method after which an observer is detached."""


class RequestInfo(SchedulingHints, frozen=True, kw_only=True, gc=False, metaclass=MadeByNames):
    """A request with a prompt of known length, and the caller's hints."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    """Most tokens of each completion, from the caller's or the model's limit."""
    num_samples: int
    arrival_seconds: float
    """Time of its submission, in seconds on the clock of the engine's event loop."""


def info_of(request: Request) -> RequestInfo:
    """Make the info of `request` for plugins."""
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
    """Tokens computed after these."""
    num_sampled: int
    """Tokens drawn: 0 while a prompt is computed in part. Several when samples begin to differ, or
    draft tokens were right."""
    is_decode: bool
    """True if the last token of the completion was computed, with any draft tokens after it. False
    if tokens of the prompt were, or tokens lost in a preemption."""


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """A step that was committed, and the state of the engine then."""

    step: int
    end_seconds: float
    """Time of its commit, in seconds on the clock of the engine's event loop."""
    num_sequences: int
    computed_tokens: int
    num_preempted: int
    """Sequences that gave their pages back while the step was planned."""
    failed: bool
    """True if it raised, so that the requests in it ended with `StepError`."""
    num_running: int
    num_waiting: int
    pages_free: int
    pages_cached: int
    """Pages that only the prefix cache holds."""
    pages_fenced: int = 0
    """Pages released. They are free as soon as the step in flight is done."""
    pages_held_by_requests: int = 0
    begin_seconds: float = 0.0
    """Time when it was launched or the previous step ended, whichever is later, on the same
    clock."""
    parts: tuple[StepPart, ...] = ()
    """Parts in batch order, without those of requests that have ended meanwhile."""
    preempted: tuple[tuple[str, int], ...] = ()
    """Request id and sample number of each sequence that gave its pages back and goes on."""


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
    """Seconds from its arrival to its first token; None without one."""
    total_seconds: float
    """Seconds from its arrival to its end."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it started."""
    encoding_seconds: float | None = None
    """Seconds of encoding. This and the fields below are in the `Timings` of its caller too."""
    queued_seconds: float | None = None
    inter_token_latency: InterTokenLatency | None = None
    preemptions: int = 0
    device_seconds: float = 0.0
    arrival_seconds: float = 0.0
    """Time of its arrival, as in its `RequestInfo`."""


class Observer:
    """Watches one engine. Override what matters; the defaults do nothing.

    Methods are plain and synchronous and run on the event loop between steps: keep them quick.
    """

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        """Called when these requests have entered the queue."""

    def step_finished(self, step: StepInfo) -> None:
        """Called when a step was committed."""

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        """Called when these requests have ended, for any reason."""


class Observers:
    """Observers of one engine. False if there are none."""

    def __init__(self) -> None:
        self._attached: list[ObserverCalls] = []
        self.watch_steps: bool = False
        """True if an observer overrides `step_finished`."""

    def attach(self, observer: Observer, label: str) -> None:
        """Attach an observer. `label` names it and its distribution in the log."""
        self._become([*self._attached, ObserverCalls(observer, label)])

    def detach(self, observer: Observer) -> None:
        """Tell an observer nothing more. Does nothing if it isn't attached."""
        self._become([one for one in self._attached if one.observer is not observer])

    def _become(self, attached: list[ObserverCalls]) -> None:
        self._attached = attached
        self.watch_steps = any(one.watches_steps for one in attached)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the attached observers."""
        return tuple(attached.name for attached in self._attached)

    def __bool__(self) -> bool:
        return bool(self._attached)

    def tell(
        self,
        arrived: Sequence[RequestInfo],
        step: StepInfo | None,
        finished: Sequence[RequestSummary],
    ) -> None:
        """Pass on what happened since the last call, to every observer in this order. Empty
        arguments are skipped."""
        told = {"arrived": tuple(arrived), "step_finished": step, "finished": tuple(finished)}
        for attached in self._attached:
            for method, what in told.items():
                if what:
                    attached.tell(method, what)
        self._become([attached for attached in self._attached if not attached.given_up])


class ObserverCalls(PluginCalls):
    """Tells one observer, until one of its methods has failed too often in a row."""

    def __init__(self, observer: Observer, name: str) -> None:
        super().__init__(f"observer {name}", f"{MAX_FAILURES} in a row detach it", logger)
        self.name = name
        self.given_up: bool = False
        self.observer = observer
        own = getattr(observer.step_finished, "__func__", None)
        self.watches_steps: bool = own is not Observer.step_finished
        self._failures: dict[str, int] = {}

    def tell(self, method: str, report: object) -> None:
        if self.given_up:
            return
        try:
            self.call(method, lambda: getattr(self.observer, method)(report))
            self._failures[method] = 0
        except PluginFault:
            self._failures[method] = self._failures.get(method, 0) + 1
            if self._failures[method] == MAX_FAILURES:
                self.given_up = True
                logger.error(
                    "%s is detached: %s raised %d times in a row", self.label, method, MAX_FAILURES
                )


def refusal_of(ask: Callable[[RequestInfo], object], request: RequestInfo) -> Refusal | None:
    """Return the answer of an `aioserve_admit`. Raises `NotAnAnswer`, and anything that it
    raises."""
    answer = ask(request)
    if answer is None:
        return None
    if isinstance(answer, Refusal):  # of any class, and its reason of any class of str
        return Refusal.plain(answer)
    raise NotAnAnswer(answer, "neither a Refusal nor None")


class Admission:
    """Checks of one engine: label and `aioserve_admit` of each plugin, in the order of asking."""

    def __init__(self, checks: Iterable[tuple[str, Callable[[RequestInfo], object]]] = ()) -> None:
        self._checks = [
            (PluginCalls(f"plugin {label}", "the request is refused", logger), ask)
            for label, ask in checks
        ]

    def check(self, request: RequestInfo) -> None:
        """Raise `RequestRejectedError` if a check refuses, and also if it has a fault: a broken
        quota check must not open the door."""
        name = f"request {request.request_id!r}"
        for calls, ask in self._checks:
            try:
                refusal = calls.call("aioserve_admit", refusal_of, ask, request)
            except PluginFault as fault:
                raise RequestRejectedError(
                    f"{name} can't be admitted: {fault}",
                    refused_by=calls.label,
                    reason=None,
                    retry_after_seconds=None,
                ) from fault.__cause__
            if refusal is not None:
                raise RequestRejectedError(
                    f"{calls.label} refused {name}: {refusal.reason}",
                    refused_by=calls.label,
                    reason=refusal.reason,
                    retry_after_seconds=refusal.retry_after_seconds,
                )
