"""The text that models are measured on: a file, its tokens, and the bytes of each token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.arguments import counted
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = [
    "MAX_TEXT_BYTES",
    "EvaluatedText",
    "bytes_of_tokens",
    "check_same_tokens",
    "read_text",
    "tokens_of_text",
]

MAX_TEXT_BYTES = 1 << 24


class EvaluatedText(NamedTuple):
    """A text as one tokenizer reads it."""

    before: tuple[int, ...]
    """Ids of special tokens that the model expects before a text, such as BOS."""
    token_ids: npt.NDArray[np.int32]
    """int32 `[tokens]`: the text itself."""
    num_bytes: npt.NDArray[np.float64]
    """float64 `[tokens]`: UTF-8 bytes of the file that each token stands for. Each byte counts for
    one token. A character that several tokens share counts for the first of them.
    """


def read_text(path: Path, argument: str = "text") -> str:
    """Return the contents of the file that `argument` names.

    Raises `ConfigError` for a file that can't be read, is empty, is no UTF-8 or has more than
    `MAX_TEXT_BYTES`.
    """
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{argument}: {path} can't be read: {why}", argument=argument) from error
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError(
            f"{argument}: {path} must have at most {MAX_TEXT_BYTES} bytes, got more",
            argument=argument,
            limit=MAX_TEXT_BYTES,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{argument}: {path} must be UTF-8, got byte 0x{data[error.start]:02x} at offset "
            f"{error.start}",
            argument=argument,
        ) from error
    if not text:
        raise ConfigError(f"{argument}: {path} must not be empty", argument=argument)
    return text


def tokens_of_text(text: str, engine: Engine, max_tokens: int | None) -> EvaluatedText:
    """Return the first `max_tokens` tokens of a text, or all.

    Raises `ConfigError` for a text of fewer than two tokens, and `ModelError` for a model without a
    tokenizer.
    """
    tokenizer = engine.tokenizer
    ids, ends = tokenizer.encode_with_ends(text)
    if len(ids) < 2:
        raise ConfigError(
            f"text must have at least 2 tokens, got {counted(len(ids), 'token')}", argument="text"
        )
    return EvaluatedText(
        before=tuple(_before(engine)),
        token_ids=np.array(ids[:max_tokens], np.int32),
        num_bytes=bytes_of_tokens(text, ends)[:max_tokens],
    )


def bytes_of_tokens(text: str, ends: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the bytes of each token, float64 `[tokens]`, from the tokens' ends in characters.

    Text between two tokens counts for the second, and text after all of them for the last.
    """
    reached = np.maximum.accumulate(np.array(ends, np.int64))
    reached[-1] = len(text)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    places = np.concatenate([[0], np.cumsum(widths)])  # before each character, and at the end
    return np.diff(places[reached], prepend=0).astype(np.float64)


def check_same_tokens(engine: Engine, reference: Engine, text: str) -> None:
    """Raise `ConfigError` unless both models give the same ids the same meaning and read the text
    as the same tokens.

    Otherwise their distributions can't be compared.
    """
    ours, theirs = engine.tokenizer, reference.tokenizer
    sizes = engine.limits.vocab_size, reference.limits.vocab_size
    if sizes[0] != sizes[1]:
        raise _different(f"vocab_size is {sizes[0]} and {sizes[1]}")
    if ours.vocab_size != theirs.vocab_size:
        raise _different(f"the highest ids are {ours.vocab_size - 1} and {theirs.vocab_size - 1}")
    for token_id in range(ours.vocab_size):
        pair = ours.token_bytes(token_id), theirs.token_bytes(token_id)
        if pair[0] != pair[1]:
            raise _different(f"token {token_id} is {pair[0]!r} and {pair[1]!r}")
    frames = _before(engine), _before(reference)
    if frames[0] != frames[1]:
        raise _different(f"the ids before a text are {frames[0]} and {frames[1]}")
    each = [one.encode_plain(text) for one in (ours, theirs)]
    for place, pair in enumerate(itertools.zip_longest(*each)):
        if pair[0] != pair[1]:
            raise _different(f"token {place} of the text is {pair[0]} and {pair[1]}")


def _before(engine: Engine) -> list[int]:
    tokenizer = engine.tokenizer
    return tokenizer.encode("a")[: tokenizer.frame[0]]


def _different(difference: str) -> ConfigError:
    return ConfigError(
        f"reference must have the tokenizer of the model: {difference}", argument="reference"
    )
