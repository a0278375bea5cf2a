"""HTTP/1.1 under uvicorn: one request at a time on each connection, and bounded buffers.

A client may send a request while an earlier one is being answered. Then uvicorn stops reading the
connection until the answer ends. It misses a disconnect, and the engine computes for nobody. No
client in use does this. The connection is closed, which cancels its request.

A parser keeps an incomplete head in memory, and trailers and chunk extensions too. All bytes of a
request other than its body are counted as they arrive, before the app sees them.

A client could keep its connection open until no other finds room. So a connection is closed if no
request begins, if the headers don't end, or if the client reads nothing of its answer. It is also
closed if the answer began before the whole request had arrived.
"""

from __future__ import annotations

import logging
import uuid
from asyncio import AbstractEventLoop, Protocol, TimerHandle, Transport
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aioserve.config import EngineConfig
from aioserve.server.app_state import AppState
from aioserve.server.descriptors import DescriptorWatch
from aioserve.server.errors import ApiError
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.outgoing import Outgoing
from aioserve.server.settings import ServerSettings

__all__ = ["http_protocol"]

logger: logging.Logger = logging.getLogger(__name__)

HEADERS_SECONDS = 60.0
"""Seconds until headers must be complete, from the start of a connection or of the next request."""
CHUNK_BYTES = 20
"""Bytes of framing credited to each chunk, for its size and line ends: chunks may be small."""
CLOSE = (b"connection", b"close")


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each connection of one server."""

    max_header_bytes: int
    """`ServerSettings.max_header_bytes`, which error messages quote."""
    max_envelope_bytes: int
    """Most bytes of a request without its body: request line, headers, framing and trailers."""
    stall_seconds: float
    """Seconds in which a client may read nothing before its connection is aborted."""
    descriptors: DescriptorWatch


def http_protocol(app: Starlette | None = None) -> type[Protocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`, which parses with httptools, or
    else h11.

    `app` is the result of `create_app`; its settings and engine give the limits. None uses
    defaults.
    """
    settings, stall_seconds = ServerSettings(), EngineConfig().stall_timeout_seconds
    if app is not None:
        app_state: AppState = app.state.app_state
        settings, stall_seconds = app_state.settings, app_state.engine.config.stall_timeout_seconds
    # Method, version and separators don't count towards the setting.
    beside = 64 + 4 * settings.max_headers
    limits = ConnectionLimits(
        max_header_bytes=settings.max_header_bytes,
        max_envelope_bytes=settings.max_header_bytes + beside,
        stall_seconds=stall_seconds,
        descriptors=DescriptorWatch(),
    )
    try:
        return _with_httptools(limits)
    except ImportError:
        return _with_h11(limits)


if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _UvicornProtocol
else:
    _UvicornProtocol = object


