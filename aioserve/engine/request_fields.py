"""What comes with a prompt, beside its sampling parameters: on whose behalf, how soon, what for."""

from __future__ import annotations

from typing import Any

from aioserve.arguments import Rule, check, integer, mapping, name, number, optional, text
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

_RULES: dict[str, Rule[Any]] = {
    "request_id": optional(name),
    "cache_salt": optional(name),
    "tenant": optional(text(1, MAX_TENANT_CHARS)),
    "priority": integer(MIN_PRIORITY, MAX_PRIORITY),
    "ttft_target_seconds": optional(number(0, above=True)),
    "tpot_target_seconds": optional(number(0, above=True)),
    "deadline_seconds": optional(number(0, above=True)),
    "metadata": mapping(
        text(0, MAX_METADATA_KEY_CHARS), text(0, MAX_METADATA_VALUE_CHARS), MAX_METADATA
    ),
    "session_id": optional(name),
    "predicted_output_tokens": optional(integer(1)),
}


def checked_field(argument: str, value: object) -> Any:
    """Raises `InvalidRequestError`."""
    return check(InvalidRequestError, argument, value, _RULES[argument])
