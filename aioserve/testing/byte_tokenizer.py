"""A tokenizer with one token per byte, and one with the marks of chats in addition."""

from __future__ import annotations

import tokenizers

from aioserve.text.tokenizer import Tokenizer

__all__ = ["TURN_BEGINS", "TURN_ENDS", "byte_characters", "byte_tokenizer", "chat_tokenizer"]

TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
"""Marks of ChatML."""


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer in which byte `b` of a text has the id `b`."""
    return Tokenizer(_backend(), source="byte tokenizer")


def chat_tokenizer() -> Tokenizer:
    """Return a `byte_tokenizer` in which 256 begins a turn and 257 ends it."""
    backend = _backend()
    backend.add_special_tokens([TURN_BEGINS, TURN_ENDS])
    return Tokenizer(backend, source="chat tokenizer")


def _backend() -> tokenizers.Tokenizer:
    alphabet = {char: byte for byte, char in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE (GPT-2) writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
