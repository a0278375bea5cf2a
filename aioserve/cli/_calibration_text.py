"""The text that `aioserve quantize` calibrates on: a file, cut into windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.arguments import counted
from aioserve.cli._evaluation.text import read_text
from aioserve.errors import AioserveError, ConfigError
from aioserve.isolation import shown
from aioserve.models.model_files import ModelFiles

__all__ = ["DEFAULT_TOKENS", "LEAST_TOKENS", "MAX_TOKENS", "calibration_windows"]

DEFAULT_TOKENS = 1 << 15
LEAST_TOKENS = 1 << 10
"""Fewest tokens of a text, and smallest value of `--calibration-tokens`."""
MAX_TOKENS = 1 << 22
_WINDOW = 512
"""Tokens of a window, if the model takes as many."""


def calibration_windows(
    files: ModelFiles, path: Path, max_tokens: int | None
) -> list[npt.NDArray[np.int64]]:
    """Return windows of at most `max_tokens` together, 32,768 by default, from all over the file.

    The file is a text, or JSONL (by its name): in each line an object with "text", or with
    "messages" of a chat. Each window begins as the model expects of a text, with BOS if it has one.

    Raises `ConfigError` for a number out of bounds, and for a file that can't be read, has an
    invalid line or too few tokens. Raises `ModelError` for a model without a tokenizer.
    """
    most = DEFAULT_TOKENS if max_tokens is None else max_tokens
    if not LEAST_TOKENS <= most <= MAX_TOKENS:
        raise ConfigError(
            f"calibration_tokens must be in [{LEAST_TOKENS}, {MAX_TOKENS}], got {most}",
            argument="calibration_tokens",
            value=most,
            limit=LEAST_TOKENS if most < LEAST_TOKENS else MAX_TOKENS,
        )
    contents = read_text(path, "calibration")
    tokenizer = files.tokenizer()
    if path.suffix.lower() == ".jsonl":
        ids = [one for document in _documents(files, path, contents) for one in document]
    else:
        ids = tokenizer.encode_plain(contents)
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"calibration: {path} must have at least {LEAST_TOKENS} tokens, got "
            f"{counted(len(ids), 'token')}",
            argument="calibration",
            value=len(ids),
            limit=LEAST_TOKENS,
        )
    before = np.array(tokenizer.encode("a")[: tokenizer.frame[0]], np.int64)
    window = min(_WINDOW, files.config().max_position_embeddings)
    length = max(1, window - len(before))
    cut = np.array(ids[: len(ids) // length * length], np.int64).reshape(-1, length)
    count = min(len(cut), max(1, most // window))
    chosen = cut[np.arange(count) * len(cut) // count]
    return [np.concatenate([before, text]) for text in chosen]


def _documents(files: ModelFiles, path: Path, contents: str) -> Iterator[list[int]]:
    """Yield the token ids of each line."""
    tokenizer, template = files.tokenizer(), files.chat_template()
    for number, line in enumerate(contents.split("\n"), 1):
        if not line.strip():
            continue
        where = f"calibration: line {number} of {path}"
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{where} must be JSON: {error}") from error
        if isinstance(said, dict) and isinstance(text := said.get("text"), str):
            yield tokenizer.encode_plain(_encodable(text, where))
        elif isinstance(said, dict) and isinstance(messages := said.get("messages"), list):
            if template is None:
                raise _wrong(f"{where} has messages, and the model has no chat template")
            try:
                rendered = template.render(messages, add_generation_prompt=False)
            except AioserveError as error:
                raise _wrong(f"{where}: {error}") from error
            yield tokenizer.encode_plain(_encodable(rendered, where))
        else:
            raise _wrong(f'{where} must be an object with "text" or "messages", got {shown(said)}')


def _encodable(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(f"{where} can't be encoded as UTF-8: {error.reason}") from error
    return text


def _wrong(why: str, value: Any = None) -> ConfigError:
    return ConfigError(why, argument="calibration", value=value)
