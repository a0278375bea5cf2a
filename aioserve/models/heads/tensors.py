"""Tensors in a head's weight files. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.isolation import shown
from aioserve.models.architecture import Tensor
from aioserve.models.checkpoint import open_tensors, weight_files
from aioserve.models.decoding import Array, rounded
from aioserve.models.heads.config import DRAFT_IDS, HeadConfig
from aioserve.models.stored import StoredTensor
from aioserve.models.tensor_names import short_name, some_names

__all__ = ["HeadTensors"]


class HeadTensors(AbstractContextManager["HeadTensors"]):
    """Weight files of one directory. A context manager that closes them. Raises `WeightsError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, StoredTensor] = {}
        self._stack = ExitStack()
        try:
            for path, expected in weight_files(directory).items():
                self._found |= open_tensors(path, expected, self._stack)
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._found.items()}

    def arrays(self, config: HeadConfig, dtype: str) -> dict[Tensor, Array]:
        """Read every tensor of the head, rounded to `dtype`: float32, bfloat16 or float16.

        Raises the errors of `check`, and `WeightsError` for a tensor of integers."""
        found = self.check(config)
        return {tensor: rounded(stored.read_floats(), dtype) for tensor, stored in found.items()}

    def check(self, config: HeadConfig) -> dict[Tensor, StoredTensor]:
        """Find each tensor of the head in the files.

        Raises `WeightsError` if one is missing, appears twice or has another shape, and for tensors
        that the head has no place for.
        """
        there: dict[str, StoredTensor] = {}
        for name, stored in self._found.items():
            if config.ignored.search(name):
                continue
            canonical = config.canonical(name)
            if canonical in there:
                raise WeightsError(
                    f"{stored.path}: {short_name(name)} is also there as "
                    f"{short_name(there[canonical].name)}"
                )
            there[canonical] = stored
        wanted = {tensor.name: tensor for tensor in config.stored}
        self._check_names(wanted.keys() - there.keys(), there.keys() - wanted.keys())
        return {tensor: _of_its_shape(there[name], tensor) for name, tensor in wanted.items()}

    def draft_ids(self, draft_vocab: int, vocab: int) -> npt.NDArray[np.int64] | None:
        """Read the target's id of each of the head's tokens, int64 `[draft_vocab]`.

        None if both have the same ids. Raises `WeightsError` for a table that is missing, names a
        token twice, or has an id that the target lacks.
        """
        stored = self._found.get(DRAFT_IDS) or self._found.get(f"model.{DRAFT_IDS}")
        if stored is None:
            if draft_vocab != vocab:
                raise WeightsError(
                    f"{self._directory}: the weights lack {DRAFT_IDS}, which draft_vocab_size "
                    f"{draft_vocab} asks for where the target has {vocab} tokens"
                )
            return None
        if stored.dtype not in ("I64", "I32") or stored.shape != (draft_vocab,):
            raise WeightsError(
                f"{stored.label} must be integers of shape [{draft_vocab}], got {stored.dtype} "
                f"{shown(list(stored.shape))}"
            )
        ids = np.arange(draft_vocab) + stored.read().astype(np.int64)
        if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < draft_vocab:
            raise WeightsError(
                f"{stored.label} must lead to tokens in [0, {vocab - 1}], to each once at most, "
                f"got tokens from {ids.min()} to {ids.max()}, {len(np.unique(ids))} of them"
            )
        return ids

    def _check_names(self, absent: Iterable[str], left: Iterable[str]) -> None:
        if absent:
            raise WeightsError(f"{self._directory}: the weights lack {some_names(absent)}")
        if left:
            raise WeightsError(
                f"{self._directory}: the head of config.json has no place for {some_names(left)}"
            )


def _of_its_shape(stored: StoredTensor, tensor: Tensor) -> StoredTensor:
    if stored.shape != tensor.shape:
        raise WeightsError(
            f"{stored.label} has shape {shown(list(stored.shape))}, config.json asks for "
            f"{list(tensor.shape)}"
        )
    return stored
