"""What comes with a prompt, beside its sampling parameters: on whose behalf, how soon, what for."""

from __future__ import annotations

from typing import Any

from aioserve.arguments import Rule, check, integer, mapping, name, number, text
from aioserve.errors import InvalidRequestError
from aioserve.request import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_PRIORITY,
    MAX_TENANT_CHARS,
    MIN_PRIORITY,
)

__all__ = ["checked_field"]

_OPTIONAL: dict[str, Rule[Any]] = {
    "request_id": name,
    "cache_salt": name,
    "tenant": text(1, MAX_TENANT_CHARS),
    "ttft_target_seconds": number(0, above=True),
    "tpot_target_seconds": number(0, above=True),
    "deadline_seconds": number(0, above=True),
    "session_id": name,
    "predicted_output_tokens": integer(1),
}
"""Rules of fields that may be None, as most of them are in most requests."""
_RULES: dict[str, Rule[Any]] = {
    **_OPTIONAL,
    "priority": integer(MIN_PRIORITY, MAX_PRIORITY),
    "metadata": mapping(
        text(0, MAX_METADATA_KEY_CHARS), text(0, MAX_METADATA_VALUE_CHARS), MAX_METADATA
    ),
}


def checked_field(argument: str, value: object) -> Any:
    """Raises `InvalidRequestError`."""
    if value is None and argument in _OPTIONAL:
        return None
    return check(InvalidRequestError, argument, value, _RULES[argument])
