"""Models by the word that names them on the command line.

A word is a directory, a GGUF file, an embedded model, `random:SHAPE`, or a hub id, which is
downloaded unless it is in the cache. For any other word, the error says what to type.

Models with random weights, `random:30m` and `random:0.6b`, are Qwen3 in bfloat16, for benchmarks.
They are written once into the user's cache directory: `$XDG_CACHE_HOME` or `~/.cache`, under
`aioserve/random`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aioserve.cli._hub import download
from aioserve.cli._interrupts import leaving_at_once
from aioserve.errors import ModelNotFoundError
from aioserve.isolation import shown
from aioserve.models.hub import HubName
from aioserve.models.resolve import expanded, like_embedded, named_file, resolve

__all__ = [
    "EMBEDDED",
    "PREFIX",
    "SHAPES",
    "check_first_word",
    "check_model",
    "local_model",
    "model_or_random",
    "random_model",
]

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
    """Return the directory of the random model `random:SHAPE`, or any other `model` unchanged."""
    return str(random_model(model.removeprefix(PREFIX))) if model.startswith(PREFIX) else model


def random_model(shape: str) -> Path:
    """Return the directory of the random model of a shape, written if it isn't there.

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
    # Write beside and rename, so that an interrupted run leaves no half model behind.
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        written = write_random_model(Path(temporary) / "model", COMMON | SHAPES[shape])
        shutil.rmtree(directory, ignore_errors=True)
        written.rename(directory)
    return directory


EMBEDDED = "pyhelp"
MOST_QUOTED_CHARS = 80
"""Most characters of a prompt that a message repeats."""


def local_model(model: str) -> str:
    """Return what an engine takes for `model`, once its files are on this machine.

    Writes random models and downloads hub ids. Raises `ModelNotFoundError` and `ModelError`.
    """
    if (name := _to_download(model)) is not None:
        download(name)
    return model_or_random(model)


def check_model(model: str) -> None:
    """Raise `ModelNotFoundError` if `model` can't be a model.

    It downloads nothing: a model that could be downloaded passes.
    """
    if model.startswith(PREFIX) and model.removeprefix(PREFIX) in SHAPES:
        return
    if _to_download(model) is None:
        resolve(model_or_random(model))


def check_first_word(model: str, prompt: str | None) -> None:
    """Do as `check_model` for the words of `aioserve run`.

    If they are in the wrong order or the model is missing, the error says what to type.
    """
    # A word such as `and/or` before the model is a prompt.
    if _to_download(model) is not None and prompt is not None and _is_here(prompt):
        raise ModelNotFoundError(_advice(model, prompt))
    try:
        check_model(model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(_advice(model, prompt, error) or str(error)) from error


def _to_download(model: str) -> HubName | None:
    """Return the model to look for at the hub: a name of its shape that is nothing here."""
    name = HubName.of(model)
    if name is None or named_file(model) is not None or os.path.exists(expanded(model)):
        return None
    try:
        resolve(model)
    except ModelNotFoundError:
        # Without the library, the error of `resolve` names it, and the other places searched.
        return name if find_spec("huggingface_hub") is not None else None
    return None


def _advice(model: str, prompt: str | None, error: object = None) -> str | None:
    """Return the command to type if words are in the wrong order or the model is missing.

    `error` says what names a model.
    """
    if prompt is not None and _is_here(prompt):
        return (
            f"{shown(model)} is no model; the model comes first, type: "
            f"aioserve run {_quoted(prompt)} {_quoted(model)}"
        )
    is_path = "/" in model and not any(char.isspace() for char in model)
    if not model or is_path or named_file(model) or os.path.exists(expanded(model)):
        return None
    if (near := like_embedded(model)) is not None:
        rest = "" if prompt is None else f" {_quoted(prompt)}"
        return f"{shown(model)} is no model; did you mean: aioserve run {near}{rest}"
    if prompt is not None:
        return None
    advice = f"for the embedded model type: aioserve run {EMBEDDED} {_quoted(model)}"
    if any(char.isspace() for char in model):
        return f"{shown(model)} is no model; {advice}"
    return f"{error}; if it is a prompt, {advice}"


def _is_here(name: str) -> bool:
    try:
        resolve(name)
    except ModelNotFoundError:
        return False
    return True


def _quoted(text: str) -> str:
    """Quote a text for a shell."""
    if len(text) > MOST_QUOTED_CHARS or not text.isprintable():
        return '"..."'
    quoted = shlex.quote(text)
    return f"-- {quoted}" if text.startswith("-") else quoted
