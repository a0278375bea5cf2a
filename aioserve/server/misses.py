"""Paths that there aren't, and methods that a path doesn't have: errors, as the API at that path
writes errors. Starlette's own answers are plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from aioserve.server.door import RECORD
from aioserve.server.endpoint import ErrorShape
from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import path_of
from aioserve.server.record import CallRecord

__all__ = ["misses"]

Handler = Callable[[Request, Exception], Response]


def misses(shapes: Mapping[str, ErrorShape], shape: ErrorShape) -> dict[int, Handler]:
    """Handlers for the statuses 404 and 405. `shapes` say how errors are written at which path,
    `shape` at all others."""

    def answered(request: Request, error: ApiError, headers: Mapping[str, str]) -> Response:
        record: CallRecord = request.scope[RECORD]
        record.error = error.code
        body = shapes.get(path_of(request.scope), shape).body(error, record.request_id)
        return Response(
            msgspec.json.encode(body), error.status, headers, media_type="application/json"
        )

    def no_path(request: Request, _: Exception) -> Response:
        path = path_of(request.scope)
        return answered(
            request, ApiError(404, f"there is nothing at {path!r:.300}", code="not_found"), {}
        )

    def no_method(request: Request, error: Exception) -> Response:
        headers = (error.headers if isinstance(error, HTTPException) else None) or {}
        message = f"{request.method:.20} isn't served here; {headers.get('Allow', 'another')} is"
        return answered(request, ApiError(405, message, code="method_not_allowed"), headers)

    return {404: no_path, 405: no_method}
