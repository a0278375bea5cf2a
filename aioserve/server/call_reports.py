"""Log line and span of OpenTelemetry for each call that has ended.

A line goes to the logger `aioserve.access`. It is ASCII without control characters, whatever a
client sends: text of clients is written as JSON.

A span is made if OpenTelemetry's API is installed. Attributes are those of the semantic conventions
for generative AI and for HTTP. The headers of a call determine its trace. The program's propagator
reads them (`traceparent`, by default).

Nothing here reads a prompt or a completion.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from aioserve.server.call_log import CallLog
from aioserve.server.middleware import Listener
from aioserve.server.request_checks import Arrival

__all__ = ["AccessLog", "Spans"]

logger: logging.Logger = logging.getLogger("aioserve.access")

PLAIN = re.compile(r"[A-Za-z0-9_.:/{}+-]+")


class AccessLog(Listener):
    """Log of calls. POST requests, and all that were refused or failed, have the level INFO. The
    rest, like the probes of load balancers, has DEBUG."""

    def __init__(self, form: Literal["json", "key_value"]) -> None:
        self._write = _json if form == "json" else _key_value

    def ended(self, call_log: CallLog) -> None:
        failed = call_log.status is None or call_log.status >= 400
        level = logging.INFO if failed or call_log.method == "POST" else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self._write(_fields(call_log)))


def _fields(call_log: CallLog) -> dict[str, Any]:
    usage, first = call_log.usage, call_log.first_token_seconds
    reasons = call_log.finish_reasons
    return {
        "request_id": call_log.request_id,
        "call_id": call_log.call_id,
        "method": call_log.method,
        "route": call_log.route,
        "status": call_log.status,
        "whole": call_log.is_whole,
        "tenant": call_log.tenant,
        "model": call_log.model,
        "stream": call_log.stream,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "first_token_seconds": None if first is None else round(first, 6),
        "total_seconds": round(call_log.total_seconds, 6),
        "finish_reason": ",".join(sorted(set(reasons))) if reasons else None,
        "error": call_log.error,
    }


def _quoted(value: object) -> str:
    return json.dumps(value).replace("\x7f", "\\u007f")  # json leaves this ASCII character alone


def _json(fields: dict[str, Any]) -> str:
    return _quoted(fields)


def _key_value(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value if isinstance(value, str) and PLAIN.fullmatch(value) else _quoted(value)}"
        for name, value in fields.items()
        if value is not None
    )


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class Spans(Listener):
    """Spans of calls (POST), and of no other requests."""

    def __init__(self, trace: Any, propagate: Any) -> None:
        """Takes the modules `opentelemetry.trace` and `opentelemetry.propagate`."""
        self._trace = trace
        self._propagate = propagate
        self._tracer = trace.get_tracer("aioserve")

    @classmethod
    def installed(cls) -> Spans | None:
        """Return a listener; None if OpenTelemetry's API isn't installed."""
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
        arrival.call_log.span = self._tracer.start_span(
            arrival.method,
            context=self._propagate.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": arrival.method},
        )

    def ended(self, call_log: CallLog) -> None:
        span = call_log.span
        if span is None:
            return
        if span.is_recording():
            operation = OPERATIONS.get(call_log.route or "")
            if operation is not None:
                known = call_log.status == 200  # else it may be any name
                span.update_name(f"{operation} {call_log.model}" if known else operation)
            elif call_log.route is not None:
                span.update_name(f"{call_log.method} {call_log.route}")
            span.set_attributes(_attributes(call_log, operation))
            failed = call_log.status is None or call_log.status >= 500
            if failed or (call_log.error is not None and call_log.status == 200):
                span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def _attributes(call_log: CallLog, operation: str | None) -> Mapping[str, Any]:
    usage = call_log.usage
    found: dict[str, Any] = {
        "http.route": call_log.route,
        "http.response.status_code": call_log.status,
        "error.type": call_log.error
        if call_log.status is not None
        else call_log.error or "client_left",
        "aioserve.request_id": call_log.request_id,
        "aioserve.tenant": call_log.tenant,
    }
    if operation is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "aioserve"}
        found |= {"gen_ai.request.model": call_log.model, "gen_ai.request.stream": call_log.stream}
        found |= call_log.asked
    if usage is not None:
        found["gen_ai.response.model"] = call_log.model
        found["gen_ai.response.finish_reasons"] = call_log.finish_reasons or None
        found["gen_ai.response.time_to_first_chunk"] = call_log.first_token_seconds
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return {name: value for name, value in found.items() if value is not None}
