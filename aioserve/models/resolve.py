"""Search for the directory or file of a model that a user named. No torch, no network."""

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
"""Example of a model on the hub, for errors: a small one of a supported architecture."""

_BARE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_WORD = re.compile(r"[A-Za-z0-9_.:-]+")
"""Pattern of a name without owner or folder, as in Ollama."""
_LEAST_LIKENESS = 0.7
_LEAST_FILE_LIKENESS = 0.5
_MOST_LIKE_FILES = 3
_MOST_ENTRIES = 10_000  # entries of a folder whose names are compared
_MOST_LOOKED_AT = 20  # of these, the most similar ones, checked to be models
_MOST_NAME_CHARS = 300  # characters of a name in a message


def resolve(name: str | Path) -> Path:
    """Find the directory or GGUF file of a model: by path, embedded model, then Hugging Face id.

    Ids are looked up in huggingface_hub's local cache if that library is installed; nothing is
    downloaded. Raises `ModelNotFoundError` that lists what was tried. It also refuses adapters,
    which are not supported.
    """
    if name == "":
        raise ModelNotFoundError("a model must be named, got an empty string")
    # `os.path` returns False where methods of `Path` raise: long names, folders without access.
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
    """Explain the kinds of names of models, with an example of each."""
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
    """Return the path of the GGUF file that `name` denotes, whether it exists or not; else None.

    A name that the hub could have, too, is a path only if its directory exists."""
    path = expanded(name)
    if path.suffix.lower() != ".gguf":
        return None
    is_of_hub = isinstance(name, str) and HubName.of(name) is not None
    return None if is_of_hub and not os.path.isdir(path.parent) else path


def is_model(path: Path) -> bool:
    """True if `path` is a directory or file that `aioserve.models.files` can read."""
    if os.path.isfile(path / "config.json") or is_gguf(path):
        return True
    return os.path.isdir(path) and holds_gguf(path)


def like_embedded(name: str) -> str | None:
    """Embedded model with a name similar to `name`, or None."""
    near = difflib.get_close_matches(name.lower(), assets.EMBEDDED_MODELS, 1, _LEAST_LIKENESS)
    return near[0] if near else None


def expanded(name: str | Path) -> Path:
    """Replace a leading "~" or "~user" of a path by the home directory.

    Raises `ModelNotFoundError` if the user doesn't exist.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"model {_short(name)!r} not found: {error}") from error


def _models_like(path: Path) -> list[str]:
    """Paths of models in the same folder with similar names."""
    wanted = path.name.lower().replace(":", "-")
    try:
        with os.scandir(path.parent) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    except (OSError, ValueError):  # a missing or unreadable directory, a null byte
        return []
    folded = {name.lower().removesuffix(".gguf"): name for name in names}
    like = difflib.get_close_matches(wanted, folded, _MOST_LOOKED_AT, _LEAST_FILE_LIKENESS)
    models = filter(is_model, [path.parent / folded[name] for name in like])
    return [_printable(os.path.join(".", one)) for one in islice(models, _MOST_LIKE_FILES)]


def _hub_name(name: str) -> HubName | None:
    """Parse a name of the hub. The cache may have repositories without an owner, too."""
    bare = _BARE_NAME.fullmatch(name) is not None
    return HubName(name) if bare else HubName.of(name)


def _no_file(path: Path) -> str:
    """Message that a GGUF file is missing, with similar names in its folder."""
    said = f"there is no file {_printable(path)}"
    try:
        names = [one for one in os.listdir(path.parent) if one.lower().endswith(".gguf")]
    except FileNotFoundError:
        return f"{said}, and no directory {_printable(path.parent)}"
    except (OSError, ValueError):  # an unreadable directory, a null byte
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
