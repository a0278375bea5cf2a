"""`random:30m` and `random:0.6b`: Qwen3 models with random weights, for benchmarks.

Written once into the user's cache directory (`$XDG_CACHE_HOME` or `~/.cache`, under
`aioserve/random`), in bfloat16, and found there again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aioserve.cli._interrupts import leaving_at_once
from aioserve.errors import ModelNotFoundError

__all__ = ["PREFIX", "SHAPES", "model_or_random", "random_model"]

PREFIX = "random:"

SHAPES: dict[str, dict[str, Any]] = {
    "30m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 8192,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
}
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def model_or_random(model: str) -> str:
    """`model` itself, or the directory of the random model that `random:SHAPE` stands for."""
    return str(random_model(model.removeprefix(PREFIX))) if model.startswith(PREFIX) else model


def random_model(shape: str) -> Path:
    """The directory of the random model of that shape, written if it isn't there.

    Raises `ModelNotFoundError` for an unknown shape.
    """
    if shape not in SHAPES:
        known = ", ".join(PREFIX + name for name in SHAPES)
        raise ModelNotFoundError(f"no random model {PREFIX + shape!r}; there are: {known}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioserve/random"
    directory = cache / f"qwen3-{shape}"
    if (directory / "config.json").is_file():
        return directory
    with leaving_at_once():
        from aioserve.testing.random_model import write_random_model

    print(f"writing random weights to {directory}", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, so that an interrupted run leaves no half model behind.
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        written = write_random_model(Path(temporary) / "model", COMMON | SHAPES[shape])
        shutil.rmtree(directory, ignore_errors=True)
        written.rename(directory)
    return directory
