"""From what a user calls a model to the directory that holds it. No torch, no network."""

from __future__ import annotations

import re
from pathlib import Path

from aioserve import assets
from aioserve.errors import ModelNotFoundError

__all__ = ["resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


def resolve(name: str | Path) -> Path:
    """The directory of the model `name`: tried as a path, an embedded model and a Hugging Face id.

    Ids are looked up in huggingface_hub's local cache, where that library is installed; nothing is
    downloaded. Raises `ModelNotFoundError` naming everything that was tried.
    """
    if name == "":
        raise ModelNotFoundError("a model must be named, got an empty string")
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    tried = [
        f"the directory {path} has no config.json" if path.is_dir() else f"no directory {path}"
    ]
    if isinstance(name, str):
        if (embedded := assets.model_path(name)) is not None:
            return embedded
        tried.append(f"no embedded model of that name (there is {_listed(assets.EMBEDDED_MODELS)})")
        if _HUB_ID.fullmatch(name):
            found = _from_hub_cache(name)
            if isinstance(found, Path):
                return found
            tried.append(found)
    raise ModelNotFoundError(f"model {str(name)!r} not found: {'; '.join(tried)}")


def _from_hub_cache(hub_id: str) -> Path | str:
    """The cached snapshot, or why there is none."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return "huggingface_hub is not installed, so its cache was not searched"
    try:
        snapshot = huggingface_hub.snapshot_download(hub_id, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return f"not in the local Hugging Face cache (`hf download {hub_id}` puts it there)"
    path = Path(snapshot)
    if not (path / "config.json").is_file():
        return f"the cached snapshot {path} has no config.json"
    return path


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
