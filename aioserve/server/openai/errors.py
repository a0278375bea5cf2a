"""Errors as the OpenAI API writes them."""

from __future__ import annotations

import msgspec

from aioserve.server.errors import ApiError

__all__ = ["OPENAI_ERRORS", "ErrorBody"]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _OpenAIErrors:
    kind: type[ErrorBody] = ErrorBody
    id_header: bytes | None = None

    def body(self, error: ApiError, request_id: str) -> ErrorBody:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        kind = _TYPES.get(error.status, kind)
        return ErrorBody(ErrorDetail(error.message, kind, error.param, error.code))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(self.body(error, request_id))


OPENAI_ERRORS: _OpenAIErrors = _OpenAIErrors()
