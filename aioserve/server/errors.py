"""What goes wrong with a call, as its caller is told: a status, and what, where and why.

Each API has its own way to write this down; which errors there are is the same for all.
"""

from __future__ import annotations

import math
from http import HTTPStatus

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
)

__all__ = ["ApiError", "called", "refuse", "told"]

DRAINING_RETRY_SECONDS = 5.0
"""Where a server that goes away is asked: by then its successor may answer."""
MAX_QUEUE_RETRY_SECONDS = 60.0
"""Nobody knows what waits a minute from now."""


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
    ) -> None:
        super().__init__(message)
        self.status: int = status
        """Of HTTP."""
        self.message: str = message
        self.param: str | None = param
        """The field of the body that is wrong."""
        self.code: str | None = code
        """For programs."""
        self.retry_after_seconds: float | None = retry_after_seconds

    @property
    def is_fault(self) -> bool:
        """Whether something broke here: a full queue, a drain or a deadline is none."""
        return self.status == 500

    @property
    def headers(self) -> dict[str, str]:
        """Beside those of every answer."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}


def refuse(field: str, why: str) -> ApiError:
    """About a field of a body."""
    return ApiError(400, f"{field} {why}", param=field)


def told(error: Exception) -> ApiError:
    """What a caller hears of `error`. Of a bug it hears that there was one, and nothing else."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        status, code = 400, None
        if isinstance(error, PromptTooLongError):
            code = "context_length_exceeded"
        elif isinstance(error, DuplicateRequestError):
            status, code = 409, "duplicate_request"
        return ApiError(status, str(error), param=error.argument, code=code)
    if isinstance(error, RequestRefusedError):
        full = isinstance(error, QueueFullError)
        retry_after = 1.0 if error.retry_after_seconds is None else error.retry_after_seconds
        if full:  # an estimate; of a plugin's refusal it is the plugin's word
            retry_after = min(retry_after, MAX_QUEUE_RETRY_SECONDS)
        code = "server_overloaded" if full else "request_rejected"
        return ApiError(
            503 if full else 429, str(error), code=code, retry_after_seconds=retry_after
        )
    if isinstance(error, EngineFailedError):
        return ApiError(500, str(error), code="engine_failed")
    if isinstance(error, EngineClosedError):
        return ApiError(
            503, str(error), code="draining", retry_after_seconds=DRAINING_RETRY_SECONDS
        )
    if isinstance(error, DeadlineExceededError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, AioserveError):
        return ApiError(500, str(error), code="request_failed")
    return ApiError(500, "the server failed; see its log", code="internal_error")


def called(error: Exception) -> str:
    """What logs and spans say of `error`: its code, or else its class, which is that of the
    engine's error where one was told in an API's words; of a refusal that has neither, what its
    status is called, such as `bad_request`."""
    refused = told(error)
    if refused.code is not None:
        return refused.code
    source = error.__cause__ if isinstance(error, ApiError) else error
    if source is not None:
        return type(source).__name__
    return HTTPStatus(refused.status).name.lower()
