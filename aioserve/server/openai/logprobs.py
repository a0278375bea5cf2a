"""Tokens as the OpenAI API writes them, with log-probabilities in its two shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from aioserve.engine.interface import ModelFacts
from aioserve.request import Logprobs, Token
from aioserve.server.json_parts import LongJson, inner_json
from aioserve.server.pace import UNITS_AT_ONCE, Pace

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "EncodedLogprobs",
    "GatheredLogprobs",
    "PromptLogprob",
    "TextOffsets",
    "TokenLogprob",
    "TokenTexts",
    "all_chat_logprobs",
    "chat_logprobs",
    "prompt_logprobs",
]


class TokenTexts:
    """Texts of the tokens of one completion, kept once they were looked up.

    Special tokens have their names. Without a tokenizer, or with `as_ids`, each is called
    "token_id:ID", as in vLLM.
    """

    def __init__(self, facts: ModelFacts, *, as_ids: bool | None = False) -> None:
        self._as_ids = as_ids
        self._tokenizer = facts.tokenizer
        self._known: dict[int, tuple[bytes, bool]] = {}
        self._written: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[bytes, bool]:
        """Bytes of a token, and true if they are part of the text."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def written(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of a token. U+FFFD stands for an incomplete character."""
        written = self._written.get(token_id)
        if written is None:
            raw = self.of(token_id)[0]
            name = _id_name(token_id) if self._as_ids else raw.decode("utf-8", "replace")
            written = self._written[token_id] = name, list(raw)
        return written

    def joined(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones included."""
        if self._tokenizer is None:
            return "".join(map(_id_name, token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def legacy_text(self, token_id: int) -> str:
        """Text of a token. Bytes of an incomplete character are written as `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return _id_name(token_id)
        raw = self.of(token_id)[0]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])

    def _look_up(self, token_id: int) -> tuple[bytes, bool]:
        if self._tokenizer is None:
            return _id_name(token_id).encode(), False
        is_text = self._tokenizer.pieces[token_id] is not None
        return self._tokenizer.token_bytes(token_id), is_text


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


T = TypeVar("T")

LEAST = -9999.0
"""Value in place of minus infinity, which JSON doesn't have; OpenAI writes the same."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of `/v1/completions`: four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Log-probability of each token; None for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """Most likely tokens, as many as were asked for, and the token that is there. Of tokens with
    the same text, only the likeliest is listed."""
    text_offset: list[int]
    """Start of each token, in characters of the text of all tokens."""


class TextOffsets:
    """Converts the tokens of one choice, in order, to `CompletionLogprobs`."""

    def __init__(self, texts: TokenTexts, *, chars: int = 0, echoed: str | None = None) -> None:
        """`chars` are those of the tokens before. The text of a repeated prompt is `echoed`:
        special tokens count if it has their names there, and else add nothing."""
        self._texts = texts
        self._echoed = echoed
        self.chars: int = chars
        """Characters of the tokens so far, including one that has only begun."""

    def logprobs_of(
        self, tokens: Iterable[tuple[int, Logprobs | None]]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of the next ids; None if there are none."""
        texts = self._texts
        names: list[str] = []
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, logprobs in tokens:
            name = texts.legacy_text(token_id)
            names.append(name)
            raw, is_text = texts.of(token_id)
            # A byte that continues a character has the offset of that character.
            is_within = is_text and bool(raw) and raw[0] & 0xC0 == 0x80
            offsets.append(max(self.chars - is_within, 0))
            if is_text:
                self.chars += sum([byte & 0xC0 != 0x80 for byte in raw])
            elif self._echoed is not None:
                special = raw.decode("utf-8", "replace")
                if self._echoed.startswith(special, self.chars):
                    self.chars += len(special)
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


class EncodedLogprobs:
    """Log-probabilities of a run of tokens, in JSON already.

    A run may be as long as a prompt. Made or encoded at once, it would hold the event loop.
    """

    def __init__(self, chars: int) -> None:
        self.chars: int = chars
        """Characters that have begun, including those before the run."""
        self._parts: dict[str, list[bytes]] = {
            name: [] for name in CompletionLogprobs.__struct_fields__
        }

    @classmethod
    async def of(
        cls,
        texts: TokenTexts,
        tokens: Sequence[tuple[int, Logprobs | None]],
        pace: Pace,
        *,
        chars: int = 0,
        echoed: str | None = None,
    ) -> EncodedLogprobs:
        """Encode those of `tokens`. For `chars` and `echoed`, see `TextOffsets`."""
        offsets = TextOffsets(texts, chars=chars, echoed=echoed)
        encoded = cls(chars)
        async for some in _in_turns(tokens, _num_entries(tokens), pace):
            encoded.add(offsets.logprobs_of(some))
        encoded.chars = offsets.chars
        return encoded

    def add(self, logprobs: CompletionLogprobs | None) -> None:
        """Add those of the next tokens."""
        if logprobs is not None:
            for name, parts in self._parts.items():
                parts.append(inner_json(getattr(logprobs, name)))

    def with_more(self, later: CompletionLogprobs | None) -> Any:
        """Return a `CompletionLogprobs` of these and of `later`, with lists of `msgspec.Raw`; None
        without a token."""
        more = EncodedLogprobs(self.chars)
        more.add(later)
        return self._joined(more, lambda *pieces: _raw([*pieces[0], *pieces[1]]))

    def long_with(self, later: EncodedLogprobs) -> Any:
        """Return the same with lists of `LongJson`, so that choices share what they have in
        common."""
        return self._joined(later, LongJson.of_inner)

    def _joined(self, later: EncodedLogprobs, join: Callable[..., Any]) -> Any:
        if not (self._parts["tokens"] or later._parts["tokens"]):
            return None
        lists = {name: join(parts, later._parts[name]) for name, parts in self._parts.items()}
        return CompletionLogprobs(**lists)


async def _in_turns(values: Sequence[T], entries_each: int, pace: Pace) -> AsyncIterator[list[T]]:
    """Yield all of `values` in lists, with turns of the event loop between them."""
    rest, at_once = iter(values), max(1, UNITS_AT_ONCE // entries_each)
    while some := list(islice(rest, at_once)):
        await pace.before(len(some) * entries_each)
        yield some


def _num_entries(tokens: Sequence[tuple[int, Logprobs | None]]) -> int:
    """Number of log-probabilities of each token."""
    last = tokens[-1][1] if tokens else None
    return 1 if last is None else 1 + len(last.top)


def _raw(parts: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(parts))


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
    """Log-probabilities of `/v1/chat/completions`, of every token that was drawn, in any part of
    the answer."""

    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(texts: TokenTexts, tokens: Iterable[Token], top: int) -> ChatLogprobs | None:
    """Return the log-probabilities of `tokens`, with the `top` most likely ones at each place. None
    if there are none."""
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


def all_chat_logprobs(
    texts: TokenTexts, tokens: Sequence[Token], top: int, pace: Pace
) -> ChatLogprobs | None:
    """Return the same as `chat_logprobs`, for any number of tokens. The list is made while it is
    sent."""
    if all(token.logprobs is None for token in tokens):
        return None

    async def entries() -> AsyncGenerator[bytes, None]:
        async for some in _in_turns(tokens, 1 + top, pace):
            if (logprobs := chat_logprobs(texts, some, top)) is not None:
                yield inner_json(logprobs.content)

    content: Any = LongJson.of_inner(entries)
    return ChatLogprobs(content=content)


class GatheredLogprobs:
    """Log-probabilities of the tokens of one text, collected as they come."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._parts: list[bytes] = []

    def add(self, tokens: Iterable[Token]) -> list[TokenLogprob]:
        """Add the next tokens, and return their log-probabilities, one entry each."""
        found = chat_logprobs(self._texts, tokens, self._top)
        if found is None:
            return []
        self._parts.append(inner_json(found.content))
        return found.content

    def take(self) -> Any:
        """Return all of them, in JSON already. The next are those of another text."""
        parts, self._parts = self._parts, []
        return _raw(parts)


class PromptLogprob(msgspec.Struct, frozen=True):
    """Log-probability of a token at one place of a prompt, as vLLM writes it."""

    logprob: float
    rank: int | None
    """Rank among the most likely tokens that are listed, from 1; else None."""
    decoded_token: str


async def prompt_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs | None],
    top: int,
    pace: Pace,
) -> Any:
    """Return a `LongJson` with an entry for each token of a prompt.

    An entry has the `top` most likely tokens and the token itself, by their ids; the first is null.
    The list is encoded once for all its places.
    """
    places = list(zip(token_ids, logprobs, strict=True))
    parts: list[bytes] = []
    async for some in _in_turns(places, 2 + top, pace):
        parts.append(inner_json([_at_place(texts, *place, top) for place in some]))
    return LongJson.of_inner(parts)


def _at_place(
    texts: TokenTexts, token_id: int, logprobs: Logprobs | None, top: int
) -> dict[str, PromptLogprob] | None:
    if logprobs is None:
        return None
    found = {
        str(one.id): PromptLogprob(max(one.logprob, LEAST), rank, texts.written(one.id)[0])
        for rank, one in enumerate(logprobs.top[:top], 1)
    }
    own = PromptLogprob(max(logprobs.logprob, LEAST), None, texts.written(token_id)[0])
    return {str(token_id): found.get(str(token_id), own)} | found
