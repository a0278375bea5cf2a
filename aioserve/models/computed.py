"""What a backend's linear layers compute, and what is held in memory for them.

Known before torch is imported, so that weights are read into the form that it wants meanwhile.
Imports nothing of the package, so all may import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "CUDA",
    "NATIVE",
    "PLAIN_FLOATS",
    "ComputedFormats",
    "FloatRows",
    "GroupedRows",
    "HeldLinear",
]


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
    integer_activations: bool = True
    """Whether rows may become int8 where they meet integers."""

    def held_bits(self, bits: int) -> int | None:
        """In how many bits integers of so many are held; None: they become floats."""
        return next((held for held in self.integer_bits if held >= bits), None)


_DTYPES = ("float32", "bfloat16", "float16")
NATIVE = ComputedFormats(dtypes=("float32", "bfloat16"), packed=True, integer_bits=(4, 5, 6, 8))
PLAIN_FLOATS = ComputedFormats(dtypes=_DTYPES, packed=False)
CUDA = ComputedFormats(dtypes=_DTYPES, packed=False, integer_bits=(4, 8))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Rows of integers with scales in groups, in the order in which GPUs read them.

    Of row o and input i, in chunk c = i // chunk and group g = c // repeat, the weight is

        (values[c, o, i % chunk] - offset - zeros[g, o]) * scales[g, o] + minimums[g, o]

    values: uint8 [chunks, out, chunk / 2], two of 4 bits in a byte, the first one in its lower
        half; or int8 [chunks, out, chunk]. Values behind the last input are 0.
    scales, minimums: float32 or float16 [groups, out], or int16, which are the bits of bfloat16.
    zeros: int8 [groups, out].
    bias: [out] of the layer's dtype; None: nothing is added.
    integer_activations: whether rows that are multiplied become int8, too.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.int8] | None
    minimums: npt.NDArray[Any] | None
    bias: npt.NDArray[Any] | None
    bits: int
    chunk: int
    offset: int
    integer_activations: bool

    @property
    def out_features(self) -> int:
        return self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        held = (self.values, self.scales, self.zeros, self.minimums, self.bias)
        return sum(one.nbytes for one in held if one is not None)


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
    """A linear layer with integers in it, in the host's memory: the rows of each of `runs` behind
    those of the one before."""

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
