"""Record of one call while it lasts. Metrics, logs and spans read it when the call ends.

Never holds text of a prompt or an answer.
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
"""Key of the `CallLog` in a request's scope."""
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
"""OpenTelemetry's names of the numeric fields of a body that control sampling."""


class Counted(Protocol):
    """Stream of the engine, with its counts and times."""

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
    """Record of one HTTP request. Each part of the server writes what it learns."""

    call_id: str = ""
    """Unique id made here, for ids of answers."""
    request_id: str = ""
    """Id that the client gave, or else `call_id`."""
    method: str = ""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers of the answer, added to its own."""
    began_seconds: float = field(default_factory=time.perf_counter)
    total_seconds: float = 0.0
    """Set when the call ends."""
    tenant: str | None = None
    """Name of the API key that it came with."""
    cache_salt: str | None = None
    """Salt of that key. Only calls with the same salt share cached prefixes."""
    route: str | None = None
    """Path of the route as written in the app, with placeholders; None if no route matches."""
    status: int | None = None
    """HTTP status; None until the answer begins."""
    error: str | None = None
    """Code, class or status of the error."""
    is_whole: bool = False
    """True once all of the answer is sent. It stays false if the client left before."""
    model: str | None = None
    """Name of the requested model: any text, up to `MAX_MODEL_CHARS`."""
    stream: bool | None = None
    asked: dict[str, int | float] = field(default_factory=dict)
    """Sampling fields of the body, by attributes of OpenTelemetry."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of unknown fields of messages, by place."""
    hints: dict[str, int] = field(default_factory=dict)
    """Number of fields that were accepted without effect, by name."""
    span: Any = None
    """Span of the tracer, if there is one."""
    streams: list[Counted] = field(default_factory=list)
    """Requests to the engine, read when the call has ended, however it ended."""
    counts: list[Usage] = field(default_factory=list)
    """Tokens of requests without a stream."""

    def goes_by(self, request_id: str) -> None:
        """Take the id in the body, unless the head gave one."""
        if self.request_id == self.call_id:
            self.request_id = request_id

    def asks(self, body: object) -> None:
        """Note the requested model and the sampling fields of `body`."""
        model, stream = getattr(body, "model", None), getattr(body, "stream", None)
        self.model = model[:MAX_MODEL_CHARS] if isinstance(model, str) else None
        self.stream = stream if isinstance(stream, bool) else None
        for name, attribute in ASKED.items():
            value = getattr(body, name, None)
            if isinstance(value, int | float):
                self.asked[attribute] = value

    @property
    def usage(self) -> Usage | None:
        """Tokens of all requests to the engine together; None if there were none."""
        counts = [*self.counts, *[stream.usage for stream in self.streams]]
        return sum_of(counts) if counts else None

    @property
    def first_token_seconds(self) -> float | None:
        """Shortest time to a first token among the streams, each since its submission."""
        times = [stream.timings.first_token_seconds for stream in self.streams]
        return min((each for each in times if each is not None), default=None)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons of the samples that have ended."""
        reasons = [reason for stream in self.streams for reason in stream.finish_reasons]
        return tuple([str(reason) for reason in reasons if reason is not None])
