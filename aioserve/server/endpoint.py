"""One path of an API as an ASGI app: reads a body, calls a handler, sends its answer.

    body ──► parse ──► handle ──► a value, sent as JSON, a long one in parts
                          │    └► Events, sent one by one
       the client leaves: the handler is cancelled, and with it the request in the engine

Knows how answers are sent, and nothing of their content.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, get_type_hints

import anyio
import msgspec
from starlette.types import Message, Receive, Scope, Send

from aioserve.errors import EngineClosedError
from aioserve.server.app_state import AppState, Call
from aioserve.server.bodies import (
    ClientGone,
    NoParameters,
    check_no_body,
    parameters,
    parse,
    read_body,
)
from aioserve.server.call_log import CALL_LOG
from aioserve.server.errors import ApiError, aborted, api_error_of, busy, called
from aioserve.server.hint_fields import HintReader, let_through
from aioserve.server.json_parts import gathered, parts_of, sliced
from aioserve.server.pace import Pace

__all__ = [
    "EVENT_STREAM",
    "LINES",
    "Answer",
    "Endpoint",
    "EndpointApp",
    "ErrorShape",
    "Events",
    "Handler",
    "Streams",
    "endpoint",
    "named_event",
    "send_json",
    "shown_path",
]

logger: logging.Logger = logging.getLogger(__name__)

B = TypeVar("B")

EVENT_STREAM = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"

WHOLE_BYTES = 2**20
"""Bytes of the longest answer that is sent at once, with its length. A longer one is sent in parts
as they are made."""
BODY_BYTES_PER_UNIT = 256
"""Bytes of a body that are parsed in one unit of work."""


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Events:
    """Answer of server-sent events. Handlers make it once a request has begun well, so that a
    refusal still has a status of its own."""

    source: AsyncGenerator[bytes, None]
    """Whole events, each with its blank line. An item may hold several."""
    owner: Closable | None = None
    """Stream that the events come from. It is closed when the answer ends, however it ends."""
    kind: bytes = EVENT_STREAM
    """Media type of the content."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of this answer alone, added to those of every stream of events."""


