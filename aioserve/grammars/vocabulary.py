"""Vocabulary of a tokenizer for llguidance: the bytes that each id adds to a completion.

They are taken from the same pieces that completions are put together from
(`aioserve.text.token_bytes`). So a grammar sees the text that the caller gets. Special tokens add
none, and are allowed only where a grammar names them.

Making a vocabulary takes a second or less for 150,000 tokens. Nearly all of that is in two calls of
the library that hold the interpreter's lock. So a model has one, made when its engine starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.text.token_bytes import Piece
from aioserve.text.tokenizer import Tokenizer

__all__ = ["SLICES", "Vocabulary", "llguidance"]

_MARK = "\x02"
"""Character that no vocabulary has in longer tokens."""

SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']
"""Texts of tokens that are sorted out beforehand, as a string may go on with any of them.

Without that, masks within strings take milliseconds. The library's own list has two more, for
longer tokens and for spaces. These take as long to make and are hardly ever of use to our grammars.
"""


def llguidance() -> ModuleType:
    """Import the library, which takes a fifth of a second: call it on a thread."""
    import llguidance

    return llguidance


class Vocabulary:
    """Vocabulary of one model with logits that are `num_logits` wide. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, num_logits: int) -> None:
        self.num_logits = num_logits
        self.num_words: int = -(-num_logits // 32)
        """Number of int32s of a mask with a bit for each logit."""
        size = min(tokenizer.vocab_size, num_logits)
        self.end: int = size
        """Id that stands for the end of a completion in llguidance; beyond every id."""
        pieces = tokenizer.pieces
        texts = [_bytes(pieces[token_id]) for token_id in range(size)]
        whole = llguidance().LLTokenizer(_Wrapped(tokenizer, texts), slices=[])
        self.library: Any = whole.with_slices(SLICES)
        """Object of llguidance. It is made in two calls, so that other threads can run in
        between.
        """
        self.not_first: npt.NDArray[np.int32] | None = None
        """Mask int32 `[num_words]` of ids whose text differs at the start of a completion, where
        the tokenizer drops a space; None if there are none."""
        self.not_first_but_for_spaces: npt.NDArray[np.int32] | None = None
        """Mask like `not_first` of ids whose text differs by more than spaces before it."""
        strips = pieces.strip_char.encode() if pieces.strip_left else None
        if strips is not None or pieces.first_differs:
            firsts = texts
            if pieces.first_differs:
                firsts = [_bytes(pieces.first(token_id)) for token_id in range(size)]
            stripped = [strips is not None and text.startswith(strips) for text in texts]
            self.not_first = self._mask(
                cut or first != text
                for cut, first, text in zip(stripped, firsts, texts, strict=True)
            )
            self.not_first_but_for_spaces = self._mask(
                (cut and strips != b" ") or first.lstrip(b" ") != text.lstrip(b" ")
                for cut, first, text in zip(stripped, firsts, texts, strict=True)
            )

    def _mask(self, marked: Iterable[bool]) -> npt.NDArray[np.int32]:
        bits = np.zeros(32 * self.num_words, np.uint8)
        bits[: self.end] = np.fromiter(marked, np.uint8)
        return np.packbits(bits, bitorder="little").view(np.int32)


class _Wrapped:
    """Tokenizer as `LLTokenizer` asks for one that isn't its own.

    It must not lead back to that: such a circle would never be collected.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, texts: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        size = len(texts)
        specials = {i: name for i, name in tokenizer.special_names.items() if i < size}
        self.special_token_ids = list(specials)
        self.eos_token_id = size

    @property
    def tokens(self) -> list[bytes]:
        tokens = [*self._texts, b""]
        for token_id in self.special_token_ids:
            tokens[token_id] = self._tokenizer.special_names[token_id].encode()
        return tokens

    def __call__(self, text: str) -> list[int]:
        """Return ids whose bytes are exactly those of `text`, as the tokenizer would write it."""
        ids = self._tokenizer.encode_plain(text)
        if self._spells(ids, text):
            return ids
        # A tokenizer that puts a space before the text puts it before the mark.
        marked = self._tokenizer.encode_plain(_MARK + text)
        for start in range(1, min(len(marked), 4)):
            if self._spells(marked[start:], text):
                return marked[start:]
        return self._longest_first(text.encode())

    def _spells(self, ids: list[int], text: str) -> bool:
        texts = self._texts
        return b"".join([texts[i] if i < len(texts) else b"\xff" for i in ids]) == text.encode()

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(at + self._longest, len(data)), at, -1):
                if (token_id := self._ids.get(data[at:end])) is not None:
                    ids.append(token_id)
                    at = end
                    break
            else:
                break  # no token has this byte, so no completion has what follows
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token_id for token_id, text in enumerate(self._texts) if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts), default=0)


def _bytes(piece: Piece) -> bytes:
    if piece is None:
        return b""
    return piece if isinstance(piece, bytes) else piece.encode()
