"""Times the steps of one simulated run by a cost table, and counts those unlike the ones
measured."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import msgspec
from msgspec.structs import replace

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.request import MAX_SEED
from aioserve.simulation.cost import CostModel, CostTable, StepLoad
from aioserve.steps.plan import StepPlan
from aioserve.traces.checks import check_int

__all__ = ["StepsOutside", "TableSteps", "steps_of"]


class StepsOutside(msgspec.Struct, frozen=True):
    """Steps of a run that its cost table was not measured for, so that what they take is guessed:
    on with the last line of the table, or as long as its first point."""

    steps: int
    share: float
    """Share of all steps."""
    first: str | None
    """Way in which the first of them is outside; None where there is none."""


class TableSteps:
    """A `CostModel` for one run."""

    def __init__(self, table: CostTable, scatter_seed: int | None) -> None:
        self._table = table
        self._seed = scatter_seed
        self._steps = 0
        self._outside = 0
        self._first: str | None = None

    def step_seconds(self, plan: StepPlan) -> float:
        load = StepLoad.of(plan)
        self._steps += 1
        if (outside := self._table.outside(load)) is not None:
            self._outside += 1
            self._first = self._first or outside
        if self._seed is None:
            return self._table.seconds(load)
        return self._table.scattered_seconds(load, self._seed, plan.step)

    @property
    def tells_several(self) -> bool:
        """Whether `decode_seconds` says the same as `step_seconds`: the class of a table may have a
        method of its own."""
        return type(self._table) is CostTable

    def decode_seconds(self, load: StepLoad, step: int, count: int) -> list[float]:
        """Seconds that `step_seconds` would say, to the digit, of `count` steps from that number
        on: the first has that load, which is of decoding sequences alone, and each of them goes on
        by a token from one to the next. They aren't counted."""
        return self._table.decode_seconds(load, count, seed=self._seed, step=step).tolist()

    def count_decodes(self, load: StepLoad, count: int) -> None:
        """Count such steps, which came about."""

        def outside(step: int) -> str | None:
            context = load.context_tokens + step * load.decode_batch
            return self._table.outside(replace(load, context_tokens=context))

        self._steps += count
        # Context grows, so that all steps are outside from the first that is.
        begins = bisect_left(range(count), True, key=lambda step: outside(step) is not None)
        if begins < count:
            self._outside += count - begins
            self._first = self._first or outside(begins)

    @property
    def outside(self) -> StepsOutside:
        """Steps outside so far."""
        return StepsOutside(self._outside, self._outside / (self._steps or 1), self._first)


def steps_of(cost: CostModel, scatter_seed: Any) -> CostModel:
    """Cost model for the steps of one run. Raises `ConfigError` for a seed where there is no
    scatter."""
    if scatter_seed is not None:
        check_int("scatter_seed", scatter_seed, 0, MAX_SEED)
        if not isinstance(cost, CostTable) or cost.scatter is None:
            raise ConfigError(
                f"scatter_seed: cost has no scatter, only a cost table that was measured with it, "
                f"got {shown(scatter_seed)}"
            )
    return TableSteps(cost, scatter_seed) if isinstance(cost, CostTable) else cost
