"""What can go wrong with a launch on a `FakeGpu`, as values that it is given."""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import Enum

import msgspec

__all__ = ["GpuFault", "GpuFaults"]


class GpuFault(Enum):
    """One way in which a launch goes wrong."""

    OUT_OF_MEMORY = "out of memory"
    """It finds no memory."""
    RAISES = "raises"
    """It is refused, and nothing else happens."""
    BREAKS = "breaks"
    """Its work breaks the device: nothing is ever done again."""
    HANGS = "hangs"
    """Its work never ends."""
    BAD_ROW = "bad row"
    """If it samples, one row's logits are NaN."""


class GpuFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Which launches go wrong and how: those numbered in `at`, counted from 0, and others by chance
    at the `rates` (0 to 1, together at most 1), drawn from the device's seed. Captures numbered in
    `uncapturable` fail."""

    at: Mapping[int, GpuFault] = {}
    rates: Mapping[GpuFault, float] = {}
    uncapturable: frozenset[int] = frozenset()

    def draw(self, launch: int, source: random.Random) -> GpuFault | None:
        """What goes wrong with that launch."""
        chance = source.random()
        if launch in self.at:
            return self.at[launch]
        for fault, rate in self.rates.items():
            chance -= rate
            if chance < 0:
                return fault
        return None
