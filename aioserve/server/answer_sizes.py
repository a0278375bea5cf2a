"""Bounds on the bytes of answers: of each before anything is computed, and of all in memory
together.

    prompts x n x (tokens + echoed tokens) x (1 + logprobs)

Each factor has a limit, and their product needs its own: a body of some hundred kilobytes could ask
for gigabytes. The sizes here are of the largest possible answer. They use average bytes of JSON for
a token and a log-probability. A text counts as at most one token per byte.

An answer that isn't streamed is kept until its client has read it. The bytes of all calls together
are counted by `Unsent`, which refuses more if there are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aioserve.server.errors import ApiError

__all__ = ["AnswerSize", "Kept", "Unsent", "most_tokens_of"]

TOKEN_BYTES = 16
"""Bytes of a token's text and id, about."""
BUSY_RETRY_SECONDS = 1.0
UNSAID_TOKENS = 4096
"""Most tokens counted for a running answer that is limited only by the context."""


class AnswerSize(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the largest answer that one request may have."""

    prompts: int = 1
    n: int = 1
    """Choices of each prompt."""
    tokens: int
    """Most tokens of a choice."""
    says_tokens: bool = True
    """False if only the context limits `tokens`."""
    buffered_tokens: int | None = None
    """Tokens of a prompt's choices together that wait for a slow reader, if the answer is streamed.
    None if all of them do."""
    echoed_tokens: int = 0
    """Prompt tokens that choices begin with, over all choices."""
    logprobs: int | None = None
    """Number of most likely tokens listed at each place, besides its own token."""
    prompt_tokens: int = 0
    """Prompt tokens that are listed separately, over all choices."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens listed at each of these, besides its own."""
    entry_bytes: int = 80
    """Bytes of one log-probability, about, which depend on the API."""
    copies: int = 1
    """Number of times that the answer contains each token."""

    @property
    def num_bytes(self) -> int:
        """Most bytes that are made and not yet sent at one time."""
        return self._bytes_with(self.tokens)

    @property
    def kept_bytes(self) -> int:
        """Bytes counted for the answer while it is being computed."""
        return self._bytes_with(
            self.tokens if self.says_tokens else min(self.tokens, UNSAID_TOKENS)
        )

    def made_bytes(self, tokens: int) -> int:
        """Bytes counted once all choices together have this many tokens."""
        return tokens * self._place_bytes + self._prompt_bytes

    def _bytes_with(self, tokens: int) -> int:
        each = self.n * tokens
        if self.buffered_tokens is not None:
            each = min(each, self.buffered_tokens)
        return self.made_bytes(self.prompts * each)

    @property
    def _place_bytes(self) -> int:
        entries = 0 if self.logprobs is None else 1 + self.logprobs
        return self.copies * (TOKEN_BYTES + entries * self.entry_bytes)

    @property
    def _prompt_bytes(self) -> int:
        entries = 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs
        told = self.prompt_tokens * (TOKEN_BYTES + entries * PROMPT_ENTRY_BYTES)
        return self.echoed_tokens * self._place_bytes + told

    def check(self, limit: int) -> None:
        """Raise `ApiError` for an answer that may be longer than `limit` bytes."""
        if self.num_bytes <= limit:
            return
        factors = [f"prompts: {self.prompts}", f"choices of each: {self.n}"]
        if self.buffered_tokens is None:
            why = "" if self.says_tokens else ", the whole context, as no limit on tokens is given"
            factors.append(f"tokens of each choice: {self.tokens}{why}")
        if self.copies > 1:
            factors.append(f"times that each is told: {self.copies}")
        if of_prompts := self.echoed_tokens + self.prompt_tokens:
            factors.append(f"tokens of prompts in all choices: {of_prompts}")
        if told := [one for one in (self.logprobs, self.prompt_logprobs) if one is not None]:
            factors.append(f"log-probabilities of each token: {1 + max(told)}")
        raise ApiError(
            400,
            f"the answer may have {self.num_bytes} bytes, which is a product ({'; '.join(factors)}"
            f"); max_answer_bytes is {limit}",
            code="limit_exceeded",
        )


PROMPT_ENTRY_BYTES = 72
"""Bytes of one log-probability of a prompt token: its id, rank and text."""


def most_tokens_of(prompts: Sequence[Any], max_model_len: int) -> int:
    """Most tokens of prompts together. A text has at most one token per byte, and each prompt at
    most `max_model_len`."""
    return sum(
        min(len(one.encode("utf-8", "surrogatepass")) if isinstance(one, str) else len(one), most)
        for most in [max_model_len]
        for one in prompts
    )


class Unsent:
    """Bytes of unsent answers, made or to be made, of all calls of an app."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes: int = 0

    def keep(self, num_bytes: int) -> None:
        """Count an answer from now on. A single one always fits. Raises `ApiError` if there would
        be too many bytes."""
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise ApiError(
                503,
                f"answers must have at most {self._max_bytes} bytes together until they are sent "
                f"(max_unsent_bytes): others have {self.num_bytes}, and this one {num_bytes}",
                code="server_overloaded",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        self.num_bytes += num_bytes

    def change(self, before: int, after: int) -> None:
        """Count an answer by its new size, which is 0 once it is sent."""
        self.num_bytes += after - before


class Kept:
    """Bytes of one call among the unsent answers."""

    __slots__ = ("_max_bytes", "_num_bytes", "_size", "_unsent")

    def __init__(self, unsent: Unsent, max_bytes: int) -> None:
        self._unsent = unsent
        self._max_bytes = max_bytes
        self._size: AnswerSize | None = None
        self._num_bytes = 0

    def begin(self, size: AnswerSize) -> None:
        """Count the answer of a request before it is submitted, in place of the call's previous
        one. Raises `ApiError` if it may be too long, or if all unsent answers would be too much."""
        self.end()
        size.check(self._max_bytes)
        self._unsent.keep(size.kept_bytes)
        self._size, self._num_bytes = size, size.kept_bytes

    def keep(self, num_bytes: int) -> None:
        """Count an answer that is made and has no tokens. Raises `ApiError` if all unsent answers
        would be too much."""
        self.end()
        self._unsent.keep(num_bytes)
        self._size, self._num_bytes = None, num_bytes

    def made(self, tokens: int) -> None:
        """Count the real size: all choices have ended, with this many tokens together."""
        if self._size is not None:
            self._become(self._size.made_bytes(tokens))

    def end(self) -> None:
        """Count nothing more: all of it is sent, or its client has left."""
        self._become(0)

    def _become(self, num_bytes: int) -> None:
        self._unsent.change(self._num_bytes, num_bytes)
        self._num_bytes = num_bytes
