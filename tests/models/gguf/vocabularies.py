"""Small vocabularies in the form of GGUF metadata, trained on a file of this repository."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SOURCE = Path(__file__).parents[3] / "aioserve" / "errors.py"
TEXT = SOURCE.read_text(encoding="utf-8") + "Grüße aus 世界! 😀 it's  5,000   naïve\n\n\tcafés\r\n"
CONTROL = ("<s>", "</s>", "<|im_end|>")
DEFINED = ("<think>", "two words")
NORMAL, UNKNOWN, IS_CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"


@functools.cache
def bytes_vocabulary(size: int = 700) -> tuple[list[str], list[str]]:
    """Train a byte-level BPE. Returns tokens by id, and merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return _by_id(backend), _merges(backend)


@functools.cache
def pieces_vocabulary(size: int = 500) -> list[str]:
    """Train a BPE over characters. Returns its tokens, best first, in SentencePiece's spelling."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer: Any = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    tokens = _by_id(backend)
    characters = [token for token in tokens if len(token) == 1]
    return [token for token in tokens if len(token) > 1] + characters


def write_byte_level(directory: Path, size: int = 288) -> None:
    """Write a tokenizer.json with GPT-2's cuts and a vocabulary of this size."""
    tokens, merges = bytes_vocabulary(size)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in map(str.split, merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))


def _by_id(backend: tokenizers.Tokenizer) -> list[str]:
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def _merges(backend: tokenizers.Tokenizer) -> list[str]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges]


def byte_level(pre: str, **fields: Any) -> dict[str, Any]:
    """Make metadata of a byte-level vocabulary with control tokens and user-defined tokens."""
    tokens, merges = bytes_vocabulary()
    first = len(tokens)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *CONTROL, *DEFINED, "[PAD999]"],
        "tokenizer.ggml.token_type": _kinds(tokens, [*CONTROL], [*DEFINED], UNUSED),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def sentencepiece(architecture: str = "llama", **fields: Any) -> dict[str, Any]:
    """Make metadata of a SentencePiece vocabulary: control, bytes, runs of spaces, learned."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    runs = ["  ", "   "]
    learned = pieces_vocabulary()
    front = ["<unk>", *CONTROL, *DEFINED, *runs, *names]
    kinds = [UNKNOWN, *[IS_CONTROL] * 3, *[USER_DEFINED] * 4, *[BYTE] * 256]
    scores = [-1000.0] * 8 + [0.0] * 256 + [-float(i) for i in range(len(learned))]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*front, *learned],
        "tokenizer.ggml.token_type": np.array([*kinds, *[NORMAL] * len(learned)], np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def _kinds(
    normal: Sequence[str], control: Sequence[str], defined: Sequence[str], last: int
) -> np.ndarray:
    kinds = [NORMAL] * len(normal) + [IS_CONTROL] * len(control) + [USER_DEFINED] * len(defined)
    return np.array([*kinds, last], np.int32)
