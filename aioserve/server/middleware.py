"""Middleware that every request and every answer passes.

    request ──► CallMiddleware ──► checks ──► routes ──► answer, with the headers of all answers
                  └► listeners: began, ended, exactly once each

WebSockets are refused. Errors for unknown paths and methods have the format of the API at that
path; Starlette's own are plain text. Knows nothing of what routes do.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aioserve.server.app_state import Calls
from aioserve.server.call_log import CALL_LOG, CallLog
from aioserve.server.endpoint import ErrorShape, send_json
from aioserve.server.errors import ApiError, api_error_of, busy, called
from aioserve.server.request_checks import (
    Arrival,
    Preflight,
    RequestCheck,
    given_request_id,
    path_of,
)

__all__ = ["NOT_FOUND", "CallMiddleware", "Listener"]

logger: logging.Logger = logging.getLogger(__name__)

OF_ALL_ANSWERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
OF_OTHERS_PAGES = tuple(one for one in OF_ALL_ANSWERS if one[0] != b"cross-origin-resource-policy")


class Listener:
    """Listener to calls. Its exceptions are logged, and affect no call."""

    def began(self, arrival: Arrival) -> None:
        """Hear of a request that has arrived."""

    def ended(self, call_log: CallLog) -> None:
        """Hear of the end of a call: answered, refused, failed or left by its client."""


class CallMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        checks: Sequence[RequestCheck],
        listeners: Sequence[Listener],
        shape_of: Callable[[str], ErrorShape],
        routes: Mapping[object, str],
        calls: Calls,
        max_calls: int,
    ) -> None:
        """`shape_of` gives the format of errors at a path. `routes` has the path of each endpoint
        that a scope may hold."""
        self._app = app
        self._checks = checks
        self._listeners = listeners
        self._shape_of = shape_of
        self._routes = routes
        self._calls = calls
        self._max_calls = max_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            with self._calls.request():
                await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call_log = CallLog(call_id=uuid.uuid4().hex, method=scope["method"])
        arrival = Arrival(scope, call_log)
        call_log.request_id = given_request_id(arrival.headers) or call_log.call_id
        if id_header := self._shape_of(arrival.path).id_header:
            call_log.headers.append((id_header, call_log.request_id.encode()))
        scope[CALL_LOG] = call_log
        answering = _answering(call_log, send)
        self._tell("began", arrival)
        try:
            await self._pass(arrival, receive, answering)
        except Preflight:
            await answering({"type": "http.response.start", "status": 204, "headers": []})
            await answering({"type": "http.response.body", "body": b""})
        except Exception as error:
            if call_log.status is not None:  # half of an answer has gone: the connection ends
                call_log.error = call_log.error or type(error).__name__
                raise
            if not isinstance(error, ApiError):
                logger.error("call %s failed", call_log.request_id, exc_info=error)
            await self._refuse(arrival, api_error_of(error), answering)
        finally:
            call_log.total_seconds = time.perf_counter() - call_log.began_seconds
            call_log.route = self._routes.get(scope.get("endpoint"))
            self._tell("ended", call_log)

    async def _pass(self, arrival: Arrival, receive: Receive, send: Send) -> None:
        for check in self._checks:
            check.check(arrival)
        if any(char < " " for char in arrival.path):
            # Routes also match a path that ends with a line end, which checks take for another
            # path.
            raise ApiError(404, "there is no such path", code="not_found")
        is_full = arrival.is_call and self._calls.num_posted >= self._max_calls
        if is_full and not self._calls.end_oldest_body():
            raise busy(self._max_calls)
        with self._calls.running(posted=True) if arrival.is_call else nullcontext():
            await self._app(arrival.scope, receive, send)

    async def _refuse(self, arrival: Arrival, error: ApiError, send: Send) -> None:
        """Send an error. The body is left unread: if one comes, the server ends the connection."""
        arrival.call_log.error = called(error)
        shape = self._shape_of(arrival.path)
        body = shape.body(error, arrival.call_log.request_id)
        await send_json(send, error.status, body, error.headers)

    def _tell(self, method: str, what: object) -> None:
        for listener in self._listeners:
            try:
                getattr(listener, method)(what)
            except Exception:
                logger.exception("%s failed in %s", type(listener).__name__, method)


async def _no_path(request: Request, _: Exception) -> Response:
    path = path_of(request.scope)
    raise ApiError(404, f"there is nothing at {path!r:.300}", code="not_found")


async def _no_method(request: Request, _: Exception) -> Response:
    """Refuse a method. Starlette would list the methods of only the first route with the path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in here for method in route.methods or ()}))
    call_log: CallLog = request.scope[CALL_LOG]
    call_log.headers.append((b"allow", allowed.encode()))
    message = f"{request.method:.20} isn't served here; {allowed} is"
    raise ApiError(405, message, code="method_not_allowed")


NOT_FOUND: dict[int, Callable[[Request, Exception], Awaitable[Response]]] = {
    404: _no_path,
    405: _no_method,
}
"""Handlers in place of Starlette's own errors, which are plain text."""


def _answering(call_log: CallLog, send: Send) -> Send:
    """Wrap `send` to note the status, and to add the headers of all answers."""

    async def answering(message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            call_log.is_whole = not message.get("more_body", False)
        elif kind == "http.response.start":
            call_log.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_headers(call_log)]
        await send(message)

    return answering


def _headers(call_log: CallLog) -> list[tuple[bytes, bytes]]:
    is_shared = any(name == b"access-control-allow-origin" for name, _ in call_log.headers)
    secure = OF_OTHERS_PAGES if is_shared else OF_ALL_ANSWERS
    return [(b"x-request-id", call_log.request_id.encode()), *secure, *call_log.headers]
