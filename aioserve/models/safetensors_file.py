"""Safetensors file: opens it, and finds the place of each tensor in it.

A file has eight bytes with the size of the header, the header in JSON, then the tensors without
gaps (https://huggingface.co/docs/safetensors). Files are read, not mapped: a file truncated while
it is read raises an error, where a mapping would kill the process.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import msgspec

from aioserve.errors import WeightsError
from aioserve.models.stored import StoredTensor

__all__ = ["MAX_HEADER_BYTES", "SafetensorsFile"]

MAX_HEADER_BYTES = 1 << 20
"""Largest header, in bytes: that of ten thousand tensors, which is parsed in milliseconds."""
_MOST_AXES = 16
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a number of each dtype. A file may hold other dtypes, but those can't be loaded."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MOST_AXES)]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


class SafetensorsFile:
    """Safetensors file, open until `close`. `tensors` has its tensors by name.

    Raises `WeightsError` naming the file if it can't be opened, is incomplete or of another format,
    or has a header of more than `MAX_HEADER_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._incomplete(error.strerror or str(error)) from error
        try:
            self.tensors: dict[str, StoredTensor] = self._read()
        except OSError as error:
            self.close()
            raise self._incomplete(error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> dict[str, StoredTensor]:
        start = os.pread(self._file, 20, 0)
        if start.startswith(b"version https://git"):
            raise WeightsError(
                f"{self._path}: is a Git LFS pointer, not weights: run `git lfs pull`"
            )
        file_bytes = os.fstat(self._file).st_size
        if len(start) < 8:
            raise self._incomplete(f"it has {file_bytes} bytes")
        size = int.from_bytes(start[:8], "little")
        if size > MAX_HEADER_BYTES:
            raise WeightsError(
                f"{self._path}: not a safetensors file, or not one for a model: its header claims "
                f"{size} bytes, at most {MAX_HEADER_BYTES} are read"
            )
        header = os.pread(self._file, size, 8)
        if len(header) < size:
            raise self._incomplete(f"its header has {size} bytes, and {len(header)} are there")
        return self._placed(self._parsed(header), 8 + size, file_bytes)

    def _parsed(self, header: bytes) -> dict[str, _Entry]:
        try:
            raw = _HEADER.decode(header)
            raw.pop("__metadata__", None)
            return {name: _ENTRY.decode(value) for name, value in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._incomplete(f"its header: {error}") from error

    def _placed(
        self, entries: dict[str, _Entry], start: int, file_bytes: int
    ) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            first, last = entry.data_offsets
            size = _ITEM_BYTES.get(entry.dtype)
            fits = size is None or size * math.prod(entry.shape) == last - first
            if first != end or last < first or not fits:
                raise self._incomplete(
                    f"{name[:200]} has shape {entry.shape} of {entry.dtype[:20]} and lies at "
                    f"{first} to {last}"
                )
            end = last
            found[name] = StoredTensor(
                path=self._path,
                name=name,
                file=self._file,
                offset=start + first,
                num_bytes=last - first,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
            )
        if start + end != file_bytes:
            raise self._incomplete(
                f"its header tells of {start + end} bytes, and {file_bytes} are there"
            )
        return found

    def _incomplete(self, why: str) -> WeightsError:
        return WeightsError(f"{self._path}: not a complete safetensors file: {why}")
