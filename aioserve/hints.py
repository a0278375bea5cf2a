"""What a caller tells of a request for others to read: the scheduling policy, admission checks and
observers.

A new fact of this kind is a field of `SchedulingHints`, with its rule and its type for callers, all
in this file. It then comes in by the options of `Engine.stream` of the same name, and policies and
plugins read it as an attribute of what they see of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypedDict

import msgspec

from aioserve.arguments import (
    EMPTY_MAPPING,
    check,
    integer,
    mapping,
    name,
    number,
    optional,
    rules_of,
    text,
)
from aioserve.errors import InvalidRequestError

__all__ = [
    "HintOptions",
    "PromptHintOptions",
    "SchedulingHints",
    "SearchHintOptions",
    "checked_hints",
]

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_TENANT_CHARS = 512
"""As long as an id of a user may be in any API of the server."""
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class SchedulingHints(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one request. No model reads them, so they change no token."""

    tenant: Annotated[str | None, optional(text(1, MAX_TENANT_CHARS))] = None
    """Tenant on whose behalf the request was sent, where the caller said so."""
    priority: Annotated[int, integer(MIN_PRIORITY, MAX_PRIORITY)] = 0
    """Urgency as the caller gave it, 0 unless it did: what it means is up to the policy."""
    ttft_target_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Time after its arrival within which the first token is wanted, where the caller said so."""
    tpot_target_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Time that each further token may take on average, where the caller said so."""
    deadline_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Time after its arrival when the request is ended, unless it has ended before; None where the
    caller gave it all the time there is."""
    metadata: Annotated[
        MappingProxyType[str, str],
        mapping(text(0, MAX_METADATA_KEY_CHARS), text(0, MAX_METADATA_VALUE_CHARS), MAX_METADATA),
    ] = EMPTY_MAPPING
    """Facts that the caller tells in words of its own, read-only; empty where it told nothing."""
    session_id: Annotated[str | None, optional(name)] = None
    """Conversation or agent that the request is part of, where the caller said so."""
    predicted_output_tokens: Annotated[int | None, optional(integer(1))] = None
    """Length that the caller expects of each completion, where it said so: a forecast, which may be
    wrong either way, and may be above the most tokens that a completion may have."""


def checked_hints(given: Mapping[str, object]) -> SchedulingHints:
    """Hints by name, as callers give them. Raises `InvalidRequestError`."""
    return SchedulingHints(
        **{
            hint: check(InvalidRequestError, hint, value, _RULES[hint])
            for hint, value in given.items()
        }
    )


_RULES = rules_of(SchedulingHints)


class SearchHintOptions(TypedDict, total=False):
    """Options that tell hints of requests which bring one result together."""

    tenant: str | None
    priority: int
    deadline_seconds: float | None
    metadata: Mapping[str, str] | None
    session_id: str | None


class PromptHintOptions(SearchHintOptions, total=False):
    """Options that tell hints of any request."""

    ttft_target_seconds: float | None


class HintOptions(PromptHintOptions, total=False):
    """Options that tell hints of a request for completions."""

    tpot_target_seconds: float | None
    predicted_output_tokens: int | None
