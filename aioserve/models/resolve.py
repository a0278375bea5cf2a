"""Finds the directory or file of a model by the name that a user gives it. No torch, no network."""

from __future__ import annotations

import difflib
import os
import re
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from aioserve import assets
from aioserve.errors import ModelNotFoundError
from aioserve.models.gguf.parts import holds_gguf, is_gguf
from aioserve.models.hub import INSTALL_HUB, HubName, cached_model

__all__ = [
    "HUB_EXAMPLE",
    "expanded",
    "is_model",
    "like_embedded",
    "named_file",
    "resolve",
    "ways_to_name",
]

HUB_EXAMPLE = "Qwen/Qwen3-0.6B"
"""A model of the hub that errors name as an example: a small one of an architecture that is
supported."""

_BARE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_WORD = re.compile(r"[A-Za-z0-9_.:-]+")
"""A name without owner or folder, as Ollama has them."""
_LEAST_LIKENESS = 0.7
_LEAST_FILE_LIKENESS = 0.5
_MOST_LIKE_FILES = 3
_MOST_ENTRIES = 10_000  # of a folder, whose names are compared
_MOST_LOOKED_AT = 20  # of these, whether they are models
_MOST_NAME_CHARS = 300  # that a message shows


def resolve(name: str | Path) -> Path:
    """The directory or GGUF file of the model `name`: tried as a path, an embedded model and a
    Hugging Face id.

    Ids are looked up in huggingface_hub's local cache, where that library is installed; nothing is
    downloaded. Raises `ModelNotFoundError` naming everything that was tried, or that it is an
    adapter, which isn't supported.
    """
    if name == "":
        raise ModelNotFoundError("a model must be named, got an empty string")
    # Not the methods of `Path`, which raise where a name is too long or a folder can't be entered.
    path = expanded(name)
    if is_model(path):
        return path
    if os.path.isfile(path / "adapter_config.json"):
        raise ModelNotFoundError(
            f"{_printable(path)}: an adapter (LoRA) alone is not supported; merge it into its base "
            "model, as merge_and_unload() of peft does, and name the directory with the result"
        )
    if (file := named_file(name)) is not None and not os.path.isdir(file):
        raise ModelNotFoundError(f"model {_short(name)!r} not found: {_no_file(file)}")
    kind = "file" if path.suffix.lower() == ".gguf" else "directory"
    tried = [f"no {kind} {_printable(path)}"]
    if os.path.isdir(path):
        tried = [f"the directory {_printable(path)} has no config.json that can be read"]
    ways = None
    if isinstance(name, str):
        if (embedded := assets.model_path(name)) is not None:
            return embedded
        near = like_embedded(name)
        ways = ways_to_name() if near is None and _WORD.fullmatch(name) is not None else None
        hint = f"did you mean {near}?" if near else f"there is {', '.join(assets.EMBEDDED_MODELS)}"
        tried.append("no embedded model of that name" + ("" if ways else f" ({hint})"))
        if (hub_name := _hub_name(name)) is not None:
            found = cached_model(hub_name)
            if isinstance(found, Path):
                return found
            tried.append(found)
    if like := _models_like(path):
        tried.append(f"near it in name: {', '.join(like)}")
    if ways is not None:
        tried.append(ways)
    raise ModelNotFoundError(f"model {_short(name)!r} not found: {'; '.join(tried)}")


def ways_to_name() -> str:
    """Names that a model may have, with an example of each."""
    embedded = " or ".join(assets.EMBEDDED_MODELS)
    return (
        f"a model is {embedded}, the embedded one; a path, as ./DIRECTORY with config.json or "
        f"./FILE.gguf; or OWNER/NAME at the Hugging Face hub, as {HUB_EXAMPLE} ({_how_to_get()})"
    )


def _how_to_get() -> str:
    if find_spec("huggingface_hub") is None:
        return f"{INSTALL_HUB} first"
    return f"`hf download {HUB_EXAMPLE}` puts it into the local cache"


def named_file(name: str | Path) -> Path | None:
    """The path of the GGUF file that `name` is, there or not; None where it is none. The name of a
    file of the hub is one if the directory is here that it begins with."""
    path = expanded(name)
    if path.suffix.lower() != ".gguf":
        return None
    is_of_hub = isinstance(name, str) and HubName.of(name) is not None
    return None if is_of_hub and not os.path.isdir(path.parent) else path


def is_model(path: Path) -> bool:
    """Whether a model can be read from `path`, as `aioserve.models.files` does."""
    if os.path.isfile(path / "config.json") or is_gguf(path):
        return True
    return os.path.isdir(path) and holds_gguf(path)


def like_embedded(name: str) -> str | None:
    """The embedded model of which `name` may be a misspelling."""
    near = difflib.get_close_matches(name.lower(), assets.EMBEDDED_MODELS, 1, _LEAST_LIKENESS)
    return near[0] if near else None


def expanded(name: str | Path) -> Path:
    """The path with the home directory that a leading "~" or "~user" stands for.

    Raises `ModelNotFoundError` where there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"model {_short(name)!r} not found: {error}") from error


def _models_like(path: Path) -> list[str]:
    """Paths of models beside this one whose names are like its own."""
    wanted = path.name.lower().replace(":", "-")
    try:
        with os.scandir(path.parent) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    except (OSError, ValueError):  # no directory, one that can't be read, a null byte
        return []
    folded = {name.lower().removesuffix(".gguf"): name for name in names}
    like = difflib.get_close_matches(wanted, folded, _MOST_LOOKED_AT, _LEAST_FILE_LIKENESS)
    models = filter(is_model, [path.parent / folded[name] for name in like])
    return [_printable(os.path.join(".", one)) for one in islice(models, _MOST_LIKE_FILES)]


def _hub_name(name: str) -> HubName | None:
    """A repository may be in the cache that has no owner."""
    bare = _BARE_NAME.fullmatch(name) is not None
    return HubName(name) if bare else HubName.of(name)


def _no_file(path: Path) -> str:
    """Says that a GGUF file isn't there, and which are with such a name."""
    said = f"there is no file {_printable(path)}"
    try:
        names = [one for one in os.listdir(path.parent) if one.lower().endswith(".gguf")]
    except FileNotFoundError:
        return f"{said}, and no directory {_printable(path.parent)}"
    except (OSError, ValueError):  # a directory that can't be read, a name with a null byte
        return said
    wanted, folded = path.name.lower(), {one.lower(): one for one in sorted(names)}
    near = difflib.get_close_matches(wanted, folded, _MOST_LIKE_FILES, _LEAST_FILE_LIKENESS)
    if not near:
        return said
    return f"{said}; near it in name: {', '.join(_printable(Path(folded[one])) for one in near)}"


def _printable(path: str | Path) -> str:
    text = _short(path)
    return text if text.isprintable() else repr(text)


def _short(name: str | Path) -> str:
    text = str(name)
    if len(text) <= _MOST_NAME_CHARS:
        return text
    return f"{text[: _MOST_NAME_CHARS // 2]}... ({len(text)} characters)"
