"""Prompts that are cut to a number of tokens.

    left     BOS ┊ dropped ┊ the last tokens of a text
    right    BOS the first tokens of a text ┊ dropped ┊

Special tokens around a text stay, and only its own tokens are dropped. In messages and token ids,
any token may be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import check, choice, integer, optional
from aioserve.errors import InvalidRequestError
from aioserve.execution.runner import ModelLimits
from aioserve.request import SamplingParams

__all__ = ["TruncatedPrompt", "Truncation", "TruncationSide", "checked_truncation"]

TruncationSide = Literal["left", "right"]
Ids = TypeVar("Ids", list[int], npt.NDArray[np.int32])

MAX_WHOLE_TOKENS = 2**20
"""Most tokens of a prompt before it is cut, unless the model takes more. A list of that many
takes about 10 ms to make, during which no other thread runs."""


class Truncation(msgspec.Struct, frozen=True):
    num_tokens: int
    """Most tokens that are left, at least 1."""
    side: TruncationSide
    """Side on which tokens are dropped."""
    max_whole_tokens: int
    """Most tokens of a prompt before it is cut."""

    def cut(self, ids: Ids, frame: tuple[int, int] = (0, 0)) -> Ids:
        """Cut `ids`, keeping the first `frame[0]` and the last `frame[1]` of them.

        Raises `InvalidRequestError` if the frame alone takes up all tokens that may be left.
        """
        if len(ids) <= self.num_tokens:
            return ids
        before, after = frame
        if (room := self.num_tokens - before - after) < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at least {before + after + 1}, as the model's "
                f"tokenizer frames a text with {before + after} special tokens, got "
                f"{self.num_tokens}",
                argument="truncate_prompt_tokens",
                value=self.num_tokens,
                limit=before + after + 1,
            )
        end = len(ids) - after
        start = end - room if self.side == "left" else before
        parts = (ids[:before], ids[start : start + room], ids[end:])
        return _joined(ids, parts)


def _joined(like: Any, parts: Sequence[Any]) -> Any:
    if isinstance(like, np.ndarray):
        return np.concatenate(parts)
    return [token_id for part in parts for token_id in part]


class TruncatedPrompt(msgspec.Struct, frozen=True):
    """A text or a `Conversation` whose token ids are to be cut."""

    prompt: Any
    truncation: Truncation


def checked_truncation(
    options: Mapping[str, Any], params: SamplingParams, limits: ModelLimits
) -> Truncation | None:
    """Check `truncate_prompt_tokens` and `truncation_side`; return None if nothing is to be cut.

    Raises `InvalidRequestError`.
    """
    most = limits.max_model_len - 1
    tokens, side = options.get("truncate_prompt_tokens"), options.get("truncation_side", "left")
    error = InvalidRequestError
    wanted = check(error, "truncate_prompt_tokens", tokens, optional(integer(-1, most)))
    side = check(error, "truncation_side", side, choice("left", "right"))
    if wanted == 0:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be in [1, {most}] or -1, got 0",
            argument="truncate_prompt_tokens",
            value=0,
            limit=1,
        )
    if wanted is None:
        return None
    if wanted == -1:
        wanted = limits.max_model_len - (params.max_tokens or 1)
        if wanted < 1:
            raise InvalidRequestError(
                "truncate_prompt_tokens=-1 leaves room for max_tokens, which must be below "
                f"max_model_len = {limits.max_model_len} then, got {params.max_tokens}",
                argument="max_tokens",
                value=params.max_tokens,
                limit=most,
            )
    return Truncation(wanted, side, max(MAX_WHOLE_TOKENS, limits.max_model_len))
