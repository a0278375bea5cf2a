"""A prompt with something behind it whose tokens are scored: the two become one list of token ids.

The ids are those of the prompt, as every request encodes it, and then those of the continuation,
encoded by itself and without special tokens. So the border is always between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.arguments import counted, plain_str
from aioserve.engine.prompts import checked_ids, kind_of
from aioserve.errors import InvalidPromptError, PromptTooLongError
from aioserve.execution.runner import ModelLimits

__all__ = ["Continuation", "ContinuedPrompt", "checked_continuation"]

Continuation = str | Sequence[int] | npt.NDArray[np.integer[Any]]


class ContinuedPrompt:
    """`prompt` and `continuation` have passed the checks at the edge."""

    def __init__(self, prompt: Any, continuation: str | npt.NDArray[np.int32]) -> None:
        self.prompt: Any = prompt
        """Text, messages, or ids as an int32 array."""
        self.prompt_ids: npt.NDArray[np.int32] | None = None
        """Once it is encoded."""
        self._continuation = continuation
        self._continuation_ids = np.empty(0, np.int32)

    @property
    def continuation_ids(self) -> tuple[int, ...]:
        """Once it is encoded."""
        return tuple(self._continuation_ids.tolist())

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.prompt, self._continuation

    def encode(self, encode: Callable[..., list[int]], max_tokens: int) -> npt.NDArray[np.int32]:
        """Ids of both, int32. `encode(part, add_special_tokens=)` gives those of one that has none.
        Raises `PromptTooLongError` for more than `max_tokens`."""
        ids, more = self.prompt, self._continuation
        if not isinstance(ids, np.ndarray):
            ids = np.array(encode(ids), np.int32)
        if not len(ids):
            raise InvalidPromptError("prompt must not be empty, got a text without tokens")
        if not isinstance(more, np.ndarray):
            try:
                more = np.array(encode(more, add_special_tokens=False), np.int32)
            except PromptTooLongError as error:
                if error.unit != "tokens" or error.value is None:
                    raise
                raise _too_long(len(ids), error.value, max_tokens) from None
        if not len(more):
            raise InvalidPromptError(
                "continuation must not be empty, got a text without tokens",
                argument="continuation",
            )
        if len(ids) + len(more) > max_tokens:
            raise _too_long(len(ids), len(more), max_tokens)
        self.prompt_ids, self._continuation_ids = ids, more
        return np.concatenate([ids, more])

    def fields(self, prompt_tokens: int) -> dict[str, Any]:
        """Of the `Request`, as `Look` has them."""
        if self.prompt_ids is None:
            raise ValueError("a prompt that isn't encoded has no border")
        return {"score_from": len(self.prompt_ids), "answers": False}


def checked_continuation(
    value: Any, limits: ModelLimits, check_text: Callable[[str], None]
) -> str | npt.NDArray[np.int32]:
    """Text, not empty, that `check_text` lets through, or ids as an int32 array. Raises
    `InvalidPromptError`, and what `check_text` raises."""
    kind = kind_of(value, "continuation")
    if kind == "messages":
        raise InvalidPromptError(
            "continuation must be a str or token ids, got messages",
            argument="continuation",
            value=value,
        )
    if kind == "text":
        text = plain_str(value)
        if not text:
            raise InvalidPromptError(
                "continuation must not be empty, got ''", argument="continuation", value=text
            )
        check_text(text)
        return text
    return checked_ids(
        value,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        argument="continuation",
    )


def _too_long(prompt: int, continuation: int, most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"prompt and continuation have {prompt} and {counted(continuation, 'token')}; "
        f"together they may have {most}, one less than max_model_len",
        value=prompt + continuation,
        limit=most,
    )
