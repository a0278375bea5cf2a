"""Text or bytes that each token id adds, from a tokenizer's decoder.

Knows the decoders that generative tokenizers use: byte-level BPE, SentencePiece with Metaspace or
Replace, byte fallback, or none at all. It takes them apart. The text of a run of ids is then the
pieces of its ids, put together by a few fixed rules (see `PieceTable`). Calling the library's
`decode` on a sliding window costs several times more per token. It also can't be right for every
sequence: one invalid byte changes how the whole run of byte tokens before it decodes. Other
decoders are refused at load. Must not know about requests or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from aioserve.errors import InvariantError, UnsupportedModelError

__all__ = ["Piece", "PieceTable"]

Piece = str | bytes | None
"""Text of a token, or its raw bytes, which count only together with their neighbours'. None for a
token that adds nothing (special, or not in the vocabulary).
"""

MAX_NAMED_STEPS = 10
_MAX_TOKEN_ID = 2**32 - 1
NUM_READY = 4096
"""Ids, from 0 on, whose pieces are made at the start. A vocabulary of merges begins with the
commonest, and a step with new tokens would wait for each.
"""
# The second form is what Rust's number parser, which the tokenizers library uses, also accepts.
_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class PieceTable(dict[int, Piece]):
    """Pieces by token id, made on first use except for the first ids; look them up with
    `table[token_id]`.

    The text of a sequence is its pieces (None skipped) in order, by these rules:

    - With `byte_level`, every piece is bytes and the text is their UTF-8 decode. Invalid sequences
      become U+FFFD (maximal subparts, as in Rust's lossy conversion).
    - Otherwise pieces are text, except in runs of bytes pieces. A maximal run is decoded as UTF-8
      if all of it is valid, else it is one U+FFFD per byte.
    - The first piece is `first(token_id)` instead, if the decoder treats it differently.
    - Up to `strip_left` leading `strip_char` are removed from the result.

    Texts of pieces used so far that don't depend on neighbours are in `texts`. Only bytes that are
    part of a character, or of a run, are missing.

    Raises `UnsupportedModelError` for a decoder that doesn't fit these rules. Safe to use from
    several threads: a lost race computes the same piece twice.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self._id_to_token = backend.id_to_token
        self._special = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        self.byte_level: bool = False
        self.strip_left: int = 0
        self.strip_char: str = " "
        self.first_differs: bool = False
        self._byte_fallback = False
        self._later: list[Callable[[str], str]] = []
        self._first: list[Callable[[str], str]] = []
        self._compile(_decoder_steps(backend), source)
        for token_id in range(min(backend.get_vocab_size(), NUM_READY)):
            self.__missing__(token_id)

    def __missing__(self, token_id: int) -> Piece:
        piece = self._piece(token_id, self._later)
        self[token_id] = piece
        if piece is None or isinstance(piece, str):
            self.texts[token_id] = piece or ""
        elif self.byte_level:
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                return piece
            self.texts[token_id] = text
        return piece

    def first(self, token_id: int) -> Piece:
        """Return the piece of a token that only None pieces came before."""
        return self._piece(token_id, self._first)

    def _piece(self, token_id: int, transforms: list[Callable[[str], str]]) -> Piece:
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise InvariantError(f"a token id must be in [0, {_MAX_TOKEN_ID}], got {token_id}")
        token = self._id_to_token(token_id)
        if token is None or token in self._special:
            return None
        for transform in transforms:
            token = transform(token)
        if self.byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        return token

    def _compile(self, steps: list[dict[str, Any]], source: str) -> None:
        """Read the decoder's steps in the one order that the rules above cover."""
        if not steps:
            self.first_differs = True
            self._later.append(lambda token: " " + token)
            return
        rest = list(steps)
        while rest and rest[0]["type"] in ("Replace", "Metaspace"):
            if not self._add_transform(rest[0]):
                break
            rest.pop(0)
        whole = False
        if rest and rest[0]["type"] == "ByteLevel":
            self.byte_level = whole = True
            rest.pop(0)
        elif rest and rest[0]["type"] == "ByteFallback":
            self._byte_fallback = True
            rest.pop(0)
        while rest and rest[0]["type"] == "Fuse":
            whole = True
            rest.pop(0)
        if rest and rest[0]["type"] == "Strip" and whole and rest[0]["stop"] == 0:
            self.strip_left = rest[0]["start"]
            self.strip_char = rest[0]["content"]
            rest.pop(0)
        if rest or (self.byte_level and self.first_differs):
            names = " + ".join(step["type"] for step in steps[:MAX_NAMED_STEPS])
            if len(steps) > MAX_NAMED_STEPS:
                names += f" + {len(steps) - MAX_NAMED_STEPS} more"
            raise UnsupportedModelError(
                f"{source}: decoder {names} is not supported (supported: ByteLevel; Metaspace; "
                "Replace of a string, ByteFallback, Fuse and a left Strip, in this order)"
            )

    def _add_transform(self, step: dict[str, Any]) -> bool:
        if step["type"] == "Metaspace":
            mark = step["replacement"]
            self._later.append(lambda token: token.replace(mark, " "))
            if step.get("prepend_scheme", "always") == "never":
                self._first.append(self._later[-1])
            else:
                self._first.append(lambda token: token.replace(mark, ""))
                self.first_differs = True
            return True
        old = step["pattern"].get("String")
        if not old:
            return False
        new = step["content"]
        self._later.append(lambda token: token.replace(old, new))
        self._first.append(self._later[-1])
        return True


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder as a flat list of its JSON steps; empty without a decoder."""
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    return _flatten(json.loads(decoder.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes of byte-level BPE by their characters, as GPT-2 defined them.

    Printable Latin-1 characters stand for their own byte. The other bytes, in order, are written as
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token. A token outside the alphabet (an added one, say) is its own
    UTF-8 bytes.
    """
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
