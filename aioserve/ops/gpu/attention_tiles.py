"""Choice of the tiles of attention: pure functions of the model's shape and the device.

Only `decode_splits` depends on a batch, and it changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = [
    "AttentionTiles",
    "Tile",
    "attention_tiles",
    "decode_splits",
    "max_parts",
    "padded_dims",
]

PART_KEYS = 128

_PROGRAMS = 256
"""Programs that keep a device busy: about two for each multiprocessor of an H100 or B200."""

_MOST_PROGRAMS = 4096
_LONG_CONTEXT = 4096


@dataclass(slots=True, frozen=True)
class Tile:
    """Tile that one program holds at a time, and options of its compilation.

    A row is one query head of one token. A program has `rows` of them and takes `keys` keys at a
    time. The keys and values of the next `ahead` turns are being loaded meanwhile.
    """

    rows: int
    keys: int
    warps: int
    ahead: int

    @property
    def stages(self) -> int:
        """Stages of Triton's pipeline: a key's page is looked up one load before the key itself."""
        return 2 * self.ahead + 1


class AttentionTiles(NamedTuple):
    prefill: Tile
    decode: Tile
    part_keys: int = PART_KEYS
    """Fewest keys in a part of a decode's context, if the context is longer; whole tiles of keys.
    Long contexts have `max_parts` longer parts."""


@lru_cache
def attention_tiles(head_dim: int, dtype: torch.dtype, target: int) -> AttentionTiles:
    """Choose tiles for a device of compute capability `target`: 80 for 8.0 (an A100), 90, 100.

    A program's tiles fit the device's shared memory: 163 KiB on 80, 227 KiB on 90 and 100. Other
    devices have 99 KiB.
    """
    exact = dtype.itemsize == 4
    return AttentionTiles(
        prefill=Tile(16, 16, 4, 1) if exact else _prefill(head_dim, target),
        decode=_exact_decode(head_dim) if exact else _decode(head_dim),
    )


# Larger tiles spill registers: `python -m tests.ops.gpu.compile_kernels` shows it.
def _prefill(head_dim: int, target: int) -> Tile:
    if target in (90, 100):
        return Tile(128, 64, 8, 1) if head_dim <= 128 else Tile(128, 32, 8, 1)
    if target == 80:
        if head_dim <= 128:
            return Tile(128, 64 if head_dim <= 64 else 32, 8, 2)
        return Tile(64, 32, 8, 1)
    return Tile(64, 32, 4, 2) if head_dim <= 128 else Tile(32, 32, 4, 1)


# Tensor cores take at least 16 rows. Two programs or more share a multiprocessor.
def _decode(head_dim: int) -> Tile:
    return Tile(16, 64, 4, 2) if head_dim <= 128 else Tile(16, 32, 4, 2)


# IEEE products of float32 don't run on tensor cores: operands are in registers, so tiles are small.
def _exact_decode(head_dim: int) -> Tile:
    return Tile(16, 32, 4, 1) if head_dim <= 128 else Tile(16, 16, 4, 1)


def padded_dims(head_dim: int) -> int:
    """Dimensions of a head in a tile: a power of two, and at least what tensor cores take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def max_parts(kv_heads: int) -> int:
    """Parts of the longest context: enough for one sequence to fill a device."""
    wanted = -(-_PROGRAMS // kv_heads)
    return min(64, max(16, 1 << (wanted - 1).bit_length()))


def decode_splits(decodes: int, kv_heads: int, max_context: int) -> int:
    """Programs for each decode's context that keep a device busy; at least 1.

    Few decodes need several programs each to fill the device. With many decodes, one context may be
    much longer than the others. Several programs then help too, as long as not too many find
    nothing to do.
    """
    programs = max(1, decodes) * kv_heads
    filling = -(-_PROGRAMS // programs)
    evening = min(-(-max_context // _LONG_CONTEXT), _MOST_PROGRAMS // programs)
    most = min(max_parts(kv_heads), -(-max_context // PART_KEYS))
    return max(1, min(most, max(filling, evening)))
