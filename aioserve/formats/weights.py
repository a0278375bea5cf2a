"""Formats of weights: formats that a backend's kernels compute, and how memory holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "CUDA",
    "CUDA_ATTENTION",
    "NATIVE",
    "NATIVE_ATTENTION",
    "PLAIN_FLOATS",
    "AttentionLimits",
    "Code",
    "ComputedFormats",
    "FloatRows",
    "GroupedRows",
    "PackedLinear",
]


class AttentionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Largest sizes that a backend's attention kernels take."""

    devices: str
    """Name of the devices, for messages."""
    head_dim: int
    """Dimensions of a head; of latent attention, the rotated dimensions."""
    latent_rank: int
    """Dimensions of a latent, without the rotated ones."""
    latent_dim: int
    """Dimensions of a latent and its rotated key together."""
    otherwise: str = ""
    """Alternative for larger sizes, for messages."""

    def largest_rank(self, rotated_dim: int) -> int:
        """Largest rank of a latent whose rotated key has `rotated_dim` dimensions."""
        return min(self.latent_rank, self.latent_dim - rotated_dim)


class ComputedFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of weights that a backend computes directly.

    Weights of all other formats become floats while they are read."""

    dtypes: tuple[str, ...]
    """Floats that it computes in."""
    packed: bool
    """True if every linear layer is held as `_native` packs it.

    Otherwise layers of floats are plain arrays, and quantised layers are `PackedLinear`."""
    integer_bits: tuple[int, ...] = ()
    """Bits of the integers, with scales in groups, that it multiplies; in ascending order."""
    coded_floats: bool = False
    """True if it also multiplies 8-bit and 4-bit float codes with scales in groups."""
    attention: AttentionLimits | None = None
    """Sizes that it has kernels for; None: any."""
    integer_activations: bool = True
    """True if rows may become int8 for integer weights, and E4M3 for E4M3 weights."""

    def held_bits(self, bits: int) -> int | None:
        """Bits in which integers of `bits` bits are held; None if they become floats."""
        return next((held for held in self.integer_bits if held >= bits), None)


_DTYPES = ("float32", "bfloat16", "float16")
NATIVE_ATTENTION = AttentionLimits(
    devices="CPUs",
    head_dim=256,
    latent_rank=1024,
    latent_dim=1024,
    otherwise='backend="reference" computes larger ones, slowly',
)
CUDA_ATTENTION = AttentionLimits(devices="GPUs", head_dim=256, latent_rank=512, latent_dim=768)

NATIVE = ComputedFormats(
    dtypes=("float32", "bfloat16"),
    packed=True,
    integer_bits=(4, 5, 6, 8),
    coded_floats=True,
    attention=NATIVE_ATTENTION,
)
PLAIN_FLOATS = ComputedFormats(dtypes=_DTYPES, packed=False)
CUDA = ComputedFormats(
    dtypes=_DTYPES,
    packed=False,
    integer_bits=(4, 8),
    coded_floats=True,
    attention=CUDA_ATTENTION,
)

Code = Literal["integers", "chosen", "e4m3", "table"]
"""Kind of the values in rows.

`"integers"`: integers; `"chosen"`: 4-bit codes of integers in a table; `"e4m3"`: E4M3 floats;
`"table"`: 4-bit codes of floats in a table."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Rows of small numbers with scales in groups, in the order in which GPUs read them.

    Input i is in the column c with order[c] = i, in chunk k = c // chunk and group g = k // repeat.
    With `value` = values[k, o, c % chunk], its weight in row o is

        (value - offset - zeros[g, o]) * scales[g, o // alike] + minimums[g, o]    integers
        float32(value) * scales[g, o // alike]                                     e4m3
        table[value] * scales[g, o // alike]                                       chosen, table

    - values: uint8 [chunks, out, chunk / 2], two 4-bit values in a byte, the first one in its lower
      half. Or [chunks, out, chunk] of int8, or of uint8 with the bits of E4M3. Values past the last
      input are 0.
    - scales, minimums: [groups, outputs] of float32 or float16, of int16 with the bits of bfloat16,
      or of int8, in multiples of the units.
    - scale_units, minimum_units: float32 [units, out], one for every `unit_chunks` chunks; or None.
    - zeros: int8 [groups, out].
    - table: float32 [16].
    - order: int32 [in]; None: columns are in the order of inputs.
    - bias: [out] of the layer's dtype, or None.
    - rounded_activations: True if the multiplied rows become int8, or E4M3 for E4M3 values.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.int8] | None
    minimums: npt.NDArray[Any] | None
    bias: npt.NDArray[Any] | None
    bits: int
    chunk: int
    repeat: int
    offset: int
    rounded_activations: bool
    code: Code = "integers"
    table: npt.NDArray[np.float32] | None = None
    alike: int = 1
    order: npt.NDArray[np.int32] | None = None
    scale_units: npt.NDArray[np.float32] | None = None
    minimum_units: npt.NDArray[np.float32] | None = None
    unit_chunks: int = 0

    @property
    def out_features(self) -> int:
        return self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        own = self.values, self.scales, self.zeros, self.minimums, self.bias
        held = (*own, self.scale_units, self.minimum_units)
        return self.shared_bytes + sum(one.nbytes for one in held if one is not None)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the table and the order, which all rows share."""
        return sum(one.nbytes for one in (self.table, self.order) if one is not None)


@dataclass(frozen=True, slots=True, eq=False)
class FloatRows:
    """Rows of floats: weight [out, in] and bias [out] of the layer's dtype."""

    weight: npt.NDArray[Any]
    bias: npt.NDArray[Any] | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Linear layer in the host's memory, with quantised rows.

    Its outputs are the rows of `runs`, one run after the other."""

    dtype: str
    """Dtype of the multiplied rows: float32, bfloat16 or float16 (arrays of bfloat16 are int16)."""
    in_features: int
    runs: tuple[GroupedRows | FloatRows, ...]

    @property
    def out_features(self) -> int:
        return sum(run.out_features for run in self.runs)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and bytes of each run."""
        return tuple((run.out_features, run.num_bytes) for run in self.runs)
