"""Number formats of GGUF files: blocks of values and scales, and their decoding to weights.

A row of a tensor is a whole number of blocks. `decoded` makes `WeightIntegers` or floats of any
rows. Block layouts are those of https://github.com/ggml-org/ggml (`ggml-common.h`), and values
equal that library's, bit for bit. No files and no torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.models.weight_integers import E2M1_TWICE, Scales, WeightIntegers

__all__ = ["FORMATS", "Floats", "GGUFFormat", "decoded", "format_name"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


_SHARED = 256
"""Number of values in blocks whose scales are small multiples of one float16."""


class _Decoded(NamedTuple):
    """Contents of blocks. The leading axes are [rows, blocks]."""

    values: npt.NDArray[Any]
    """Values as int8, or uint8 below 128. The further axes have a block's values in order."""
    scales: Floats
    minimums: Floats | None
    bits: int
    table: tuple[int, ...] | None = None


class GGUFFormat(NamedTuple):
    """Format of a tensor."""

    name: str
    """Usual name: Q4_K, BF16."""
    number: int
    """Number in files (`ggml_type`)."""
    values_per_block: int
    """Values of a row in one block. The length of a row is a multiple of it."""
    block: np.dtype[Any]
    """Fields of one block, without gaps."""
    decode: Callable[[npt.NDArray[Any]], _Decoded | Floats]

    @property
    def scales(self) -> Scales:
        """Kind of the scales of its integers."""
        if self.values_per_block == _SHARED:
            return "multiples"
        return "bfloat16" if "e" in (self.block.names or ()) else "float16"

    @property
    def bytes_per_block(self) -> int:
        return self.block.itemsize

    def bytes_per_row(self, columns: int) -> int:
        """Bytes of a row of `columns` values, which must be whole blocks."""
        return columns // self.values_per_block * self.bytes_per_block


def decoded(form: GGUFFormat, rows: Bytes) -> WeightIntegers | Floats:
    """Decode `rows`, uint8 [out, bytes of a row], into new memory.

    Integers keep the groups of the format; floats become float32 [out, in]. Scales may be any
    float16, so that callers must expect NaN and infinity.
    """
    blocks = np.ascontiguousarray(rows).view(form.block)
    with np.errstate(over="ignore", invalid="ignore"):
        found = form.decode(blocks)
    if not isinstance(found, _Decoded):
        return found
    count, columns = len(rows), blocks.shape[1] * form.values_per_block
    scales = found.scales.reshape(count, -1)
    return WeightIntegers(
        values=found.values.view(np.int8).reshape(count, columns),
        scales=scales,
        zeros=None,
        minimums=None if found.minimums is None else found.minimums.reshape(count, -1),
        group_size=columns // scales.shape[1],
        bits=found.bits,
        table=found.table,
    )


def format_name(number: int) -> str:
    """Name of a format by its number, supported or not, for messages."""
    if number in FORMATS:
        return FORMATS[number].name
    return _OTHERS.get(number, f"number {number}")


