"""Blocks of content that are text, or that mean nothing to a model here, in messages and
results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

__all__ = [
    "Block",
    "CacheControl",
    "CachedBlock",
    "InputDocument",
    "InputRedactedThinking",
    "InputText",
    "text_of",
]


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Marker for caching, without effect: all prompts are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    """Block of content, with its type in `type`."""


class CachedBlock(Block, frozen=True, kw_only=True):
    """Block that may have a marker for caching."""

    cache_control: CacheControl | None = None


class InputText(CachedBlock, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: Any = None
    """Citations of another server, which are dropped."""


class InputRedactedThinking(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    data: str
    """Reasoning that another server has encrypted, which is dropped."""


class TextSource(Block, frozen=True, kw_only=True, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Block, frozen=True, kw_only=True, tag="content"):
    content: str | list[InputText]


class Citations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: Literal[False] | None = None


class InputDocument(CachedBlock, frozen=True, kw_only=True, tag="document"):
    """Document that is text: its title, its context and its content, line by line."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        source = self.source
        text = source.data if isinstance(source, TextSource) else text_of(source.content)
        return "\n".join([one for one in (self.title, self.context, text) if one])


def text_of(content: str | Sequence[InputText | InputDocument] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([block.text for block in content])
