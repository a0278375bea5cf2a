"""A span of OpenTelemetry for each call, where its API is installed.

Attributes are those of the semantic conventions for generative AI and for HTTP. They hold numbers
and names, and no text of prompts and answers. Whose trace a call belongs to is what its headers
say, as the propagator that the program has set reads them (`traceparent`, by default).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioserve.server.record import CallRecord
from aioserve.server.request_checks import Arrival

__all__ = ["Spans"]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
ASKED = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "n": "gen_ai.request.choice.count",
    "seed": "gen_ai.request.seed",
}


class Spans:
    """Of calls, and of nothing else that is asked for."""

    def __init__(self, trace: Any, propagate: Any) -> None:
        """`opentelemetry.trace` and `opentelemetry.propagate`."""
        self._trace = trace
        self._propagate = propagate
        self._tracer = trace.get_tracer("aioserve")

    @classmethod
    def installed(cls) -> Spans | None:
        """None where OpenTelemetry's API isn't."""
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return None
        return cls(trace, propagate)

    def began(self, arrival: Arrival) -> None:
        if not arrival.is_call:
            return
        carrier = {
            name.decode("latin-1"): values[0].decode("latin-1")
            for name, values in arrival.headers.items()
        }
        arrival.told.span = self._tracer.start_span(
            arrival.method,
            context=self._propagate.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": arrival.method},
        )

    def ended(self, told: CallRecord) -> None:
        span = told.span
        if span is None:
            return
        if span.is_recording():
            operation = OPERATIONS.get(told.route or "")
            if operation is not None:
                known = told.status == 200  # else it may be any name
                span.update_name(f"{operation} {told.model}" if known else operation)
            elif told.route is not None:
                span.update_name(f"{told.method} {told.route}")
            span.set_attributes(_attributes(told, operation))
            failed = told.status is None or told.status >= 500
            if failed or (told.error is not None and told.status == 200):
                span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def _attributes(told: CallRecord, operation: str | None) -> Mapping[str, Any]:
    usage = told.usage
    found: dict[str, Any] = {
        "http.route": told.route,
        "http.response.status_code": told.status,
        "error.type": told.error if told.status is not None else told.error or "client_left",
        "aioserve.request_id": told.request_id,
        "aioserve.tenant": told.tenant,
    }
    if operation is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "aioserve"}
        found |= {"gen_ai.request.model": told.model, "gen_ai.request.stream": told.stream}
        found |= {ASKED[name]: value for name, value in told.asked.items()}
    if usage is not None:
        found["gen_ai.response.model"] = told.model
        found["gen_ai.response.finish_reasons"] = told.finish_reasons or None
        found["gen_ai.response.time_to_first_chunk"] = told.first_token_seconds
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return {name: value for name, value in found.items() if value is not None}
