"""Errors as the OpenAI API writes them, about fields as it names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from aioserve.errors import InvalidRequestError
from aioserve.server.errors import ApiError, api_error_of

__all__ = ["OPENAI_ERRORS", "ErrorBody", "as_named"]


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


@contextmanager
def as_named(fields: Mapping[str, str]) -> Iterator[None]:
    """What is raised inside about an argument of the engine's is about the field of that name in
    `fields`, or of the same name."""
    try:
        yield
    except InvalidRequestError as error:
        argument = error.argument or ""
        field = fields.get(argument, argument)
        notes = getattr(error, "__notes__", ())
        if field == argument and not notes:
            raise
        refused = api_error_of(error)
        message = refused.message
        if message.startswith(argument):
            message = field + message.removeprefix(argument)
        elif message.startswith(f"token ids of the {argument}"):
            message = message.replace(argument, field, 1)
        for note in notes:
            place = note
            for name, field_of in fields.items():
                place = place.replace(f"of {name}[", f"of {field_of}[")
            message += f" ({place})"
        raise ApiError(refused.status, message, param=field, code=refused.code) from error
