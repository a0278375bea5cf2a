"""Writer of safetensors files, in shards, for tensors whose shapes are known beforehand.

Any bytes of any tensor can be written at any time, so that few rows need to be in memory. The
format is that of `safetensors_file`. Tensors of wider numbers come first, which aligns them all. No
torch here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.checkpoint import INDEX_FILE, SINGLE_FILE

__all__ = ["SHARD_BYTES", "SafetensorsWriter", "TensorSpec"]

SHARD_BYTES = 5_000_000_000
"""Most bytes of tensors in a shard, unless a single tensor has more."""
SHARD_TENSORS = 4000
"""Most tensors of a shard, so that `safetensors_file` can read its header."""

_ITEM_BYTES = {"I64": 8, "F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number of each dtype. Other dtypes have one byte, or are sorted as if they had."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Tensor to write."""

    name: str
    dtype: str
    """Dtype as safetensors files spell it."""
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        return cls(name, dtype, shape, math.prod(shape) * _ITEM_BYTES.get(dtype, 1))


@dataclass(frozen=True, slots=True)
class _Shard:
    file_name: str
    header: bytes
    offsets: dict[str, int]
    """Offset of each tensor in the file."""
    num_bytes: int


class SafetensorsWriter:
    """Weight files of one model directory, before and while they are written."""

    def __init__(self, tensors: Iterable[TensorSpec], shard_bytes: int = SHARD_BYTES) -> None:
        groups = _grouped(tensors, shard_bytes)
        count = len(groups)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self._shards = [
            _placed(name, group)
            for name, group in zip([SINGLE_FILE] if count == 1 else names, groups, strict=True)
        ]
        self._tensors = {one.name: one for group in groups for one in group}
        self._places: dict[str, tuple[int, int, Path]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.num_bytes for shard in self._shards)

    @property
    def num_files(self) -> int:
        return len(self._shards)

    @contextmanager
    def open(self, directory: Path) -> Iterator[None]:
        """Create the files, and an index if there are several. `write` fills them in the block.

        Bytes that are never written are zero. Raises `WeightsError`."""
        with ExitStack() as stack:
            for shard in self._shards:
                path = directory / shard.file_name
                try:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    stack.callback(os.close, file)
                    os.ftruncate(file, shard.num_bytes)
                except OSError as error:
                    raise _unwritten(path, error) from error
                for name, offset in shard.offsets.items():
                    self._places[name] = file, offset, path
                _write(file, np.frombuffer(shard.header, np.uint8), 0, path)
            if self.num_files > 1:
                self._write_index(directory / INDEX_FILE)
            yield
        self._places.clear()

    def write(self, name: str, array: npt.NDArray[Any], at: int = 0) -> None:
        """Write the array's bytes at byte `at` of the tensor. Raises `WeightsError`."""
        file, offset, path = self._places[name]
        if at < 0 or at + array.nbytes > self._tensors[name].num_bytes:
            raise ValueError(
                f"{name} has {self._tensors[name].num_bytes} bytes, got {array.nbytes} at {at}"
            )
        _write(file, np.ascontiguousarray(array), offset + at, path)

    def _write_index(self, path: Path) -> None:
        placed = {name: shard.file_name for shard in self._shards for name in shard.offsets}
        total = sum(one.num_bytes for one in self._tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        try:
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise _unwritten(path, error) from error


def _grouped(tensors: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for one in tensors:
        if groups[-1] and (used + one.num_bytes > shard_bytes or len(groups[-1]) >= SHARD_TENSORS):
            groups.append([])
            used = 0
        groups[-1].append(one)
        used += one.num_bytes
    return groups


def _placed(file_name: str, tensors: list[TensorSpec]) -> _Shard:
    ordered = sorted(tensors, key=lambda one: (-_ITEM_BYTES.get(one.dtype, 1), one.name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for one in ordered:
        offsets[one.name] = end
        entries[one.name] = {
            "dtype": one.dtype,
            "shape": one.shape,
            "data_offsets": [end, end + one.num_bytes],
        }
        end += one.num_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    return _Shard(
        file_name,
        len(header).to_bytes(8, "little") + header,
        {name: start + offset for name, offset in offsets.items()},
        start + end,
    )


def _write(file: int, array: npt.NDArray[Any], at: int, path: Path) -> None:
    left = array.data.cast("B")
    while left:
        try:
            done = os.pwrite(file, left, at)
        except OSError as error:
            raise _unwritten(path, error) from error
        left, at = left[done:], at + done


def _unwritten(path: Path, error: OSError) -> WeightsError:
    return WeightsError(f"{path} can't be written: {error.strerror}")
