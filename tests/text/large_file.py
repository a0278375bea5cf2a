"""A tokenizer.json of real size, made up on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

__all__ = ["NUM_TOKENS", "write_large_file"]

NUM_TOKENS = 151_643
NUM_ADDED = 22
MAX_TOKEN_CHARS = 14


def write_large_file(directory: Path, *, num_tokens: int = NUM_TOKENS, seed: int = 0) -> Path:
    """Write a byte-level BPE tokenizer in the form and size of Qwen2.5's, and return the file.

    It has 11 MB, a merge for each token beyond the bytes, and added tokens with the ids that
    follow. Tokens are made of earlier ones, mostly of very early ones, as trained tokens are.
    """
    draw = random.Random(seed).random
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    while len(tokens) < num_tokens:
        left = tokens[int(len(tokens) * draw() ** 3)]
        right = tokens[int(len(tokens) * draw() ** 4)]
        token = left + right
        if len(token) <= MAX_TOKEN_CHARS and token not in known:
            known.add(token)
            tokens.append(token)
            merges.append((left, right))
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    written: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(num_tokens + i, f"<|added_{i}|>") for i in range(NUM_ADDED)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": split},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(written, ensure_ascii=False, indent=2), encoding="utf-8")
    return file


def _added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}
