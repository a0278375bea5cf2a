"""Facts that a caller gives about a request, for scheduling policies, admission checks, observers.

A new fact is a field of `SchedulingHints`, with its rule and its type for callers, all in this
file. Then `Engine.stream` takes an option of the same name. Policies and plugins read it as an
attribute of their view of the request.
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
"""Longest user id that any API of the server takes."""
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class SchedulingHints(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one request. No model reads them, so they change no token."""

    tenant: Annotated[str | None, optional(text(1, MAX_TENANT_CHARS))] = None
    """Tenant for whom the request was sent; None if the caller didn't say."""
    priority: Annotated[int, integer(MIN_PRIORITY, MAX_PRIORITY)] = 0
    """Urgency that the caller gave, 0 by default. Its meaning is up to the policy."""
    ttft_target_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Wanted time from arrival to first token; None if the caller didn't say."""
    tpot_target_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Wanted mean time of each further token; None if the caller didn't say."""
    deadline_seconds: Annotated[float | None, optional(number(0, above=True))] = None
    """Time from arrival after which the request is aborted; None: no deadline."""
    metadata: Annotated[
        MappingProxyType[str, str],
        mapping(text(0, MAX_METADATA_KEY_CHARS), text(0, MAX_METADATA_VALUE_CHARS), MAX_METADATA),
    ] = EMPTY_MAPPING
    """Facts in the caller's own words, read-only; empty if it gave none."""
    session_id: Annotated[str | None, optional(name)] = None
    """Conversation or agent that the request is part of; None if the caller didn't say."""
    predicted_output_tokens: Annotated[int | None, optional(integer(1))] = None
    """Expected tokens of each completion; None if the caller didn't say. It is a forecast: it may
    be wrong either way, and may exceed the most tokens that a completion may have.
    """


def checked_hints(given: Mapping[str, object]) -> SchedulingHints:
    """Check hints by name, as callers give them. Raises `InvalidRequestError`."""
    return SchedulingHints(
        **{
            hint: check(InvalidRequestError, hint, value, _RULES[hint])
            for hint, value in given.items()
        }
    )


_RULES = rules_of(SchedulingHints)


class SearchHintOptions(TypedDict, total=False):
    """Options for hints of requests that bring one result together."""

    tenant: str | None
    priority: int
    deadline_seconds: float | None
    metadata: Mapping[str, str] | None
    session_id: str | None


class PromptHintOptions(SearchHintOptions, total=False):
    """Options for hints of any request."""

    ttft_target_seconds: float | None


class HintOptions(PromptHintOptions, total=False):
    """Options for hints of a request for completions."""

    tpot_target_seconds: float | None
    predicted_output_tokens: int | None
