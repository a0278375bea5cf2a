"""Names of models on the Hugging Face hub, and the files of a repository that make up a model.

    OWNER/NAME              a repository
    OWNER/NAME:Q4_K_M       its GGUF model with that tag
    OWNER/NAME/FILE.gguf    the model in that file, or in a series of files that begins with it

Names only: no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from aioserve.models.gguf.choosing import (
    AmbiguousModelError,
    chosen_model,
    is_language_model,
    listed,
    models_among,
)

__all__ = ["INSTALL_HUB", "HubName", "cached_model", "wanted_files"]

INSTALL_HUB = "pip install 'aioserve[hub]'"

_WANTED = ("*.json", "*.jinja", "*.model", "*.safetensors")
"""Patterns of a repository's files that a model in Hugging Face's layout may need."""
_OTHERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors")
"""Patterns of files that match `_WANTED` but are never read.

Other formats are in folders, and "consolidated" files are a second copy of the weights. The folder
additional_chat_templates is needed."""
_NO_FILE = "/"
"""Pattern that matches no file."""
_NAME = re.compile(
    r"(?P<id>\w[\w.-]*/\w[\w.-]*)(:(?P<tag>\w[\w.-]*)|/(?P<file>(?!\.)[^\\\x00-\x1f]+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)


class HubName(NamedTuple):
    """Name of a model on the hub or in the cache of `huggingface_hub`."""

    id: str
    tag: str | None = None
    file: str | None = None
    """Path of a GGUF file in the repository."""

    @classmethod
    def of(cls, name: str) -> HubName | None:
        """Parse `name`; None if it isn't a name of the hub."""
        found = _NAME.fullmatch(name)
        if found is None or found["id"].lower().endswith(".gguf"):
            return None
        if found["file"] is not None and ".." in found["file"].split("/"):
            return None
        return cls(found["id"], found["tag"], found["file"])

    @property
    def is_gguf(self) -> bool:
        """True if it can only be a GGUF model."""
        return self.tag is not None or self.file is not None


def wanted_files(name: HubName, files: Collection[str]) -> tuple[str, ...]:
    """Return the files of a repository that the model needs.

    A model in Hugging Face's layout comes first, unless `name` has a tag or file. Otherwise they
    are those of one GGUF model. Raises `AmbiguousModelError` if there is no model, or more than one
    fits.
    """
    if name.file is not None:
        return _beginning_with(name.file, files)
    if name.tag is None:
        plain = tuple(one for one in files if _is_plain(one))
        if "config.json" in plain and any(one.endswith(".safetensors") for one in plain):
            return plain
        if not any(one.lower().endswith(".gguf") for one in files):
            lacks = ".safetensors files" if "config.json" in plain else "config.json"
            raise AmbiguousModelError(f"it has no {lacks}")
    return chosen_model(files, name.tag)


def cached_model(name: HubName) -> Path | str:
    """Find the model in the cache of `huggingface_hub`, or return the reason why it isn't there.

    The path is a directory, or a GGUF file with its other parts next to it."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return f"huggingface_hub is not installed, so its cache was not searched ({INSTALL_HUB})"

    def snapshot(allowed: Sequence[str], ignored: Sequence[str]) -> Path | None:
        """Return the cached snapshot if it has all files of the repository that match."""
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    name.id,
                    local_files_only=True,
                    allow_patterns=list(allowed),
                    ignore_patterns=list(ignored),
                )
            )
        except LocalEntryNotFoundError:
            return None

    try:
        # The patterns are those of the download, so that a snapshot without other files counts.
        plain = None if name.is_gguf else snapshot(_WANTED, _OTHERS)
        directory = plain or snapshot((_NO_FILE,), ())
    except HFValidationError:
        return "no Hugging Face id"
    except OSError as error:
        return f"the local Hugging Face cache can't be read: {error}"
    if directory is None:
        return _not_cached(name)
    if plain is not None and any(plain.glob("*.safetensors*")):
        return plain if os.path.isfile(plain / "config.json") else _no_config(plain)
    return _cached_gguf(name, directory, plain)


def _not_cached(name: HubName) -> str:
    """Reason that names the download only for names with an owner, as nearly all have one."""
    there = f" (`hf download {name.id}` puts it there)" if "/" in name.id else ""
    return f"not in the local Hugging Face cache{there}"


def _cached_gguf(name: HubName, directory: Path, plain: Path | None) -> Path | str:
    there = [str(path.relative_to(directory)) for path in directory.rglob("*.[gG][gG][uU][fF]")]
    if not there and plain is not None:
        return plain if os.path.isfile(plain / "config.json") else _no_config(plain)
    if not there:
        return _not_cached(name)
    try:
        parts = wanted_files(name, there)
    except AmbiguousModelError as error:
        return f"not in the local Hugging Face cache: {error}"
    if missing := [part for part in parts if part not in there]:
        return f"the local Hugging Face cache lacks {missing[0]}"
    return directory / parts[0]


def _no_config(snapshot: Path) -> str:
    return f"the cached snapshot {snapshot} has no config.json"


def _is_plain(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in _WANTED) and not any(
        fnmatch(file, pattern) for pattern in _OTHERS
    )


def _beginning_with(file: str, files: Collection[str]) -> tuple[str, ...]:
    models = models_among(files)
    if file in models:
        return models[file]
    if file not in files:
        raise AmbiguousModelError(f"it has no {file}; there are {listed(sorted(models))}")
    if is_language_model(file):
        raise AmbiguousModelError(f"{file} is a part of a model: name its first part")
    raise AmbiguousModelError(f"{file} is no language model, it goes with one")
