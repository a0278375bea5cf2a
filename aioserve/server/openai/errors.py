"""Errors in the format of the OpenAI API."""

from __future__ import annotations

import msgspec

from aioserve.server.endpoint import ErrorShape
from aioserve.server.errors import TYPES, ApiError

__all__ = ["OPENAI_ERRORS", "ErrorBody"]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def _body(error: ApiError, request_id: str) -> ErrorBody:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = TYPES.get(error.status, kind)
    return ErrorBody(ErrorDetail(error.message, kind, error.param, error.code))


OPENAI_ERRORS: ErrorShape = ErrorShape(ErrorBody, _body)
