"""Writing of GGUF files, valid or not: every field can be given a wrong value."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import numpy.typing as npt

from aioserve.models.gguf.formats import FORMATS, GGUFFormat

BY_NAME = {form.name: form for form in FORMATS.values()}

KINDS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "f64": (12, "<d"),
}  # fmt: skip
"""Number in files, and format of `struct`, of each type by name."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """Value, or list of values, of one of `KINDS`."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Stored:
    """Tensor: its shape [out, in], format, bytes, and offset. None is the correct offset."""

    shape: tuple[int, ...]
    number: int
    content: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def packed_value(value: Any) -> bytes:
    """Pack a value with its type in front. An int is u32, or i32 if negative; a float is f32."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, list) and all(isinstance(item, str | bytes) for item in value):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(map(text, value))
    if not isinstance(value, Typed):
        value = Typed(_kind_of(value[0] if isinstance(value, list) else value), value)
    number, packing = KINDS[value.kind]
    if isinstance(value.value, list):
        items = b"".join(struct.pack(packing, item) for item in value.value)
        return struct.pack("<IIQ", ARRAY, number, len(value.value)) + items
    return struct.pack("<I", number) + struct.pack(packing, value.value)


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "f32"
    assert isinstance(value, int)
    return "u32" if value >= 0 else "i32"


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Mapping[str, Stored] | Sequence[tuple[str, Stored]] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """Make a file. An `alignment` other than 32 must be in the metadata, too."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    described = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    counts = (
        len(described) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    out = bytearray(magic + struct.pack("<IQQ", version, *counts))
    for key, value in pairs:
        out += text(key) + packed_value(value)
    content = bytearray()
    for name, stored in described:
        content += bytes(-len(content) % alignment)
        offset = len(content) if stored.offset is None else stored.offset
        out += text(name) + struct.pack("<I", len(stored.shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(stored.shape))
        out += struct.pack("<IQ", stored.number, offset)
        content += stored.content
    return bytes(out + bytes(-len(out) % alignment) + content)


def write_gguf(path: Path, *args: Any, **options: Any) -> Path:
    path.write_bytes(gguf_bytes(*args, **options))
    return path


def quantized(weights: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.uint8]:
    """Encode float32 rows with the library of the format `name`: uint8 [out, bytes of a row]."""
    number = BY_NAME[name].number
    rows = np.ascontiguousarray(np.atleast_2d(weights), np.float32)
    if name in ("F32", "F16", "BF16"):
        found = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(number))
        return np.ascontiguousarray(found).view(np.uint8).reshape(len(rows), -1)
    return libgguf.quantize_rows(rows, number)


def stored(weights: npt.NDArray[np.float32], name: str) -> Stored:
    """Make a tensor of float32 values in the format `name`."""
    return Stored(weights.shape, BY_NAME[name].number, quantized(weights, name).tobytes())


def reference(rows: npt.NDArray[np.uint8], form: GGUFFormat) -> npt.NDArray[np.float32]:
    """Decode rows with the gguf package."""
    kind = gguf.GGMLQuantizationType(form.number)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, kind).astype(np.float32)
