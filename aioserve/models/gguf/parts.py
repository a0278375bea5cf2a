"""Which files a GGUF model is made of: one, or parts that are numbered in their names.

Parts are called `NAME-00001-of-00003.gguf` and so on. The first has the metadata, each has tensors
of its own.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from aioserve.errors import ModelError, WeightsError
from aioserve.isolation import shown
from aioserve.models.gguf.file import GGUFFile

__all__ = ["MAX_PARTS", "holds_gguf", "is_gguf", "only_file", "open_parts"]

MAX_PARTS = 1000
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE | re.ASCII)
_NAMED = 4  # files that a message spells out


def open_parts(path: Path, stack: ExitStack) -> list[GGUFFile]:
    """The file `path` and the other parts of its model, which `stack` closes.

    Raises `WeightsError` for parts that are missing or belong elsewhere, and as `GGUFFile` does.
    """
    named = _PART.fullmatch(path.name)
    if named is not None and int(named[2]) != 1:
        raise WeightsError(
            f"{path}: is part {int(named[2])} of a model: give the first part, "
            f"{named[1]}-00001-of-{named[3]}.gguf"
        )
    first = _opened(path, stack)
    count = _number(first, path, "split.count", 1)
    if count <= 1:
        return [first]
    if count > MAX_PARTS:
        raise WeightsError(f"{path}: split.count must be at most {MAX_PARTS}, got {count}")
    if named is None or int(named[3]) != count:
        raise WeightsError(
            f"{path}: is the first of {count} parts, so its name must end in "
            f"-00001-of-{count:05}.gguf for the others to be found"
        )
    files = [first]
    for number in range(2, count + 1):
        part = path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")
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
    """Whether `path` is a file that is called GGUF."""
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def holds_gguf(directory: Path) -> bool:
    """Whether a language model in GGUF lies in `directory`."""
    return bool(_models(directory))


def only_file(directory: Path) -> Path | None:
    """The GGUF model in `directory`, by its first part; None if it holds none.

    What sees or hears beside a language model (`mmproj`) is left aside. Raises `ModelError` naming
    the files if there are several models.
    """
    models = _models(directory)
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:_NAMED])
        more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
        raise ModelError(
            f"{directory}: holds {len(models)} GGUF models, {names}{more}: give the path of one"
        )
    return models[0] if models else None


def _models(directory: Path) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(directory) if "mmproj" not in name)
    except OSError:  # a directory that can't be read
        return []
    found = [path for path in map(directory.joinpath, names) if is_gguf(path)]
    parts = {path: _PART.fullmatch(path.name) for path in found}
    first = [path for path, named in parts.items() if named is None or int(named[2]) == 1]
    return first or found[:1]  # a part without the first, which is what the error is about then


def _opened(path: Path, stack: ExitStack) -> GGUFFile:
    file = GGUFFile(path)
    stack.callback(file.close)
    return file


def _number(file: GGUFFile, path: Path, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise WeightsError(f"{path}: {key} must be an integer, got {shown(value)}")
    return value
