"""What can go wrong with a step, as values that a `FakeModel` is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

from aioserve.steps.plan import StepPlan

__all__ = ["Fault", "Faults", "PlantedError", "random_step_seconds"]


class PlantedError(Exception):
    """Raised by a step that was to fail."""


class Fault(Enum):
    """One way in which a step goes wrong."""

    LAUNCH_RAISES = "launch raises"
    """Nothing of the step is done."""
    STEP_RAISES = "step raises"
    """A part of its copies and KV writes is done, from nothing to everything."""
    BAD_ROW = "bad row"
    """The logits of one row that samples are NaN."""
    SLOW = "slow"
    """The step takes `slow_seconds` longer."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Which launches go wrong and how: those numbered in `at`, counted from 0, and others by chance
    at the `rates` (0 to 1, together at most 1). Everything about a launch is drawn from `seed` and
    its number."""

    at: Mapping[int, Fault] = {}
    rates: Mapping[Fault, float] = {}
    slow_seconds: float = 1.0
    seed: int = 0

    def draw(self, launch: int) -> tuple[Fault | None, random.Random]:
        """What goes wrong with that launch, and the source of the details."""
        source = random.Random(self.seed * 0x9E3779B1 + launch)
        chance = source.random()
        fault = self.at.get(launch)
        if fault is None:
            for candidate, rate in self.rates.items():
                chance -= rate
                if chance < 0:
                    return candidate, source
        return fault, source


def random_step_seconds(low: float, high: float, *, seed: int = 0) -> Callable[[StepPlan], float]:
    """For `FakeModel(step_seconds=...)`: each step takes between `low` and `high` seconds."""
    source = random.Random(seed)
    return lambda plan: source.uniform(low, high)