class _OneAtATime(_UvicornProtocol):
    """Common part of both protocols, which comes before uvicorn's own in the order of bases."""

    _limits: ConnectionLimits
    _overdue: TimerHandle | None = None
    _has_ended = False
    """True once nothing more is read from this connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inner: ASGIApp = self.app
        self.app = self._serve

    def connection_made(self, transport: Transport) -> None:
        loop: AbstractEventLoop = self.loop
        self._out = Outgoing(transport, loop, stall_seconds=self._limits.stall_seconds)
        super().connection_made(self._out)
        self._await_head()
        if (connection := transport.get_extra_info("socket")) is not None:
            self._limits.descriptors.taken(connection.fileno(), loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_head()
        self._out.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for piece in _pieces(data, self._limits.max_envelope_bytes):
            if self._out.drops(len(piece)) or self._has_ended or self._out.is_closing():
                continue
            self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        super().data_received(piece)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app. A response that begins before the whole request has arrived closes the
        connection: the rest would be taken for a new request."""
        cycle = self.cycle

        async def sending(message: Message) -> None:
            begins = message["type"] == "http.response.start"
            if begins and (cycle.more_body or self._has_ended):
                self._out.lingers = True
                headers = list(message.get("headers", ()))
                message["headers"] = headers if CLOSE in headers else [*headers, CLOSE]
            await send(message)

        await self._inner(scope, receive, sending)

    def _await_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(HEADERS_SECONDS, self.transport.abort)

    def _await_no_head(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse_envelope(self) -> None:
        limit = self._limits.max_header_bytes
        message = f"path, headers and trailers have more than {limit} bytes, as many as are read"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the app, and tell the app that its client has disconnected."""
        if self._out.is_closing():
            return
        self._has_ended = True
        cycle, is_free = self.cycle, True
        if cycle is not None and not cycle.response_complete:
            is_free = not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if not is_free:
            self._out.abort()
            return
        logger.info("a connection was refused: %s", error)
        self._await_no_head()
        self._unset_keepalive_if_required()
        self._out.write(_raw(error))
        self._out.lingers = True
        self._out.close()

    def shutdown(self) -> None:
        if self._out.is_closing():
            self._out.close()
        else:
            super().shutdown()


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    if len(data) <= size:
        yield data
        return
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def _raw(error: ApiError) -> bytes:
    """Whole response of an error, in the format of the OpenAI API."""
    call_id = uuid.uuid4().hex
    body = msgspec.json.encode(OPENAI_ERRORS.body(error, call_id))
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {call_id}",
        "x-content-type-options: nosniff",
        "connection: close",
    ]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def _with_httptools(limits: ConnectionLimits) -> type[Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class OneAtATime(_OneAtATime, HttpToolsProtocol):
        _limits = limits
        _has_head = False
        _envelope_bytes = 0
        """Bytes so far of the arriving request, without its body."""
        _credit_bytes = 0
        """Bytes of the piece being parsed that are body or framing of chunks."""
        _is_whole = False
        """True if the piece being parsed held the end of a request."""

        def _feed(self, piece: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            self._credit_bytes, self._is_whole = 0, False
            super()._feed(piece)
            # Credit for small chunks must not make room for later bytes.
            left = max(0, self._envelope_bytes + len(piece) - self._credit_bytes)
            self._envelope_bytes = 0 if self._is_whole else left
            if self._envelope_bytes > limits.max_envelope_bytes:
                self._refuse_envelope()

        def on_message_begin(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()
                raise ConnectionAbortedError("a request came while one was being answered")
            self._has_head = False
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # After the head it is a trailer, which must not replace a header.
            if not self._has_head:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._has_head = True
            self._await_no_head()
            super().on_headers_complete()

        def on_chunk_header(self) -> None:
            self._credit_bytes += CHUNK_BYTES

        def on_body(self, body: bytes) -> None:
            self._credit_bytes += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._is_whole = True
            super().on_message_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """Read no more: the parser takes what follows for another protocol. Refuse a request
            with a body, which would be lost, or taken for the next request."""
            self._has_ended = True
            headers = dict(self.headers)
            if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
                self._refuse(
                    ApiError(
                        400,
                        "a request with Upgrade must have no body, which can't be told from what "
                        "another protocol would send",
                        code="upgrade_not_supported",
                    )
                )

    return OneAtATime


def _with_h11(limits: ConnectionLimits) -> type[Protocol]:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    # h11 exports only the other states.
    answered = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # pyright: ignore[reportPrivateImportUsage]

    class OneAtATimeH11(_OneAtATime, H11Protocol):
        _limits = limits

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.conn = h11.Connection(h11.SERVER, limits.max_envelope_bytes)

        def _feed(self, piece: bytes) -> None:
            if self.conn.their_state is h11.IDLE:
                self._await_head()
            super()._feed(piece)
            if self.conn.their_state is not h11.IDLE:
                self._await_no_head()
            if self.conn.their_state is answered[1]:  # by a request with Upgrade
                self._has_ended = True
            if self.conn.their_state in answered and self.conn.trailing_data[0]:
                self.transport.abort()  # a request came while one was being answered

        def send_400_response(self, msg: str) -> None:
            if len(self.conn.trailing_data[0]) > limits.max_envelope_bytes:
                self._refuse_envelope()
            else:
                super().send_400_response(msg)

    return OneAtATimeH11
