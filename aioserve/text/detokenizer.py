"""Turns ids into text, one id at a time, without ever taking text back.

Knows a tokenizer's piece table; must not know stop strings, requests or streams.
"""

from __future__ import annotations

import codecs

from aioserve.text.token_bytes import Piece, PieceTable
from aioserve.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Turns one stream's generated ids into text as they come.

    For every sequence of ids, the pushes' results and the flush's, joined, equal
    `tokenizer.decode(ids)`. `push` gives out all text that no later id can change: with
    byte-level BPE an incomplete character is held, with byte fallback a run of byte tokens
    until it ends (an invalid byte anywhere turns the run's every byte into U+FFFD). Not
    thread-safe: one stream, one thread at a time.
    """

    __slots__ = ("_byte_level", "_first", "_held", "_pieces", "_plain", "_strip_left", "_texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self._pieces: PieceTable = pieces
        self._texts: dict[int, str] = pieces.texts
        self._byte_level = pieces.byte_level
        self._held = bytearray()
        """Bytes of a character that isn't complete, or of a run that goes on."""
        self._first = pieces.first_differs
        self._strip_left = pieces.strip_left
        self._plain = not self._first and not self._strip_left
        """Whether a whole piece is its own text: nothing is held, and nothing is to be left out."""

    def push(self, token_id: int) -> str:
        """Text that became final with this id; often empty. O(1) amortised.

        Raises `InvariantError` for a negative id.
        """
        if self._plain:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        piece = self._pieces[token_id]
        return "" if piece is None else self._push_slow(token_id, piece)

    def flush(self) -> str:
        """The held tail, when no further id follows; incomplete characters become U+FFFD."""
        return self._strip(self._end_run())

    def _push_slow(self, token_id: int, piece: Piece) -> str:
        if self._first:
            self._first = False
            piece = self._pieces.first(token_id)
        if isinstance(piece, bytes):
            held, text = self._held, ""
            held += piece
            if self._byte_level:
                # What `codecs`' incremental decoder does, in less time: that is Python too.
                text, used = codecs.utf_8_decode(held, "replace", False)
                del held[:used]
                text = self._strip(text)
            self._plain = not held and not self._strip_left
            return text
        text = self._strip(self._end_run() + (piece or ""))
        self._plain = not self._strip_left
        return text

    def _end_run(self) -> str:
        """Text of what is held, to which nothing is added any more."""
        if not self._held:
            return ""
        held = bytes(self._held)
        self._held.clear()
        try:
            return held.decode()
        except UnicodeDecodeError:
            return held.decode(errors="replace") if self._byte_level else "\ufffd" * len(held)

    def _strip(self, text: str) -> str:
        """Remove what is left to remove at the start of the whole text."""
        if not self._strip_left or not text:
            return text
        char = self._pieces.strip_char
        kept = 0
        while kept < min(self._strip_left, len(text)) and text[kept] == char:
            kept += 1
        self._strip_left = self._strip_left - kept if kept == len(text) else 0
        return text[kept:]
