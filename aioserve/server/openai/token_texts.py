"""Tokens as the OpenAI API writes them beside their log-probabilities: texts and bytes of ids."""

from __future__ import annotations

from aioserve.engine.engine import Engine

__all__ = ["TokenTexts"]


class TokenTexts:
    """Of one answer: what was looked up is kept. Special tokens have their names, and without a
    tokenizer each id is called "token_id:ID", as vLLM does."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer if engine.has_tokenizer else None
        self._known: dict[int, tuple[bytes, bool]] = {}
        self._written: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[bytes, bool]:
        """Its bytes, and whether they are part of the text."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def written(self, token_id: int) -> tuple[str, list[int]]:
        """Its text and its bytes. Where these are part of a character, U+FFFD stands for it."""
        written = self._written.get(token_id)
        if written is None:
            raw = self.of(token_id)[0]
            written = self._written[token_id] = raw.decode("utf-8", "replace"), list(raw)
        return written

    def legacy_text(self, token_id: int) -> str:
        """Where its bytes are part of a character, they are written as `bytes:\\xe2\\x80`."""
        raw = self.of(token_id)[0]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])

    def _look_up(self, token_id: int) -> tuple[bytes, bool]:
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode(), False
        piece = self._tokenizer.pieces[token_id]
        if piece is None:
            return self._tokenizer.special_names.get(token_id, "").encode(), False
        return (piece.encode() if isinstance(piece, str) else piece), True
