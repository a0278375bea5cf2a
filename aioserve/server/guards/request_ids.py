"""What a call goes by: as its client says in `x-request-id`, or as is made up here."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["MAX_REQUEST_ID_CHARS", "given_request_id", "is_request_id"]

MAX_REQUEST_ID_CHARS = 128
PRINTABLE = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARS)


def given_request_id(headers: dict[bytes, list[bytes]]) -> str | None:
    """The client's, if there is one of 1 to `MAX_REQUEST_ID_CHARS` printable ASCII characters; what
    isn't that is replaced, and no error."""
    values: Sequence[bytes] = headers.get(b"x-request-id", ())
    if len(values) != 1 or not PRINTABLE.fullmatch(values[0]):
        return None
    return values[0].decode("ascii")


def is_request_id(text: str) -> bool:
    """Whether it could be one that a header gives."""
    return PRINTABLE.fullmatch(text.encode(errors="replace")) is not None and text.isascii()
