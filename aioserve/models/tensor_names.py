"""Names of the tensors that a model needs, checks that files have them, and names for messages."""

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
    """Return every tensor that a model may have, by name."""
    return {tensor.name: tensor for tensor in (*architecture.required, architecture.head)}


def check_there(path: Path, architecture: Architecture, there: Collection[str]) -> None:
    """Raise `WeightsError` if a tensor of the model isn't in `there`. A tied head may be absent."""
    optional = {architecture.head.name} if architecture.tie_word_embeddings else set()
    if absent := expected_tensors(architecture).keys() - there - optional:
        raise WeightsError(f"{path}: the weights lack {some_names(absent)}")


def some_names(names: Iterable[str]) -> str:
    """List the first names and the number of the others, for messages."""
    names = set(names)
    more = len(names) - _NAMED
    named = ", ".join(map(short_name, heapq.nsmallest(_NAMED, names)))
    return named + (f" and {more} more tensors" if more > 0 else "")


def short_name(name: str) -> str:
    """Return a name from a file, cut to a length fit for messages."""
    return name if len(name) <= _MOST_NAME_CHARS else f"{name[:_MOST_NAME_CHARS]}..."
