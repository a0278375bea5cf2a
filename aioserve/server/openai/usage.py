"""Token counts, as the OpenAI API tells them."""

from __future__ import annotations

import msgspec

from aioserve.request import Usage

__all__ = ["StreamOptions", "UsageBody", "usage_of"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_usage: bool | None = None
    """A last chunk without choices tells the counts."""
    continuous_usage_stats: bool | None = None
    """Every chunk tells those so far."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
