"""Formats of KV: the numbers that keep a token's keys and values, and their bytes.

    entry      KV of one token in one layer: keys and values of its KV heads, or a latent
    plane      numbers of one kind in an entry: the values, or their scales
    page       entries of its tokens in the layers of a group, plane by plane

A new format needs an entry in `KV_FORMATS` and kernels that read and write it. Layouts,
`aioserve plan`, keys of cached KV and backends get their byte counts from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["COUNTED_KV_FORMATS", "KV_FORMATS", "KVEntry", "KVFormat", "KVPlane"]

KERNEL_STEP_BYTES = 4
"""Kernels pad the values of each head to a multiple of this many bytes."""


class KVPlane(NamedTuple):
    """Numbers of one kind that each head of an entry has."""

    name: str
    dtype: str
    """Data type of a number, as torch names it: "bfloat16"."""
    item_bytes: int
    dims_per_item: int = 1
    """Dimensions of a head that share one number; 0: all of them."""
    step_bytes: int = 1
    """The numbers of a head are padded to a multiple of this many bytes."""

    def items(self, head_dim: int) -> int:
        """Numbers of one head."""
        return -(-head_dim // self.dims_per_item) if self.dims_per_item else 1

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of the numbers of one head, padding included."""
        return -(-self.items(head_dim) * self.item_bytes // self.step_bytes) * self.step_bytes


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Planes of numbers in which KV is kept.

    Raises `ValueError` if there are no planes, two share a name, or a size is out of range.
    """

    name: str
    """Name in options, model facts and keys of cached KV."""
    planes: tuple[KVPlane, ...]
    """Planes of an entry. The first holds the values."""

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"planes must be at least one, of different names, got {names}")
        for plane in self.planes:
            if min(plane.item_bytes, plane.step_bytes) < 1 or plane.dims_per_item < 0:
                raise ValueError(
                    "item_bytes and step_bytes must be at least 1 and dims_per_item at least 0, "
                    f"got {plane}"
                )

    @classmethod
    def of_floats(cls, dtype: str, item_bytes: int) -> KVFormat:
        """Format that keeps floats in the dtype they are computed in."""
        return cls(dtype, (KVPlane("values", dtype, item_bytes, step_bytes=KERNEL_STEP_BYTES),))

    @property
    def values(self) -> KVPlane:
        """The plane of the values."""
        return self.planes[0]

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key, or of its value, over all planes."""
        return sum([plane.head_bytes(head_dim) for plane in self.planes])

    def __str__(self) -> str:
        return self.name


KV_FORMATS: Mapping[str, KVFormat] = MappingProxyType(
    {
        "float32": KVFormat.of_floats("float32", 4),
        "bfloat16": KVFormat.of_floats("bfloat16", 2),
        "float16": KVFormat.of_floats("float16", 2),
    }
)
"""Formats that engines can keep KV in."""

COUNTED_KV_FORMATS: dict[str, KVFormat] = {
    **KV_FORMATS,
    "fp8": KVFormat("fp8", (KVPlane("values", "float8_e4m3fn", 1, step_bytes=KERNEL_STEP_BYTES),)),
    "int8": KVFormat("int8", (KVPlane("values", "int8", 1, step_bytes=KERNEL_STEP_BYTES),)),
}
"""`KV_FORMATS` and formats that only `aioserve plan` knows, whose scales are not counted."""


@dataclass(frozen=True, slots=True)
class KVEntry:
    """KV of one token in one layer."""

    format: KVFormat
    num_kv_heads: int
    head_dim: int
    """Dimensions of a key and of a value, or of the latent that replaces both."""
    latent: bool = False
    """True if the entry is one latent vector instead of keys and values."""

    @property
    def num_vectors(self) -> int:
        """Vectors of each head: a key and a value, or one latent."""
        return 1 if self.latent else 2

    @property
    def num_bytes(self) -> int:
        """Bytes over all planes."""
        return self.num_vectors * self.num_kv_heads * self.format.head_bytes(self.head_dim)

    def page_shape(self, plane: KVPlane, page_size: int) -> tuple[int, int, int, int]:
        """Shape of one plane of a page in one layer: `[vectors, heads, tokens, items of a head]`.

        Padding is left out."""
        return self.num_vectors, self.num_kv_heads, page_size, plane.items(self.head_dim)
