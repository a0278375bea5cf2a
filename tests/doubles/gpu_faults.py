"""Faults of launches on a `FakeGpu`, as values that it is given."""

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
    """One row's logits are NaN, if it samples."""


class GpuFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults by launch. Launches numbered in `at`, counted from 0, go wrong, and others by chance.

    `rates` are 0 to 1 and together at most 1, drawn from the device's seed. Captures numbered in
    `uncapturable` fail.
    """

    at: Mapping[int, GpuFault] = {}
    rates: Mapping[GpuFault, float] = {}
    uncapturable: frozenset[int] = frozenset()

    def draw(self, launch: int, source: random.Random) -> GpuFault | None:
        """Draw the fault of a launch; None for no fault."""
        chance = source.random()
        if launch in self.at:
            return self.at[launch]
        for fault, rate in self.rates.items():
            chance -= rate
            if chance < 0:
                return fault
        return None
