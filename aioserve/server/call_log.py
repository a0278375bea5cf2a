"""What is noted of one call while it lasts, for those who tell of it when it ends: metrics, logs
and spans.

Knows neither of them, and never keeps what a prompt or an answer says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import astuple

from aioserve.request import FinishReason, Usage
from aioserve.timings import Timings

__all__ = ["CALL_LOG", "CallLog", "Counted", "sum_of"]

CALL_LOG = "aioserve.call"
"""Where the scope of a request has its `CallLog`."""
MAX_MODEL_CHARS = 256
ASKED = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "n": "gen_ai.request.choice.count",
    "seed": "gen_ai.request.seed",
}
"""Fields of a body that are numbers, and say how the answer is drawn, and what OpenTelemetry calls
them."""


class Counted(Protocol):
    """A stream of the engine."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def finish_reasons(self) -> Sequence[FinishReason | None]: ...


def sum_of(usages: Sequence[Usage]) -> Usage:
    if len(usages) == 1:
        return usages[0]
    return Usage(*[sum(counts) for counts in zip(*map(astuple, usages), strict=True)])


@dataclass(slots=True, kw_only=True, eq=False)
class CallLog:
    """What is noted of one request over HTTP: each part that learns something writes it here."""

    call_id: str = ""
    """Unique, whatever its client calls it: for ids of answers."""
    request_id: str = ""
    """What its client calls it, or else the same."""
    method: str = ""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Which its answer has beside its own."""
    began_seconds: float = field(default_factory=time.perf_counter)
    total_seconds: float = 0.0
    """Set at its end."""
    tenant: str | None = None
    """Name of the key that it came with."""
    cache_salt: str | None = None
    """Salt of that key: cached prefixes are shared with calls of the same salt alone."""
    route: str | None = None
    """As it is written in the app, placeholders included; None where there is none."""
    status: int | None = None
    """None until the answer begins."""
    error: str | None = None
    """Code, class or status of what went wrong."""
    is_whole: bool = False
    """All of the answer was sent; not where its client left before."""
    model: str | None = None
    """The name that was asked for: any text, up to `MAX_MODEL_CHARS`."""
    stream: bool | None = None
    asked: dict[str, int | float] = field(default_factory=dict)
    """How its answer is to be drawn, by attributes of OpenTelemetry."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Unknown fields of its messages, by where they were."""
    hints: dict[str, int] = field(default_factory=dict)
    """Fields of its body that were let through and change nothing, by their names."""
    span: Any = None
    """Span of the tracer, where there is one."""
    streams: list[Counted] = field(default_factory=list)
    """Requests to the engine, which are read when the call has ended, however it ends."""
    counts: list[Usage] = field(default_factory=list)
    """Tokens of what has no stream."""

    def goes_by(self, request_id: str) -> None:
        """Take what its body calls it, where its head didn't say."""
        if self.request_id == self.call_id:
            self.request_id = request_id

    def asks(self, body: object) -> None:
        """Note which model it asks for, and how the answer is to be drawn."""
        model, stream = getattr(body, "model", None), getattr(body, "stream", None)
        self.model = model[:MAX_MODEL_CHARS] if isinstance(model, str) else None
        self.stream = stream if isinstance(stream, bool) else None
        for name, attribute in ASKED.items():
            value = getattr(body, name, None)
            if isinstance(value, int | float):
                self.asked[attribute] = value

    @property
    def usage(self) -> Usage | None:
        """Tokens of all requests to the engine together; None where there was none."""
        counts = [*self.counts, *[stream.usage for stream in self.streams]]
        return sum_of(counts) if counts else None

    @property
    def first_token_seconds(self) -> float | None:
        """The first of any of them, since that was submitted."""
        times = [stream.timings.first_token_seconds for stream in self.streams]
        return min((each for each in times if each is not None), default=None)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Reasons of the samples that have come to an end."""
        reasons = [reason for stream in self.streams for reason in stream.finish_reasons]
        return tuple([str(reason) for reason in reasons if reason is not None])
