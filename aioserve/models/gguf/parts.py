"""Files of a GGUF model: one, or several parts with numbers in their names.

Parts are called `NAME-00001-of-00003.gguf` and so on. The first has the metadata, and each has
tensors of its own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from aioserve.errors import ModelError, WeightsError
from aioserve.isolation import shown
from aioserve.models.gguf.choosing import (
    MAX_PARTS,
    AmbiguousModelError,
    chosen_model,
    is_language_model,
    models_among,
    part_of,
)
from aioserve.models.gguf.file import GGUFFile

__all__ = ["holds_gguf", "is_gguf", "meant_file", "open_parts"]


def open_parts(path: Path, stack: ExitStack) -> list[GGUFFile]:
    """Open the file `path` and the other parts of its model until `stack` closes them.

    Raises `WeightsError` for parts that are missing or belong to another model, and the errors of
    `GGUFFile`.
    """
    named = part_of(path.name)
    if named is not None and named.number != 1:
        raise WeightsError(
            f"{path}: is part {named.number} of a model: give the first part, {named.named(1)}"
        )
    first = _opened(path, stack)
    count = _number(first, path, "split.count", 1)
    if count <= 1:
        return [first]
    if count > MAX_PARTS:
        raise WeightsError(f"{path}: split.count must be at most {MAX_PARTS}, got {count}")
    if named is None or named.count != count:
        raise WeightsError(
            f"{path}: is the first of {count} parts, so its name must end in "
            f"-00001-of-{count:05}.gguf for the others to be found"
        )
    files = [first]
    for number in range(2, count + 1):
        part = path.with_name(named.named(number))
        if not os.path.lexists(part):
            raise WeightsError(f"{part}: no such file, but {path.name} has {count} parts")
        files.append(_opened(part, stack))
        for key, expected in (("split.no", number - 1), ("split.count", count)):
            if (found := _number(files[-1], part, key, -1)) != expected:
                raise WeightsError(f"{part}: {key} must be {expected} in this part, got {found}")
    total = sum(len(file.tensors) for file in files)
    if (claimed := _number(first, path, "split.tensors.count", total)) != total:
        raise WeightsError(f"{path}: split.tensors.count is {claimed}, its parts have {total}")
    return files


def is_gguf(path: Path) -> bool:
    """True if `path` is a file whose name ends with .gguf."""
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def holds_gguf(directory: Path) -> bool:
    """True if `directory` has a language model in GGUF, or a part of one."""
    return bool(_candidates(directory))


def meant_file(directory: Path) -> Path | None:
    """Return the first part of the model that `chosen_model` takes in `directory`, or None.

    Files for images or sound (`mmproj`) are ignored. Raises `ModelError` naming the files if there
    are several models, unless exactly one has the default tag.
    """
    names = _candidates(directory)
    if not names:
        return None
    if not models_among(names):  # the first part is missing, and `open_parts` tells that
        return directory / names[0]
    try:
        return directory / chosen_model(names)[0]
    except AmbiguousModelError as error:
        raise ModelError(f"{directory}: {error}") from error


def _candidates(directory: Path) -> list[str]:
    """Names of files that may be language models or parts of them."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:  # an unreadable directory
        return []
    return [name for name in names if is_language_model(name) and is_gguf(directory / name)]


def _opened(path: Path, stack: ExitStack) -> GGUFFile:
    file = GGUFFile(path)
    stack.callback(file.close)
    return file


def _number(file: GGUFFile, path: Path, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise WeightsError(f"{path}: {key} must be an integer, got {shown(value)}")
    return value
