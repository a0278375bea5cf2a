"""Spellings, as token ids, of texts that a completion may not have.

Knows tokenizers alone.
"""

from __future__ import annotations

from aioserve.text.tokenizer import Tokenizer

__all__ = ["spellings"]


def spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Ids of `word` as a tokenizer writes it at the start of a text, and behind a space.

    A vocabulary may have other ways to the same text; these are the ones that a model takes.
    """
    bare = word.lstrip(" ")
    ways = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {bare}")]
    return [ids for ids in dict.fromkeys(ways) if ids]
