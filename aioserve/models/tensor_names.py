"""Which tensors a model needs: names those that files lack, and those that they have besides."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from pathlib import Path

from aioserve.errors import WeightsError
from aioserve.models.architecture import Architecture, Tensor

__all__ = ["check_there", "expected_tensors", "short_name", "some_names"]

_NAMED = 4  # tensors that a message spells out
_MOST_NAME_CHARS = 200


def expected_tensors(architecture: Architecture) -> dict[str, Tensor]:
    """Every tensor that a model may have, by its name."""
    return {tensor.name: tensor for tensor in (*architecture.required, architecture.head)}


def check_there(path: Path, architecture: Architecture, there: Collection[str]) -> None:
    """Raise `WeightsError` unless `there` are all tensors of a model: a tied head may be absent."""
    optional = {architecture.head.name} if architecture.tie_word_embeddings else set()
    if absent := expected_tensors(architecture).keys() - there - optional:
        raise WeightsError(f"{path}: the weights lack {some_names(absent)}")


def some_names(names: Iterable[str]) -> str:
    """The first of the names, and how many more there are, for messages."""
    names = set(names)
    more = len(names) - _NAMED
    named = ", ".join(map(short_name, heapq.nsmallest(_NAMED, names)))
    return named + (f" and {more} more tensors" if more > 0 else "")


def short_name(name: str) -> str:
    """A name from a file, for messages."""
    return name if len(name) <= _MOST_NAME_CHARS else f"{name[:_MOST_NAME_CHARS]}..."
