"""GGUF metadata for SentencePiece's BPE, which is BPE over characters in a tokenizer.json.

Merges become scores: the earlier a token is made, the higher its score. The rest of a tokenizer is
in `vocabulary`, which also checks that the scores give the same merges again. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.models.gguf.tokenizer import SPACE, TokenKind

__all__ = ["are_pieces", "pairs_of", "pieces_of", "same_merges"]

_SCORE_OF_MARKS = -1000.0
"""Score that converters give to tokens that merges don't make, as control tokens."""
_SPACES_ALIKE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_SPACE_IN_FRONT = {"type": "Prepend", "prepend": SPACE}
Merges = Sequence[Sequence[str]]


def are_pieces(said: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """True if a tokenizer.json spells spaces as SentencePiece does, and merges whole texts."""
    found = _normalizers(said)
    cuts = said.get("pre_tokenizer")
    # A split at spaces changes nothing, since the normalizer has replaced them.
    at_spaces = {"type": "Split", "pattern": {"String": " "}}
    cuts_nothing = not cuts or cuts | at_spaces == cuts
    return (
        found in ([_SPACES_ALIKE], [_SPACE_IN_FRONT, _SPACES_ALIKE])
        and cuts_nothing
        and not model.get("ignore_merges")
    )


def pieces_of(
    said: Mapping[str, Any], model: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """Make metadata for a tokenizer.json for which `are_pieces` is true.

    `kinds` are those of the tokens. Here, bytes and the unknown token get kinds of their own."""
    marked = np.array(kinds, np.int32)
    if model.get("byte_fallback"):
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        for byte in range(256):
            if (token_id := ids.get(f"<0x{byte:02X}>")) is not None:
                marked[token_id] = TokenKind.BYTE
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": _SPACE_IN_FRONT in _normalizers(said),
    }
    if (unknown := model.get("unk_token")) is not None and unknown in tokens:
        token_id = tokens.index(unknown)
        marked[token_id] = TokenKind.UNKNOWN
        metadata["tokenizer.ggml.unknown_token_id"] = token_id
    # Files spell runs of spaces with plain spaces if they are user-defined tokens.
    defined = [kind == TokenKind.USER_DEFINED for kind in marked.tolist()]
    return metadata | {
        "tokenizer.ggml.tokens": [
            " " * len(token) if is_one and not token.strip(SPACE) else token
            for token, is_one in zip(tokens, defined, strict=True)
        ],
        "tokenizer.ggml.token_type": marked,
        "tokenizer.ggml.scores": _scores(pairs_of(model), tokens, marked),
    }


def pairs_of(model: Mapping[str, Any]) -> Merges:
    """Return the merges of a tokenizer.json as pairs, from either of its two spellings."""
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]


def same_merges(one: Merges, other: Merges) -> bool:
    """True if two lists make the same tokens in the same order, from the same parts.

    The order among ways to make one token doesn't matter: they have one score."""
    made = [["".join(pair) for pair in merges] for merges in (one, other)]
    parts = [set(map(tuple, merges)) for merges in (one, other)]
    return made[0] == made[1] and parts[0] == parts[1]


def _scores(
    merges: Merges, tokens: Sequence[str], kinds: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    found: npt.NDArray[np.float32] = np.full(len(tokens), _SCORE_OF_MARKS, np.float32)
    for token_id in np.flatnonzero(kinds == TokenKind.NORMAL).tolist():
        # Tokens that no merge makes come last, in the order of ids.
        found[token_id] = -ranks.get(tokens[token_id], len(ranks) + token_id)
    found[kinds == TokenKind.BYTE] = 0.0
    return found


def _normalizers(said: Mapping[str, Any]) -> list[Any]:
    """Steps of the normalizer, in order."""
    found = said.get("normalizer")
    if not isinstance(found, dict):
        return []
    return list(found["normalizers"]) if found.get("type") == "Sequence" else [found]
