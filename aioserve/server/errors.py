"""What goes wrong with a call, as its caller is told: a status, and what, where and why.

Each API has its own way to write this down; which errors there are is the same for all.
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
"""Where a server that goes away is asked: by then its successor may answer."""
MAX_QUEUE_RETRY_SECONDS = 60.0
"""A longer wait would be a guess: the queue is another in a minute."""


class ApiError(Exception):
    """Ends a call."""

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
        """The status of HTTP."""
        self.message: str = message
        self.param: str | None = param
        """The field of the body that is wrong."""
        self.code: str | None = code
        """For programs."""
        self.retry_after_seconds: float | None = retry_after_seconds
        self.details: Mapping[str, Any] | None = details
        """Facts that clients of an API read to go on without the refused thing."""

    @property
    def is_fault(self) -> bool:
        """Whether something broke here: a full queue, a drain or a deadline is none."""
        return self.status == 500

    @property
    def headers(self) -> dict[str, str]:
        """Headers of this error alone, beside the ones that every answer has."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}


def refuse(field: str, why: str, code: str | None = None) -> ApiError:
    """Return the error of a field of a body."""
    return ApiError(400, f"{field} {why}", param=field, code=code)


BUSY_RETRY_SECONDS = 1.0


def busy(limit: int) -> ApiError:
    """Return the error of a call beyond `limit`, the most that may be in progress."""
    return ApiError(
        503,
        f"{limit} calls are in progress, the most that the server takes (max_concurrent_calls)",
        code="server_overloaded",
        retry_after_seconds=BUSY_RETRY_SECONDS,
    )


def aborted() -> ApiError:
    """Return the error of a call that another has ended."""
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
"""Status and code of each error of the engine's; the first class that an error is of decides. What
the caller has caused is a 4xx."""

TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""What all APIs call errors of these statuses; names of others are each API's own."""


def api_error_of(error: Exception) -> ApiError:
    """What a caller hears of `error`. Of a bug it hears that there was one, and nothing else."""
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
    if isinstance(error, QueueFullError):  # an estimate; of a plugin's refusal it is its word
        return min(seconds, MAX_QUEUE_RETRY_SECONDS)
    return seconds


def called(error: Exception) -> str:
    """What logs and spans say of `error`: its code, or else its class, which is that of the
    engine's error where one was told in an API's words; of a refusal that has neither, what its
    status is called, such as `bad_request`."""
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
    """Raise errors about arguments of the engine as errors about the `fields` of a body that they
    came from. `placed` gives a message with places in the body for those of the engine, and the
    place that it is about, if it has one."""
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
