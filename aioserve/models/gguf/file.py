"""GGUF file: opens it, reads its metadata, and finds the place of each tensor in it.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) has a magic number, a
version, counts, metadata as typed pairs and descriptions of tensors. Then come the tensors, each at
a multiple of the alignment. Claims of a file are compared with its size and with bounds before
memory is allocated for them. Files are read, not mapped: a file truncated while it is read raises
an error, where a mapping would kill the process.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.isolation import shown
from aioserve.models.gguf.formats import FORMATS, format_name
from aioserve.models.stored import StoredTensor

__all__ = ["MAX_HEADER_BYTES", "MAX_TENSORS", "GGUFFile", "Metadata", "short_decimal"]

MAX_HEADER_BYTES = 64 << 20
"""Most bytes before the tensors. A vocabulary of 262,144 tokens takes 7 MB."""
MAX_TENSORS = 1 << 16
MAX_PAIRS = 1 << 16
"""Most metadata pairs of a file. Usual files have about forty."""
MAX_STRINGS = 1 << 21
"""Most strings of a file's metadata: tokens and merges."""
_MAX_KEY_BYTES = 256
_MAX_NAME_BYTES = 256
_MOST_AXES = 4
_ALIGNMENTS = tuple(1 << power for power in range(3, 17))
_PIECE_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_NUMBERS = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"),
    4: np.dtype("<u4"), 5: np.dtype("<i4"), _FLOAT32: np.dtype("<f4"), _BOOL: np.dtype("?"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_COUNT = struct.Struct("<Q")
_KIND = struct.Struct("<I")

Metadata = dict[str, Any]
"""Values by key: int, float, bool, str, list[str], or a numpy array of numbers or bools.

A float32 becomes the shortest decimal number that rounds to it, as in the model's config."""


class GGUFFile:
    """GGUF file, open until `close`, with its `metadata` and its `tensors` by name.

    The `dtype` of a tensor is the name of a format, its shape [out, in]. Raises `WeightsError` for
    a file that can't be opened, is incomplete or contradicts itself. Raises `UnsupportedModelError`
    for a version, byte order or format of tensors that can't be read. Both name the file, the
    fault, and the limit that it breaks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._wrong(error.strerror or str(error)) from error
        try:
            header = _Header(path, self._file)
            self.num_bytes: int = header.file_bytes
            """Size of the file in bytes."""
            num_pairs, num_tensors = _read_start(header)
            self.metadata: Metadata = _read_metadata(header, num_pairs)
            self.tensors: dict[str, StoredTensor] = self._read_tensors(header, num_tensors)
        except OSError as error:
            self.close()
            raise self._wrong(error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._file)

    def _wrong(self, why: str) -> WeightsError:
        return WeightsError(f"{self._path}: not a complete GGUF file: {why}")

    def _read_tensors(self, header: _Header, count: int) -> dict[str, StoredTensor]:
        alignment = self._alignment()
        described = [_read_tensor(header) for _ in range(count)]
        start = header.at + -header.at % alignment
        found: dict[str, StoredTensor] = {}
        end, last = 0, "the header"
        for name, shape, number, offset in sorted(described, key=lambda entry: entry[3]):
            form = FORMATS[number]
            num_bytes = math.prod(shape[:-1]) * form.bytes_per_row(shape[-1])
            if name in found:
                raise self._wrong(f"the tensor {name} is there twice")
            if offset % alignment:
                raise self._wrong(
                    f"{name} lies at offset {offset}, no multiple of the alignment {alignment}"
                )
            if offset < end:
                raise self._wrong(f"{name} lies at offset {offset}, where {last} reaches to {end}")
            end, last = offset + num_bytes, name
            if start + end > header.file_bytes:
                raise self._wrong(
                    f"{name} of {num_bytes} bytes ends at byte {start + end}, and the file has "
                    f"{header.file_bytes}"
                )
            found[name] = StoredTensor(
                path=self._path,
                name=name,
                file=self._file,
                offset=start + offset,
                num_bytes=num_bytes,
                dtype=form.name,
                shape=shape,
            )
        return found

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in _ALIGNMENTS:
            raise self._wrong(
                f"general.alignment must be a power of two in [{_ALIGNMENTS[0]}, "
                f"{_ALIGNMENTS[-1]}], got {shown(alignment)}"
            )
        return alignment


class _Header:
    """First bytes of a file, read on demand."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self.at: int = 0
        """Number of bytes taken so far."""
        self.strings_left: int = MAX_STRINGS
        self.file_bytes: int = os.fstat(file).st_size
        self._file = file
        self._bytes = bytearray()

    def wrong(self, why: str) -> NoReturn:
        raise WeightsError(f"{self.path}: not a complete GGUF file: {why}")

    def take(self, count: int, what: str) -> bytes:
        """Take the next `count` bytes. `what` names them in errors."""
        end = self.at + count
        if end > len(self._bytes):
            self._read(end, what)
        taken = bytes(self._bytes[self.at : end])
        self.at = end
        return taken

    def number(self, packed: struct.Struct, what: str) -> int:
        return packed.unpack(self.take(packed.size, what))[0]

    def text(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        count = self.number(_COUNT, what)
        if count > max_bytes:
            self.wrong(f"{what} claims {count} bytes, at most {max_bytes} are read")
        try:
            return self.take(count, what).decode()
        except UnicodeDecodeError as error:
            self.wrong(f"{what} is not UTF-8: {error.reason} at its byte {error.start}")

    def name(self, what: str, max_bytes: int) -> str:
        name = self.text(what, max_bytes)
        if not name.isprintable() or not name:
            self.wrong(f"{what} must be printable text, got {shown(name)}")
        return name

    def texts(self, count: int, what: str) -> list[str]:
        if count > self.strings_left:
            self.wrong(f"{what} has {count} strings, at most {MAX_STRINGS} are read of a file")
        if count * _COUNT.size > self.file_bytes - self.at:
            self.wrong(f"{what} claims {count} strings, and ends at byte {self.file_bytes}")
        self.strings_left -= count
        found, at, unpack = [], self.at, _COUNT.unpack_from
        for _ in range(count):  # hundreds of thousands
            start = at + _COUNT.size
            if start > len(self._bytes):
                self._read(start, what)
            at = start + unpack(self._bytes, at)[0]
            if at > len(self._bytes):
                self._read(at, what)
            try:
                found.append(str(self._bytes[start:at], "utf-8"))
            except UnicodeDecodeError as error:
                self.wrong(f"string {len(found)} of {what} is not UTF-8: {error.reason}")
        self.at = at
        return found

    def _read(self, end: int, what: str) -> None:
        if end > self.file_bytes:
            self.wrong(f"{what} ends at byte {end}, and the file has {self.file_bytes}")
        if end > MAX_HEADER_BYTES:
            self.wrong(f"{what} ends behind byte {MAX_HEADER_BYTES}, as far as headers are read")
        wanted = max(end, min(2 * len(self._bytes), MAX_HEADER_BYTES), _PIECE_BYTES)
        while len(self._bytes) < wanted:
            piece = os.pread(self._file, wanted - len(self._bytes), len(self._bytes))
            if not piece:
                break
            self._bytes += piece
        if len(self._bytes) < end:
            self.wrong(f"it was cut off at byte {len(self._bytes)} while it was read")


def _read_start(header: _Header) -> tuple[int, int]:
    """Read the numbers of metadata pairs and of tensors, after the magic number and the version."""
    magic = header.take(4, "the magic") if header.file_bytes >= 4 else b""
    if magic != b"GGUF":
        if magic == b"vers":
            raise WeightsError(
                f"{header.path}: is a Git LFS pointer, not weights: run `git lfs pull`"
            )
        header.wrong(f"it begins with {magic!r}, not with b'GGUF'")
    version = header.number(_KIND, "the version")
    if version and not version & 0xFFFF:
        raise UnsupportedModelError(
            f"{header.path}: its numbers are big endian, which is not supported: write it anew "
            f"with gguf-convert-endian of the gguf package"
        )
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{header.path}: version {version} of GGUF is not supported, only 2 and 3: convert the "
            f"model anew"
        )
    tensors = header.number(_COUNT, "the number of tensors")
    pairs = header.number(_COUNT, "the number of metadata")
    if tensors > MAX_TENSORS:
        header.wrong(f"it claims {tensors} tensors, must have at most {MAX_TENSORS}")
    if pairs > MAX_PAIRS:
        header.wrong(f"it claims {pairs} metadata, must have at most {MAX_PAIRS}")
    return pairs, tensors


def _read_metadata(header: _Header, count: int) -> Metadata:
    found: Metadata = {}
    for position in range(count):
        key = header.name(f"the key of metadata {position}", _MAX_KEY_BYTES)
        if key in found:
            header.wrong(f"the key {key} is there twice")
        found[key] = _read_value(header, key)
    return found


def _read_value(header: _Header, key: str) -> Any:
    kind = header.number(_KIND, f"the type of {key}")
    if kind == _STRING:
        return header.text(key)
    if kind != _ARRAY:
        return _scalar(kind, _read_numbers(header, kind, 1, key))
    kind = header.number(_KIND, f"the type of {key}")
    count = header.number(_COUNT, f"the length of {key}")
    if kind == _ARRAY:
        raise UnsupportedModelError(
            f"{header.path}: {key} is an array of arrays, which are not read"
        )
    if kind == _STRING:
        return header.texts(count, key)
    return _read_numbers(header, kind, count, key)


def _read_numbers(header: _Header, kind: int, count: int, key: str) -> npt.NDArray[Any]:
    if (dtype := _NUMBERS.get(kind)) is None:
        header.wrong(f"{key} has type {kind}, types are 0 to {max(_NUMBERS)}")
    content = header.take(count * dtype.itemsize, key)
    if kind == _BOOL and content.strip(b"\0\1"):
        header.wrong(f"{key} must be 0 or 1, which bools are")
    return np.frombuffer(content, dtype)


def _scalar(kind: int, numbers: npt.NDArray[Any]) -> int | float | bool:
    return short_decimal(numbers[0]) if kind == _FLOAT32 else numbers[0].item()


def short_decimal(number: np.float32) -> float:
    """Return the shortest decimal number that rounds to `number`.

    In float32, config.json's 1e-05 becomes 9.999999747378752e-06 as a Python float."""
    return float(str(number))


def _read_tensor(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Read the name, shape, number of the format, and offset of a tensor."""
    name = header.name("the name of a tensor", _MAX_NAME_BYTES)
    axes = header.number(_KIND, f"the number of axes of {name}")
    if not 1 <= axes <= _MOST_AXES:
        header.wrong(f"{name} must have 1 to {_MOST_AXES} axes, got {axes}")
    shape = tuple(header.number(_COUNT, f"the shape of {name}") for _ in range(axes))[::-1]
    number = header.number(_KIND, f"the format of {name}")
    offset = header.number(_COUNT, f"the offset of {name}")
    if number not in FORMATS:
        known = ", ".join(form.name for form in FORMATS.values())
        raise UnsupportedModelError(
            f"{header.path}: {name} has format {format_name(number)}, which is not supported: take "
            f"a file whose tensors have some of {known}, such as Q4_K_M"
        )
    values = FORMATS[number].values_per_block
    if 0 in shape or shape[-1] % values:
        header.wrong(
            f"{name} has shape {list(shape)}, and rows of {format_name(number)} have a multiple of "
            f"{values} values"
        )
    return name, shape, number, offset
