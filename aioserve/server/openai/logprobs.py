"""Log-probabilities in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aioserve.request import Logprobs, Token
from aioserve.server.openai.token_texts import TokenTexts

__all__ = ["ChatLogprobs", "CompletionLogprobs", "TextOffsets", "chat_logprobs"]

LEAST = -9999.0
"""In place of minus infinity, which JSON hasn't; as OpenAI writes it."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/v1/completions`: four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely ones, as many as were asked for, and the one that is there. Of tokens with
    the same text the likeliest one is told."""
    text_offset: list[int]
    """Where each begins, in characters of the text of all tokens."""


class TextOffsets:
    """Tokens of one choice, in order, as `CompletionLogprobs`."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._chars = 0
        """That have begun."""

    def logprobs_of(
        self, tokens: Iterable[tuple[int, Logprobs | None]]
    ) -> CompletionLogprobs | None:
        """Of the next ids; None if there are none."""
        texts = self._texts
        names: list[str] = []
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, logprobs in tokens:
            name = texts.legacy_text(token_id)
            names.append(name)
            raw, is_text = texts.of(token_id)
            # A byte that goes on with a character belongs to where that began.
            is_within = is_text and bool(raw) and raw[0] & 0xC0 == 0x80
            offsets.append(max(self._chars - is_within, 0))
            if is_text:
                self._chars += sum([byte & 0xC0 != 0x80 for byte in raw])
            if logprobs is None:
                own.append(None)
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for one in logprobs.top:
                top.setdefault(texts.legacy_text(one.id), max(one.logprob, LEAST))
            top.setdefault(name, max(logprobs.logprob, LEAST))
            own.append(max(logprobs.logprob, LEAST))
            tops.append(top)
        if not names:
            return None
        return CompletionLogprobs(
            tokens=names, token_logprobs=own, top_logprobs=tops, text_offset=offsets
        )


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/v1/chat/completions`: of every token that was drawn, whatever part of the answer it
    became."""

    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(texts: TokenTexts, tokens: Iterable[Token], top: int) -> ChatLogprobs | None:
    """With the `top` most likely ones at each place; None where no token is."""
    written, content = texts.written, []
    for token in tokens:
        if (found := token.logprobs) is None:
            continue
        tops: list[TopLogprob] = []
        for one in found.top[:top]:
            text, raw = written(one.id)
            tops.append(TopLogprob(text, max(one.logprob, LEAST), raw))
        text, raw = written(token.id)
        content.append(TokenLogprob(text, max(found.logprob, LEAST), raw, tops))
    return ChatLogprobs(content=content) if content else None