def named_event(kind: str, data: object) -> bytes:
    """Return an event of the type `kind`, with `data` as JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


@dataclass(frozen=True, slots=True)
class Answer:
    """JSON answer with a status other than 200, or with headers of its own."""

    value: object
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Call, B], Awaitable["Events | Answer | object"]]
"""Handler that returns a value for JSON, an `Answer` or `Events`."""


def shown_path(path: str) -> str:
    """Path for display, without the converters that Starlette reads in placeholders."""
    return path.replace(":path}", "}")


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Format of an API's errors."""

    kind: type
    """Type of the value that `body` returns."""
    body: Callable[[ApiError, str], object]
    """Function that makes the JSON value of an error, with the id of its call."""
    event_kind: str | None = None
    """Type of the error event that ends a stream; None if the API's events have no types."""
    id_header: bytes | None = None
    """Header in which clients of the API look for the id of a call, besides `x-request-id`."""
    is_line: bool = False
    """True if streams are lines of JSON rather than events."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        """Error as the last event of a stream."""
        body = self.body(error, request_id)
        if self.event_kind is not None:
            return named_event(self.event_kind, body)
        if self.is_line:
            return msgspec.json.encode(body) + b"\n"
        return b"data: %b\n\n" % msgspec.json.encode(body)


Method = Literal["GET", "POST", "DELETE"]
Streams = Literal["if asked", "always"]


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    """Operation that an API offers at one path."""

    path: str
    handle: Handler[B]
    errors: ErrorShape
    summary: str
    method: Method = "GET"
    kind: type[B] | None = None
    """Type of the body, or of the parameters of path and query if the method has no body."""
    answer: Any = None
    """Type of the answer, for the description of the API."""
    has_body: bool = True
    """False for a POST without a body: `kind` is then the type of its parameters."""
    any_content_type: bool = False
    """True if a body may come without the content type of JSON, as from a bare curl."""
    streams: Streams | None = None
    """Cases in which it answers with events or lines in place of one value; None means never."""

    @property
    def media_types(self) -> tuple[str, ...]:
        """Media types of its answers, JSON first if it may answer with one value."""
        stream = (LINES if self.errors.is_line else EVENT_STREAM).decode().partition(";")[0]
        if self.streams is None:
            return ("application/json",)
        return (stream,) if self.streams == "always" else ("application/json", stream)

    @property
    def reads_body(self) -> bool:
        return self.method == "POST" and self.has_body and self.kind is not None

    @property
    def shown_path(self) -> str:
        return shown_path(self.path)


def endpoint(
    errors: ErrorShape,
    path: str,
    summary: str,
    *,
    method: Method = "GET",
    answer: Any = None,
    has_body: bool = True,
    any_content_type: bool = False,
    streams: Streams | None = None,
) -> Callable[[Handler[B]], Endpoint[B]]:
    """Decorate a handler as an endpoint. Its annotations give the type of the body or parameters,
    and the type of the answer unless `answer` does."""

    def decorated(handle: Handler[B]) -> Endpoint[B]:
        _, kind, returned = get_type_hints(handle).values()
        has_type = answer is None and returned not in (Answer, Events, object)
        kind = None if kind is type(None) else kind
        told = returned if has_type else answer
        return Endpoint(
            path, handle, errors, summary, method, kind, told, has_body, any_content_type, streams
        )

    return decorated


class EndpointApp(Generic[B]):
    """ASGI app of one endpoint."""

    def __init__(self, endpoint: Endpoint[B], app_state: AppState) -> None:
        self._endpoint = endpoint
        self._app_state = app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._app_state, scope[CALL_LOG])
        sending = _Sending(send, scope["http_version"], call.pace)
        is_counted = self._endpoint.kind is None or self._endpoint.method == "POST"
        try:
            with nullcontext() if is_counted else call.app_state.calls.running(posted=False):
                await self._answer_call(call, scope, receive, sending)
        finally:
            call.kept.end()

    async def _answer_call(
        self, call: Call, scope: Scope, receive: Receive, sending: _Sending
    ) -> None:
        try:
            if self._endpoint.method == "POST" and call.engine.state == "draining":
                raise EngineClosedError("the server drains and takes no requests", state="draining")
            body = await self._body(scope, receive, call)
        except ClientGone:
            return
        except Exception as error:
            await self._fail(sending, call, error)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            await self._answer(call, body, sending)
            group.cancel_scope.cancel()

    async def _body(self, scope: Scope, receive: Receive, call: Call) -> Any:
        kind, is_post = self._endpoint.kind, self._endpoint.method == "POST"
        if kind is None or not self._endpoint.reads_body:
            found = None
            if kind is not None or is_post:
                found = parameters(scope, kind or NoParameters)
            if is_post:
                check_no_body(scope)
            return None if kind is None else found
        parameters(scope, NoParameters)  # refuse query parameters, which nothing would read
        seconds = call.settings.body_timeout_seconds
        with call.app_state.calls.reading(call.call_log) as ended, anyio.move_on_after(seconds):
            body = await read_body(
                scope,
                receive,
                max_bytes=call.settings.max_body_bytes,
                any_content_type=self._endpoint.any_content_type,
            )
            call.pace.spend(len(body) // BODY_BYTES_PER_UNIT)
            hints = HintReader(lambda: call.facts.reasons)
            parsed = parse(body, kind, hints)
            for field, count in hints.found.items():
                let_through(call.call_log, field, count)
            return parsed
        if ended.cancelled_caught:
            raise busy(call.settings.max_concurrent_calls)
        raise ApiError(408, f"the body didn't come within {seconds:g} s", code="body_timeout")

    async def _answer(self, call: Call, body: Any, sending: _Sending) -> None:
        call.call_log.asks(body)
        try:
            # After this block, a whole answer is made, and an abort no longer stops it.
            with call.app_state.calls.ended_by_name(call.call_log) as ended:
                answer = await self._endpoint.handle(call, body)
                if isinstance(answer, Events):
                    await sending.events(answer)
                    return
            if ended.cancelled_caught:
                raise aborted()
            if isinstance(answer, Answer):
                await sending.json(answer.status, answer.value, answer.headers)
            else:
                await sending.json(200, answer)
        except Exception as error:
            await self._fail(sending, call, error)

    async def _fail(self, sending: _Sending, call: Call, error: Exception) -> None:
        refused = api_error_of(error)
        call.call_log.error = called(error)
        if refused.is_fault:
            logger.error("call %s failed", call.call_log.request_id, exc_info=error)
        shape, request_id = self._endpoint.errors, call.call_log.request_id
        if sending.has_begun:
            if not sending.is_of_events:
                raise error  # half of an answer has gone: the connection ends
            await sending.last_event(shape.event(refused, request_id))
        else:
            headers = refused.headers
            if refused.code == "draining" and sending.can_close:
                headers = headers | {"connection": "close"}
            await sending.json(refused.status, shape.body(refused, request_id), headers)


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Sending:
    """One response."""

    def __init__(self, send: Send, http_version: str, pace: Pace) -> None:
        self._send = send
        self._pace = pace
        self._knows_chunks = http_version != "1.0"
        self.can_close: bool = http_version.startswith("1")
        """True if headers may announce the end of the connection, which HTTP/2 doesn't have."""
        self.has_begun: bool = False
        self.is_of_events: bool = False

    async def json(
        self, status: int, value: object, headers: Mapping[str, str] | None = None
    ) -> None:
        most = WHOLE_BYTES if self._knows_chunks else sys.maxsize
        parts = gathered(parts_of(value), self._pace, most)
        # Values that can't be encoded raise here, before the response begins.
        first, second = await anext(parts), await anext(parts, None)
        self.has_begun = True
        async with aclosing(parts):
            if second is None:
                await _send_whole(self._send, status, first, headers)
                return
            await self._send(_start(status, _headers_of_json(headers)))
            for part in (first, second):
                await self._part(part)
            async for part in parts:
                await self._part(part)
            await self._send({"type": "http.response.body", "body": b""})

    async def events(self, events: Events) -> None:
        try:
            async with aclosing(events.source) as source:
                quiet = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
                kind = (b"content-type", events.kind)
                self.has_begun = self.is_of_events = True
                await self._send(_start(200, [kind, *quiet, *events.headers]))
                async for event in source:
                    async for part in sliced(event, self._pace):
                        await self._part(part)
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            if events.owner is not None:
                events.owner.close()

    async def last_event(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event})

    async def _part(self, part: bytes) -> None:
        """Send a part, and wait for a slow client: later parts are made only after that."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})


async def send_json(
    send: Send, status: int, value: object, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response, for a value without long parts."""
    await _send_whole(send, status, msgspec.json.encode(value), headers)


async def _send_whole(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None
) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send(_start(status, [*_headers_of_json(headers), length]))
    await send({"type": "http.response.body", "body": body})


def _headers_of_json(headers: Mapping[str, str] | None) -> list[tuple[bytes, bytes]]:
    more = [(name.encode(), text.encode("latin-1")) for name, text in (headers or {}).items()]
    return [(b"content-type", b"application/json"), *more]


def _start(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}
