"""From what a user calls a model to the directory that holds it. No torch, no network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from aioserve import assets
from aioserve.errors import ModelNotFoundError

__all__ = ["expanded", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_MOST_NAME_CHARS = 300  # that a message shows


def resolve(name: str | Path) -> Path:
    """The directory of the model `name`: tried as a path, an embedded model and a Hugging Face id.

    Ids are looked up in huggingface_hub's local cache, where that library is installed; nothing is
    downloaded. Raises `ModelNotFoundError` naming everything that was tried.
    """
    if name == "":
        raise ModelNotFoundError("a model must be named, got an empty string")
    # Not the methods of `Path`, which raise where a name is too long or a folder can't be entered.
    path = expanded(name)
    if os.path.isfile(path / "config.json"):
        return path
    tried = [f"no directory {_printable(path)}"]
    if os.path.isdir(path):
        tried = [f"the directory {_printable(path)} has no config.json that can be read"]
    if isinstance(name, str):
        if (embedded := assets.model_path(name)) is not None:
            return embedded
        tried.append(f"no embedded model of that name (there is {_listed(assets.EMBEDDED_MODELS)})")
        if _HUB_ID.fullmatch(name):
            found = _from_hub_cache(name)
            if isinstance(found, Path):
                return found
            tried.append(found)
    raise ModelNotFoundError(f"model {_short(name)!r} not found: {'; '.join(tried)}")


def expanded(name: str | Path) -> Path:
    """The path with the home directory that a leading "~" or "~user" stands for.

    Raises `ModelNotFoundError` where there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"model {_short(name)!r} not found: {error}") from error


def _from_hub_cache(hub_id: str) -> Path | str:
    """The cached snapshot, or why there is none."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return "huggingface_hub is not installed, so its cache was not searched"
    try:
        snapshot = huggingface_hub.snapshot_download(hub_id, local_files_only=True)
    except HFValidationError:
        return "no Hugging Face id"
    except LocalEntryNotFoundError:
        return f"not in the local Hugging Face cache (`hf download {hub_id}` puts it there)"
    except OSError as error:
        return f"the local Hugging Face cache can't be read: {error}"
    path = Path(snapshot)
    if not os.path.isfile(path / "config.json"):
        return f"the cached snapshot {path} has no config.json"
    return path


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _printable(path: Path) -> str:
    text = _short(path)
    return text if text.isprintable() else repr(text)


def _short(name: str | Path) -> str:
    text = str(name)
    if len(text) <= _MOST_NAME_CHARS:
        return text
    return f"{text[: _MOST_NAME_CHARS // 2]}... ({len(text)} characters)"
