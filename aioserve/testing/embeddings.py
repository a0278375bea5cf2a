"""Vectors of texts without a model: equal texts have equal vectors, and texts that share words have
near ones.
"""

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
"""Weight of the whole text in its vector, beside that of each word."""
_WORD = re.compile(r"\w+")

Vector = npt.NDArray[np.float32]
TextEmbedder = Callable[[str], Sequence[float] | npt.NDArray[np.floating]]


def vector_of(text: str) -> Vector:
    """Return the vector of a text, float32 `[64]`.

    It is a sum of a random vector for each word, whatever its case, and one for the whole text.
    """
    total = SHARE_OF_THE_WHOLE * _random("text " + text)
    for word in _WORD.findall(text.casefold()):
        total = total + _random("word " + word)
    return total.astype(np.float32)


def _random(text: str) -> npt.NDArray[np.float64]:
    """Return numbers in [-1, 1) that are a function of the text alone."""
    digest = hashlib.shake_256(text.encode("utf-8", "surrogatepass")).digest(4 * DIMENSIONS)
    return np.frombuffer(digest, "<u4") / 2**31 - 1.0


def _numbers(made: object) -> Vector:
    """Return a function's result as float32; empty if numpy makes no real numbers of it."""
    try:
        found = np.asarray(made)
        if found.dtype.kind not in "cMmSU":
            with np.errstate(over="ignore"):  # infinity is refused by name
                return found.astype(np.float32)
    except Exception:  # from `__array__`, such as that of a tensor with a gradient
        pass
    return np.empty(0, np.float32)


class Embeddings:
    """Vectors of one model, all of equal length. `function` makes the vector of a text.

    Raises `ConfigError` for anything but a function.
    """

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
        """Return the vector of a text, float32 `[dimensions]`. Raises `NoAnswerError`."""
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
