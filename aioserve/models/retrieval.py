"""Settings for embeddings in a model's files, in the format of sentence-transformers.

    modules.json ─► 1_Pooling/config.json   hidden states that make the vector
                 ─► Normalize               scaling of the vector to length 1
    config_sentence_transformers.json       prompts that go before texts

An unsupported setting is kept as a message for requests that need it. No torch here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from aioserve.arguments import shown
from aioserve.errors import ModelError
from aioserve.json_file import read_json_list, read_json_object
from aioserve.models.fields import Fields

__all__ = ["MODULES_FILE", "Retrieval", "read_retrieval"]

MODULES_FILE: str = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
MAX_BYTES = 1 << 20
MAX_MODULES = 32
MAX_PROMPTS = 256
MAX_NAMED = 8
"""Most ways of pooling that a message names."""
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_MODE = re.compile(r"\w{1,60}")
_MODES: Mapping[str, Literal["last", "mean"]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_SHORT = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
_POSSIBLE = "pooling_mode_lasttoken and pooling_mode_mean_tokens are possible"


class Retrieval(msgspec.Struct, frozen=True):
    """Defaults of requests for embeddings."""

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = {}
    """Prompts that go before texts, by name."""
    default_prompt: str | None = None
    """Name of the prompt for requests that name none; None: no prompt."""
    is_from_files: bool = False
    """True if the model's files choose the pooling."""
    problem: str | None = None
    """Unsupported setting of the files, without which the model's own vectors can't be made."""


def read_retrieval(directory: Path) -> Retrieval:
    """Read the settings in a model's directory. Raises `ModelError` for malformed files."""
    file = directory / MODULES_FILE
    if not os.path.lexists(file):
        return Retrieval()
    pooling: Literal["last", "mean"] = "last"
    normalize = False
    problem: str | None = None
    kinds: list[str] = []
    modules = read_json_list(file, MAX_BYTES)
    if len(modules) > MAX_MODULES:
        raise ModelError(f"{file}: must have at most {MAX_MODULES} modules, got {len(modules)}")
    for index, values in enumerate(modules):
        if not isinstance(values, dict):
            raise ModelError(f"{file}: [{index}] must be an object, got {shown(values)}")
        module = Fields(values, str(file), f"[{index}].")
        kind = module.text("type").rpartition(".")[2]
        kinds.append(kind)
        if kind == "Pooling":
            path = module.text("path", "")
            if not _PATH.fullmatch(path):
                module.invalid("path", "the name of a folder")
            pooling, why = _pooling(directory / path / "config.json")
            problem = problem or why
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            problem = problem or (
                f"{MODULES_FILE}: [{index}].type = {shown(values['type'])} is not supported; "
                "Transformer, Pooling and Normalize are"
            )
    prompts, default = _prompts(directory / PROMPTS_FILE)
    return Retrieval(pooling, normalize, prompts, default, "Pooling" in kinds, problem)


def _pooling(file: Path) -> tuple[Literal["last", "mean"], str | None]:
    """Read the pooling, and the reason why it isn't supported, or None."""
    config = Fields(read_json_object(file, MAX_BYTES), str(file))
    where = f"{file.parent.name}/{file.name}"
    modes = [name for name in config.values if name.startswith("pooling_mode_")]
    chosen = [name for name in modes if config.flag(name, False)]
    if config.has("pooling_mode"):
        named = config.text("pooling_mode")
        chosen = [_SHORT.get(named, named)]
    if len(chosen) != 1:
        said = ", ".join(map(_named, sorted(chosen)[:MAX_NAMED])) or "none"
        more = f" and {len(chosen) - MAX_NAMED} more" if len(chosen) > MAX_NAMED else ""
        why = f"{where} asks for {said}{more}: one way of pooling is supported; {_POSSIBLE}"
        return "last", why
    if (found := _MODES.get(chosen[0])) is None:
        why = f"{where}: {_named(chosen[0])} is not supported; {_POSSIBLE}"
        if "cls" in chosen[0]:
            why += "; the first token of a decoder sees itself alone"
        return "last", why
    if found == "mean" and config.has("include_prompt") and not config.flag("include_prompt", True):
        return found, f"{where}: include_prompt = false is not supported with a mean"
    return found, None


def _named(mode: str) -> str:
    return mode if _MODE.fullmatch(mode) else shown(mode)


def _prompts(file: Path) -> tuple[dict[str, str], str | None]:
    if not os.path.lexists(file):
        return {}, None
    config = Fields(read_json_object(file, MAX_BYTES), str(file))
    values: Any = config.values.get("prompts") or {}
    if not isinstance(values, dict) or len(values) > MAX_PROMPTS:
        config.invalid("prompts", f"an object of at most {MAX_PROMPTS} texts")
    for name, text in values.items():
        if not isinstance(text, str):
            config.invalid("prompts", f"an object of texts, of which {shown(name)} is none")
    default = config.text("default_prompt_name") if config.has("default_prompt_name") else None
    if default is not None and default not in values:
        config.invalid("default_prompt_name", "the name of one of the prompts")
    return dict(values), default
