"""Choice of a GGUF model among the files of a directory or a repository, and of its parts.

Names only: no file is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

__all__ = [
    "DEFAULT_TAG",
    "MAX_PARTS",
    "AmbiguousModelError",
    "Part",
    "chosen_model",
    "is_language_model",
    "listed",
    "models_among",
    "part_of",
]

DEFAULT_TAG = "Q4_K_M"
"""Tag of the model that is taken of several by default, as in llama.cpp and Ollama."""
MAX_PARTS = 1000
"""Most files of one model."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.ASCII)
_TYPE = r"(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|B?F16|F32|FP\d+)"
_TYPE_AT_END = re.compile(rf"(?:^|[-._])({_TYPE}(?:_[A-Z0-9]+)*)$", re.IGNORECASE)
"""Type of a file's weights at the end of its name: one word, which may contain underscores."""
_FEW_BITS = re.compile(r"(?:^|[-._])(?:I?Q|TQ|MXFP|NVFP)\d", re.IGNORECASE)
_BEGINS_AS_MATRIX = re.compile(r"(?:imatrix|imat)(?:[-._]|$)", re.IGNORECASE)
_ENDS_WITH_MATRIX = re.compile(r"[-._](?:imatrix|imat)$", re.IGNORECASE)
_NAMED = 12  # files that a message spells out


class AmbiguousModelError(Exception):
    """No file is a model, or several are and none is the obvious choice. The message lists them."""


class Part(NamedTuple):
    """Place of one file in a model of several files."""

    stem: str
    number: int
    count: int

    def named(self, number: int) -> str:
        """Return the name of part `number` of the same model."""
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def part_of(name: str) -> Part | None:
    """Parse the name of a part; None if the file is a model on its own."""
    found = _PART.fullmatch(name)
    return None if found is None else Part(found[1], int(found[2]), int(found[3]))


def is_language_model(name: str) -> bool:
    """True if a file's name looks like a language model in GGUF, or a part of one."""
    path = PurePosixPath(name)
    is_gguf = path.suffix.lower() == ".gguf"
    return is_gguf and "mmproj" not in path.name.lower() and not _is_importance_matrix(path.stem)


def _is_importance_matrix(stem: str) -> bool:
    """True if a file is an importance matrix, input of a quantiser: `imatrix_x` or `NAME-imatrix`.

    The name of a model that was quantised with one may end with it, too: `NAME-Q2_K-imatrix`.
    """
    if _BEGINS_AS_MATRIX.match(stem):
        return True
    return bool(_ENDS_WITH_MATRIX.search(stem)) and not _FEW_BITS.search(stem)


def models_among(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each language model among `names`, by the name of its first file."""
    models: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        if not is_language_model(name):
            continue
        part = part_of(name)
        if part is None:
            models[name] = (name,)
        elif part.number == 1:
            others = range(2, min(part.count, MAX_PARTS) + 1)
            models[name] = (name, *map(part.named, others))
    return models


def chosen_model(names: Iterable[str], tag: str | None = None) -> tuple[str, ...]:
    """Return the files of the model with `tag`; None: the only model, or that of `DEFAULT_TAG`.

    A tag is the end of a model's name (`Q8_0` of `tiny-Q8_0.gguf`), or a folder that it is in.
    Raises `AmbiguousModelError` unless there is exactly one.
    """
    names = list(names)
    models = models_among(names)
    if tag is None and len(models) == 1:
        return next(iter(models.values()))
    if not models:
        others = [name for name in sorted(names) if name.lower().endswith(".gguf")]
        if not others:
            raise AmbiguousModelError("it has no GGUF files")
        raise AmbiguousModelError(
            f"it has no language model in GGUF, only what goes with one: {listed(others)}"
        )
    wanted = tag or DEFAULT_TAG
    found = [name for name in models if _has_tag(name, wanted)]
    if len(found) == 1:
        return models[found[0]]
    why = f"{len(found)} GGUF models are {wanted}" if found else f"no GGUF model is {wanted}"
    raise AmbiguousModelError(f"{why}; name one of {listed(found or list(models))}")


def _has_tag(name: str, tag: str) -> bool:
    path = PurePosixPath(name)
    if any(folder.casefold() == tag.casefold() for folder in path.parent.parts):
        return True
    part = part_of(path.name)
    stem = _ENDS_WITH_MATRIX.sub("", path.stem if part is None else part.stem)
    ends = re.search(rf"(?:^|[-._])({re.escape(tag)})$", stem, re.IGNORECASE)
    told = _TYPE_AT_END.search(stem)
    return ends is not None and (told is None or ends.start(1) <= told.start(1))


def listed(names: Sequence[str]) -> str:
    """Join names for a message, at most `_NAMED` of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
