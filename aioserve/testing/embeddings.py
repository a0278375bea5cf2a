"""Vectors of texts without a model: equal texts have equal ones, and texts that share words are
near each other."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.testing.answers import NoAnswerError, failed

__all__ = ["Embeddings", "TextEmbedder", "Vector", "vector_of"]

DIMENSIONS = 64
SHARE_OF_THE_WHOLE = 0.1
"""Part that all of a text has in its vector, beside that of each word."""
_WORD = re.compile(r"\w+")

Vector = npt.NDArray[np.float32]
TextEmbedder = Callable[[str], Sequence[float] | npt.NDArray[np.floating]]


def vector_of(text: str) -> Vector:
    """The vector of a text, float32 `[64]`: a sum of a random one for each word, whatever its case,
    and one for the whole text."""
    total = SHARE_OF_THE_WHOLE * _random("text " + text)
    for word in _WORD.findall(text.casefold()):
        total = total + _random("word " + word)
    return total.astype(np.float32)


def _random(text: str) -> npt.NDArray[np.float64]:
    """Numbers in [-1, 1) that are a function of the text alone."""
    digest = hashlib.shake_256(text.encode("utf-8", "surrogatepass")).digest(4 * DIMENSIONS)
    return np.frombuffer(digest, "<u4") / 2**31 - 1.0


def _numbers(made: object) -> Vector:
    """A function's result as float32; empty where numpy makes no real numbers of it."""
    try:
        found = np.asarray(made)
        if found.dtype.kind not in "cMmSU":
            with np.errstate(over="ignore"):  # infinity is refused by name
                return found.astype(np.float32)
    except Exception:  # whatever an `__array__` raises: that of a tensor with a gradient does
        pass
    return np.empty(0, np.float32)


class Embeddings:
    """Vectors of one model, which all have as many numbers. `function` makes that of a text.
    Raises `ConfigError` for what is no function."""

    def __init__(self, function: TextEmbedder) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"embeddings must be a function of a text that isn't async, got {shown(function)}",
                argument="embeddings",
                value=function,
            )
        self._function = function
        self._dimensions: int | None = None

    def vector(self, text: str) -> Vector:
        """The vector of a text, float32 `[dimensions]`. Raises `NoAnswerError`."""
        try:
            made = self._function(text)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest.fail raises no `Exception`, and a step must end
            raise failed("the function of embeddings", error) from error
        vector = _numbers(made)
        if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
            raise NoAnswerError(
                f"FakeModel: embeddings must give a list of finite numbers, got {shown(made)}"
            )
        if self._dimensions not in (None, len(vector)):
            raise NoAnswerError(
                f"FakeModel: embeddings must give vectors of one length, got {len(vector)} numbers "
                f"after {self._dimensions}"
            )
        self._dimensions = len(vector)
        return vector