def _unpacked(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack values of `bits` bits from bytes [..., n] to [..., n / run, 8 / bits, run].

    In each run of `run` bytes, the first values are in the lowest bits, the next in higher ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    out = np.empty((*runs.shape[:-1], 8 // bits, run), np.uint8)
    for part in range(8 // bits):
        np.right_shift(runs, bits * part, out=out[..., part, :])
    out &= (1 << bits) - 1
    return out


def _f32(numbers: npt.NDArray[Any]) -> Floats:
    return numbers.astype(np.float32)


# -- 32 values with a scale of their own, and perhaps a minimum


def _q4_0(blocks: npt.NDArray[Any]) -> _Decoded:
    values = _unpacked(blocks["qs"], 4, 16)
    values -= 8  # wraps modulo 256, as int8 needs
    return _Decoded(values, _f32(blocks["d"]), None, 4)


def _q4_1(blocks: npt.NDArray[Any]) -> _Decoded:
    return _Decoded(_unpacked(blocks["qs"], 4, 16), _f32(blocks["d"]), _f32(blocks["m"]), 4)


def _five_bits(blocks: npt.NDArray[Any]) -> Bytes:
    values = _unpacked(blocks["qs"], 4, 16).reshape(*blocks.shape, 32)
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    high <<= 4
    values |= high
    return values


def _q5_0(blocks: npt.NDArray[Any]) -> _Decoded:
    values = _five_bits(blocks)
    values -= 16
    return _Decoded(values, _f32(blocks["d"]), None, 5)


def _q5_1(blocks: npt.NDArray[Any]) -> _Decoded:
    return _Decoded(_five_bits(blocks), _f32(blocks["d"]), _f32(blocks["m"]), 5)


def _q8_0(blocks: npt.NDArray[Any]) -> _Decoded:
    return _Decoded(np.ascontiguousarray(blocks["qs"]), _f32(blocks["d"]), None, 8)


# -- 256 values whose scales are small integers that share a float16


def _q2_k(blocks: npt.NDArray[Any]) -> _Decoded:
    scales = _f32(blocks["d"])[..., None] * (blocks["scales"] & 15)
    minimums = _f32(blocks["dmin"])[..., None] * (blocks["scales"] >> 4)
    return _Decoded(_unpacked(blocks["qs"], 2, 32), _f32(scales), -_f32(minimums), 4)


def _q3_k(blocks: npt.NDArray[Any]) -> _Decoded:
    values = _unpacked(blocks["qs"], 2, 32)
    values |= _unpacked(blocks["hmask"], 1, 32).reshape(values.shape) << 2
    values -= 4
    low = _unpacked(blocks["scales"][..., :8], 4, 8)
    high = _unpacked(blocks["scales"][..., 8:], 2, 4)
    sixteen = (*blocks.shape, 16)
    scales = (low.reshape(sixteen) | high.reshape(sixteen) << 4).view(np.int8) - 32
    return _Decoded(values, _f32(blocks["d"])[..., None] * _f32(scales), None, 4)


def _eight_scales(blocks: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Unpack the scales and the minimums of eight groups, six bits each.

    The first four groups have a byte each. The others have four bits in a byte that a
    scale and a minimum share, and two in the free bits of the first four."""
    first, second, shared = (blocks["scales"][..., at : at + 4] for at in (0, 4, 8))
    scales = np.concatenate((first & 63, shared & 15 | first >> 2 & 48), axis=-1)
    minimums = np.concatenate((second & 63, shared >> 4 | second >> 2 & 48), axis=-1)
    d, dmin = _f32(blocks["d"])[..., None], _f32(blocks["dmin"])[..., None]
    return d * _f32(scales), -(dmin * _f32(minimums))


def _q4_k(blocks: npt.NDArray[Any]) -> _Decoded:
    return _Decoded(_unpacked(blocks["qs"], 4, 32), *_eight_scales(blocks), 4)


def _q5_k(blocks: npt.NDArray[Any]) -> _Decoded:
    values = _unpacked(blocks["qs"], 4, 32)
    values |= _unpacked(blocks["qh"], 1, 32).reshape(values.shape) << 4
    return _Decoded(values, *_eight_scales(blocks), 5)


def _q6_k(blocks: npt.NDArray[Any]) -> _Decoded:
    values = _unpacked(blocks["ql"], 4, 64)
    values |= _unpacked(blocks["qh"], 2, 32).reshape(values.shape) << 4
    values -= 32
    return _Decoded(values, _f32(blocks["d"])[..., None] * _f32(blocks["scales"]), None, 6)


# -- four bits that choose one of sixteen values


@functools.cache
def _halves(table: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Tables from a byte to the value of its low half, and to that of its high half."""
    chosen = np.array(table, np.int8).tobytes()
    return chosen * 16, bytes(chosen[byte >> 4] for byte in range(256))


_NORMAL_FLOAT = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E8M0_HALF = np.ldexp(1.0, np.arange(-128, 128)).astype(np.float32)
"""Half of 2 ** (e - 127), since the values of the table are doubled."""


def _chosen(blocks: npt.NDArray[Any], scales: Floats, table: tuple[int, ...]) -> _Decoded:
    runs = blocks["qs"].reshape(-1, 16)
    packed = runs.tobytes()
    out = np.empty((len(runs), 2, 16), np.int8)
    for half, chosen in enumerate(_halves(table)):
        out[:, half] = np.frombuffer(packed.translate(chosen), np.int8).reshape(-1, 16)
    return _Decoded(out, scales, None, 4, table)


def _iq4_nl(blocks: npt.NDArray[Any]) -> _Decoded:
    return _chosen(blocks, _f32(blocks["d"]), _NORMAL_FLOAT)


def _iq4_xs(blocks: npt.NDArray[Any]) -> _Decoded:
    low = np.stack((blocks["scales_l"] & 15, blocks["scales_l"] >> 4), axis=-1)
    high = blocks["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low.reshape(high.shape) | high << 4).astype(np.int8) - 32
    scales = _f32(blocks["d"])[..., None] * _f32(scales)
    return _chosen(blocks, scales, _NORMAL_FLOAT)


def _mxfp4(blocks: npt.NDArray[Any]) -> _Decoded:
    return _chosen(blocks, _E8M0_HALF[blocks["e"]], E2M1_TWICE)


# -- floats


def _floats(blocks: npt.NDArray[Any]) -> Floats:
    return _f32(blocks["x"])


def _bf16(blocks: npt.NDArray[Any]) -> Floats:
    return (blocks["x"].astype(np.uint32) << 16).view(np.float32)


def _format(name: str, number: int, values: int, fields: str, decode: Any) -> GGUFFormat:
    """Make a format. `fields` are "name:type" with numpy's types, "name:u1*16" for an array."""
    block: list[tuple[Any, ...]] = []
    for field in fields.split():
        key, _, kind = field.partition(":")
        kind, _, count = kind.partition("*")
        block.append((key, f"<{kind}", (int(count),)) if count else (key, f"<{kind}"))
    return GGUFFormat(name, number, values, np.dtype(block), decode)


FORMATS = {
    form.number: form
    for form in (
        _format("F32", 0, 1, "x:f4", _floats),
        _format("F16", 1, 1, "x:f2", _floats),
        _format("Q4_0", 2, 32, "d:f2 qs:u1*16", _q4_0),
        _format("Q4_1", 3, 32, "d:f2 m:f2 qs:u1*16", _q4_1),
        _format("Q5_0", 6, 32, "d:f2 qh:u1*4 qs:u1*16", _q5_0),
        _format("Q5_1", 7, 32, "d:f2 m:f2 qh:u1*4 qs:u1*16", _q5_1),
        _format("Q8_0", 8, 32, "d:f2 qs:i1*32", _q8_0),
        _format("Q2_K", 10, 256, "scales:u1*16 qs:u1*64 d:f2 dmin:f2", _q2_k),
        _format("Q3_K", 11, 256, "hmask:u1*32 qs:u1*64 scales:u1*12 d:f2", _q3_k),
        _format("Q4_K", 12, 256, "d:f2 dmin:f2 scales:u1*12 qs:u1*128", _q4_k),
        _format("Q5_K", 13, 256, "d:f2 dmin:f2 scales:u1*12 qh:u1*32 qs:u1*128", _q5_k),
        _format("Q6_K", 14, 256, "ql:u1*128 qh:u1*64 scales:i1*16 d:f2", _q6_k),
        _format("IQ4_NL", 20, 32, "d:f2 qs:u1*16", _iq4_nl),
        _format("IQ4_XS", 23, 256, "d:f2 scales_h:u2 scales_l:u1*4 qs:u1*128", _iq4_xs),
        _format("BF16", 30, 1, "x:u2", _bf16),
        _format("MXFP4", 39, 32, "e:u1 qs:u1*16", _mxfp4),
    )
}
"""Formats that can be loaded, by number."""

_OTHERS = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
