"""Writer of a GGUF file, for tensors whose formats and shapes are known beforehand.

Any bytes of any tensor can be written at any time. This is the reverse of `file`. No torch here."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.gguf.formats import GGUFFormat

__all__ = ["GGUFTensor", "GGUFWriter"]

_VERSION = 3
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_KINDS_OF_ARRAYS = {np.dtype(np.int32): _INT32, np.dtype(np.float32): _FLOAT32}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Tensor to write: [out, in] or a vector."""

    name: str
    form: GGUFFormat
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.form.bytes_per_row(self.shape[-1])


class GGUFWriter:
    """GGUF file, before and while it is written.

    Metadata are int (written as uint32), float (float32), bool, str, list[str] and arrays of int32
    or float32."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Iterable[GGUFTensor]) -> None:
        described = list(tensors)
        header = bytearray(b"GGUF" + struct.pack("<IQQ", _VERSION, len(described), len(metadata)))
        for key, value in metadata.items():
            header += _text(key) + _value(value)
        self._places: dict[str, int] = {}
        self._sizes = {one.name: one.num_bytes for one in described}
        end = 0
        for one in described:
            end += -end % _ALIGNMENT
            self._places[one.name] = end
            header += _text(one.name) + struct.pack("<I", len(one.shape))
            header += struct.pack(f"<{len(one.shape)}Q", *reversed(one.shape))
            header += struct.pack("<IQ", one.form.number, end)
            end += one.num_bytes
        header += bytes(-len(header) % _ALIGNMENT)
        self._header = bytes(header)
        self.num_bytes: int = len(header) + end
        """Size of the file in bytes."""

    @contextmanager
    def open(self, path: Path) -> Iterator[None]:
        """Create the file, which `write` fills in the block. Other bytes are zero.

        Raises `WeightsError`."""
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            try:
                os.ftruncate(self._file, self.num_bytes)
            except OSError as error:
                raise self._unwritten(error) from error
            self._write(np.frombuffer(self._header, np.uint8), 0)
            yield
        finally:
            os.close(self._file)

    def write(self, name: str, blocks: npt.NDArray[np.uint8], at: int = 0) -> None:
        """Write bytes at byte `at` of the tensor. Raises `WeightsError`."""
        if at < 0 or at + blocks.nbytes > self._sizes[name]:
            raise ValueError(f"{name} has {self._sizes[name]} bytes, got {blocks.nbytes} at {at}")
        self._write(blocks, len(self._header) + self._places[name] + at)

    def _write(self, blocks: npt.NDArray[np.uint8], at: int) -> None:
        left = np.ascontiguousarray(blocks).data.cast("B")
        while left:
            try:
                done = os.pwrite(self._file, left, at)
            except OSError as error:
                raise self._unwritten(error) from error
            left, at = left[done:], at + done

    def _unwritten(self, error: OSError) -> WeightsError:
        return WeightsError(f"{self._path} can't be written: {error.strerror}")


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """Encode a value of the metadata, with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, list):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(map(_text, value))
    kind = _KINDS_OF_ARRAYS[value.dtype]
    return (
        struct.pack("<IIQ", _ARRAY, kind, len(value))
        + value.astype(value.dtype.newbyteorder("<")).tobytes()
    )
