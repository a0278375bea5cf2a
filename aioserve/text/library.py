"""Calls of the `tokenizers` library in which long texts hold up no other thread, least of all the
event loop's.
"""

from __future__ import annotations

import tokenizers

from aioserve.errors import PromptTooLongError

__all__ = ["encode", "encode_ids"]

SHORT_TEXT_CHARS = 512


def encode(
    backend: tokenizers.Tokenizer, text: str, *, is_quick: bool = True
) -> tokenizers.Encoding:
    """Return the tokens of `text` with their places in it; no special tokens are added.

    Set `is_quick` if the tokenizer encodes short texts in no time.
    """
    if is_quick and len(text) <= SHORT_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=False)
    # Only the batch methods release the GIL. They start the library's own thread pool.
    return backend.encode_batch([text], add_special_tokens=False)[0]


def encode_ids(
    backend: tokenizers.Tokenizer,
    text: str,
    *,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
    is_quick: bool = True,
) -> list[int]:
    """Return the token ids of `text` without their places, which is faster.

    `is_quick` is as in `encode`. Raises `PromptTooLongError` for more than `max_tokens`.
    """
    if is_quick and len(text) <= SHORT_TEXT_CHARS:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    # Making a list of millions stops all threads for a while, so check first.
    if max_tokens is not None and len(encoding) > max_tokens:
        raise PromptTooLongError(
            f"prompt has {len(encoding)} tokens; {max_tokens} are taken at most",
            value=len(encoding),
            limit=max_tokens,
        )
    return encoding.ids
