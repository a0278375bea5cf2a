"""What is noted of one call while it lasts, for those who tell of it when it ends: metrics, logs
and spans.

Knows neither of them, and never keeps what a prompt or an answer says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from aioserve.request import FinishReason, Timings, Usage

__all__ = ["Answered", "CallLog"]

MAX_MODEL_CHARS = 256
ASKED = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
)
"""Fields of a body that are numbers, and say how the answer is drawn."""


@runtime_checkable
class Answered(Protocol):
    """A stream of the engine, or an answer that is whole."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...


class CallLog:
    """What is noted of one request over HTTP: each part that learns something writes it here."""

    __slots__ = (
        "_answers",
        "_counts",
        "asked",
        "began_seconds",
        "cache_salt",
        "call_id",
        "dropped",
        "error",
        "headers",
        "is_whole",
        "method",
        "model",
        "request_id",
        "route",
        "span",
        "status",
        "stream",
        "tenant",
        "total_seconds",
    )

    def __init__(self, call_id: str = "", request_id: str | None = None, method: str = "") -> None:
        self.call_id: str = call_id
        """Unique in this process."""
        self.request_id: str = call_id if request_id is None else request_id
        """What its client calls it, or else the same."""
        self.method: str = method
        self.headers: list[tuple[bytes, bytes]] = []
        """Which its answer has beside its own."""
        self.began_seconds: float = time.perf_counter()
        self.total_seconds: float = 0.0
        """Set at its end."""
        self.tenant: str | None = None
        """Name of the key that it came with."""
        self.cache_salt: str | None = None
        """Salt of that key: cached prefixes are shared with calls of the same salt alone."""
        self.route: str | None = None
        """As it is written in the app, placeholders included; None where there is none."""
        self.status: int | None = None
        """None until the answer begins."""
        self.error: str | None = None
        """Code, class or status of what went wrong."""
        self.is_whole: bool = False
        """All of the answer was sent; not where its client left before."""
        self.model: str | None = None
        """The name that was asked for: any text, up to `MAX_MODEL_CHARS`."""
        self.stream: bool | None = None
        self.asked: dict[str, int | float] = {}
        self.dropped: Mapping[str, int] = {}
        """Unknown fields of its messages, by where they were."""
        self.span: Any = None
        """Span of the tracer, where there is one."""
        self._answers: list[Answered] = []
        self._counts: list[Usage] = []

    def goes_by(self, request_id: str) -> None:
        """Take what its body calls it, where its head didn't say."""
        if self.request_id == self.call_id:
            self.request_id = request_id

    def asks(self, body: object) -> None:
        """Note which model it asks for, and how the answer is to be drawn."""
        model, stream = getattr(body, "model", None), getattr(body, "stream", None)
        self.model = model[:MAX_MODEL_CHARS] if isinstance(model, str) else None
        self.stream = stream if isinstance(stream, bool) else None
        for name in ASKED:
            value = getattr(body, name, None)
            if isinstance(value, int | float):
                self.asked[name] = value

    def answers_with(self, answer: object) -> None:
        """Note a stream, or a whole answer, of the engine, or what one counted; several add up, one
        that is noted twice counts once. Nothing is noted of what is none of these. It is read when
        the call has ended, however it ends."""
        if isinstance(answer, Usage):
            self._counts.append(answer)
        elif isinstance(answer, Answered) and not any(answer is known for known in self._answers):
            self._answers.append(answer)

    @property
    def usage(self) -> Usage | None:
        """Tokens of all requests to the engine together; None where there was none."""
        counts = [*self._counts, *[answer.usage for answer in self._answers]]
        if not counts:
            return None
        return Usage(
            prompt_tokens=sum(count.prompt_tokens for count in counts),
            completion_tokens=sum(count.completion_tokens for count in counts),
            cached_tokens=sum(count.cached_tokens for count in counts),
        )

    @property
    def first_token_seconds(self) -> float | None:
        """The first of any of them, since that was submitted."""
        times = [answer.timings.first_token_seconds for answer in self._answers]
        return min((each for each in times if each is not None), default=None)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Reasons of the samples that have come to an end."""
        reasons = [reason for answer in self._answers for reason in _reasons_of(answer)]
        return tuple([str(reason) for reason in reasons if reason is not None])


def _reasons_of(answer: object) -> Sequence[FinishReason | None]:
    samples: Sequence[Any] | None = getattr(answer, "samples", None)
    if samples is not None and isinstance(answer, msgspec.Struct):
        return [sample.finish_reason for sample in samples]
    return getattr(answer, "finish_reasons", ())
