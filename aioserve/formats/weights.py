"""Formats of weights: those that a backend's kernels compute, and those held in memory for them."""

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
    "HeldLinear",
]


class AttentionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Largest sizes that a backend's kernels for attention take."""

    devices: str
    """What computes, for messages."""
    head_dim: int
    """Numbers of a head; of latents, those that are rotated."""
    latent_rank: int
    """Numbers of a latent."""
    latent_dim: int
    """Numbers of a latent and the rotated ones."""
    otherwise: str = ""
    """What computes larger ones, for messages."""

    def largest_rank(self, rotated_dim: int) -> int:
        """Largest latent beside so many rotated numbers."""
        return min(self.latent_rank, self.latent_dim - rotated_dim)


class ComputedFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of weights that a backend computes as they are held; all others become floats while
    they are read."""

    dtypes: tuple[str, ...]
    """Floats that it computes in."""
    packed: bool
    """Whether all linear layers are held as `_native` packs them. Else those of floats are arrays,
    and those with integers are a `HeldLinear`."""
    integer_bits: tuple[int, ...] = ()
    """Bits of the integers with scales in groups that it multiplies, in ascending order."""
    coded_floats: bool = False
    """Whether it multiplies floats of 8 and 4 bits that are codes with scales in groups, too."""
    attention: AttentionLimits | None = None
    """Sizes that it has kernels for; None: any."""
    integer_activations: bool = True
    """Whether rows may become int8 where they meet integers, and E4M3 where they meet E4M3."""

    def held_bits(self, bits: int) -> int | None:
        """In how many bits integers of so many are held; None: they become floats."""
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
"""What the values of rows are: integers, codes of 4 bits for integers in a table, floats of E4M3,
or codes of 4 bits for floats in a table."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Rows of small numbers with scales in groups, in the order in which GPUs read them.

    Of row o and input i, in column c with order[c] = i, chunk k = c // chunk and group
    g = k // repeat, `value` being values[k, o, c % chunk], the weight is

        (value - offset - zeros[g, o]) * scales[g, o // alike] + minimums[g, o]    integers
        float32(value) * scales[g, o // alike]                                     e4m3
        table[value] * scales[g, o // alike]                                       chosen, table

    values: uint8 [chunks, out, chunk / 2], two of 4 bits in a byte, the first one in its lower
        half; or [chunks, out, chunk], int8, or uint8 that are the bits of E4M3. Values behind the
        last input are 0.
    scales, minimums: float32 or float16 [groups, outputs], or int16, which are the bits of
        bfloat16; or int8, which are multiples of the units.
    scale_units, minimum_units: float32 [units, out], each of `unit_chunks` chunks; or None.
    zeros: int8 [groups, out].
    table: float32 [16].
    order: int32 [in]; None: columns are the inputs.
    bias: [out] of the layer's dtype; None: nothing is added.
    rounded_activations: whether rows that are multiplied become int8, or E4M3 where values are.
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
        """Bytes of what there is once for all rows."""
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
class HeldLinear:
    """A linear layer with small numbers in it, in the host's memory: the rows of each of `runs`
    behind those of the one before."""

    dtype: str
    """Dtype of rows that are multiplied: float32, bfloat16 or float16. Arrays of bfloat16 are
    int16."""
    in_features: int
    runs: tuple[GroupedRows | FloatRows, ...]

    @property
    def out_features(self) -> int:
        return sum(run.out_features for run in self.runs)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and bytes of each run."""
        return tuple((run.out_features, run.num_bytes) for run in self.runs)
