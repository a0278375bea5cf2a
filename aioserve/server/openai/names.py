"""Errors name fields as the API does, and not as the engine does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aioserve.errors import InvalidRequestError
from aioserve.server.errors import ApiError, api_error_of

__all__ = ["as_named"]


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
