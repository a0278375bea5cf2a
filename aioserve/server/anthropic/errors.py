"""Errors as Anthropic's API writes them."""

from __future__ import annotations

import msgspec

from aioserve.server.errors import ApiError

__all__ = ["ANTHROPIC_ERRORS", "ErrorBody"]


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail
    request_id: str


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _AnthropicErrors:
    kind: type[ErrorBody] = ErrorBody
    id_header: bytes | None = b"request-id"

    def body(self, error: ApiError, request_id: str) -> ErrorBody:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        return ErrorBody(ErrorDetail(_TYPES.get(error.status, kind), error.message), request_id)

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(self.body(error, request_id))


ANTHROPIC_ERRORS: _AnthropicErrors = _AnthropicErrors()
