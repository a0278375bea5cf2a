"""Errors of a call as its caller sees them: status, message, field and code.

The errors are the same for all APIs, and each API has its own format for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from aioserve.errors import (
    AioserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestRefusedError,
    StreamStalledError,
)

__all__ = [
    "STATUSES",
    "TYPES",
    "ApiError",
    "aborted",
    "api_error_of",
    "as_named",
    "busy",
    "called",
    "refuse",
]

DRAINING_RETRY_SECONDS = 5.0
"""Seconds after which to ask a draining server again: by then its successor may answer."""
MAX_QUEUE_RETRY_SECONDS = 60.0
"""Longest wait that a full queue suggests. A longer estimate means little: in a minute the queue
has changed."""


class ApiError(Exception):
    """Error that ends a call with a status of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status: int = status
        """HTTP status."""
        self.message: str = message
        self.param: str | None = param
        """Field of the body that is wrong."""
        self.code: str | None = code
        """Code for programs, like "context_length_exceeded"."""
        self.retry_after_seconds: float | None = retry_after_seconds
        self.details: Mapping[str, Any] | None = details
        """Facts for clients of an API that retry without the refused feature."""

    @property
    def is_fault(self) -> bool:
        """True if something broke here, unlike a full queue, a drain or a deadline."""
        return self.status == 500

    @property
    def headers(self) -> dict[str, str]:
        """Headers of this error alone, added to those of every answer."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}


def refuse(field: str, why: str, code: str | None = None) -> ApiError:
    """Return the error for a field of a body."""
    return ApiError(400, f"{field} {why}", param=field, code=code)


BUSY_RETRY_SECONDS = 1.0


def busy(limit: int) -> ApiError:
    """Return the error for a call beyond `limit`, the most that may be in progress."""
    return ApiError(
        503,
        f"{limit} calls are in progress, the most that the server takes (max_concurrent_calls)",
        code="server_overloaded",
        retry_after_seconds=BUSY_RETRY_SECONDS,
    )


def aborted() -> ApiError:
    """Return the error for a call that another call has aborted."""
    return ApiError(409, "the call was ended by an abort of its id", code="request_aborted")


STATUSES: tuple[tuple[type[AioserveError], int, str | None], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (DuplicateRequestError, 409, "duplicate_request"),
    (InvalidRequestError, 400, None),
    (QueueFullError, 503, "server_overloaded"),
    (RequestRefusedError, 429, "request_rejected"),
    (EngineFailedError, 500, "engine_failed"),
    (EngineClosedError, 503, "draining"),
    (DeadlineExceededError, 504, "deadline_exceeded"),
    (StreamStalledError, 408, "stream_stalled"),
    (AioserveError, 500, "request_failed"),
)
"""Status and code of each error of the engine, 4xx if the caller has caused it. The first matching
class decides."""

TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors that all APIs share, by status. Types of other statuses are each API's own."""


def api_error_of(error: Exception) -> ApiError:
    """Error that the caller sees for `error`. A bug is reported without details."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(
                status,
                str(error),
                param=error.argument if isinstance(error, InvalidRequestError) else None,
                code=code,
                retry_after_seconds=_retry_after_seconds(error),
            )
    return ApiError(500, "the server failed; see its log", code="internal_error")


def _retry_after_seconds(error: Exception) -> float | None:
    if isinstance(error, EngineClosedError) and not isinstance(error, EngineFailedError):
        return DRAINING_RETRY_SECONDS
    if not isinstance(error, RequestRefusedError):
        return None
    seconds = 1.0 if error.retry_after_seconds is None else error.retry_after_seconds
    if isinstance(error, QueueFullError):  # an estimate; a plugin's value stays unchanged
        return min(seconds, MAX_QUEUE_RETRY_SECONDS)
    return seconds


def called(error: Exception) -> str:
    """Name of `error` in logs and spans: its code, or else its class, or else its status.

    The class is that of the engine's error, if an API's error was made from one. A refusal with
    neither code nor cause has the name of its status, like `bad_request`.
    """
    refused = api_error_of(error)
    if refused.code is not None:
        return refused.code
    source = error.__cause__ if isinstance(error, ApiError) else error
    if source is not None:
        return type(source).__name__
    return HTTPStatus(refused.status).name.lower()


PLACED = ("prompt", "messages", "tools")
"""Arguments of the engine whose errors name a place in them."""


@contextmanager
def as_named(
    fields: Mapping[str, str], placed: Callable[[str], tuple[str, str | None]] | None = None
) -> Iterator[None]:
    """Raise errors about the engine's arguments as errors about the body's fields.

    `fields` has the field of each argument. `placed` rewrites the places in a message of the engine
    to places in the body. It also returns the place that the message is about, or None.
    """
    try:
        yield
    except InvalidRequestError as error:
        refused = api_error_of(error)
        message, param = refused.message, refused.param
        place = None
        if placed is not None and param in PLACED:  # others may quote what looks like a place
            message, place = placed(message)
        if place is not None:
            param = place
        elif param is not None and param in fields:
            message = re.sub(rf"\b{re.escape(param)}\b", fields[param], message, count=1)
            param = fields[param]
        for note in getattr(error, "__notes__", ()):
            for name, field in fields.items():
                note = note.replace(f"of {name}[", f"of {field}[")
            message += f" ({note})"
        raise ApiError(refused.status, message, param=param, code=refused.code) from error
