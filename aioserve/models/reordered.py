"""Weights whose rows files store in another order than the model needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aioserve.models.stored import Format, IntegerForm, Rows, StoredLinear
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["InTurns"]


@dataclass(frozen=True, slots=True)
class InTurns(Format):
    """Rows of `parts` parts, stored as `count` rows of each in turn: see `Tensor.turns`.

    `inner` reads the stored rows. `rows_of_all` counts the rows of all parts."""

    inner: Format
    parts: int
    count: int
    rows_of_all: int

    @property
    def name(self) -> str:
        return f"{self.inner.name} in {self.parts} turns of {self.count} rows"

    @property
    def title(self) -> str:
        return self.inner.title

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        return self.inner.integers(replace(stored, format=self.inner))

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        part, within = np.divmod(np.arange(first, end), self.rows_of_all // self.parts)
        turn, row = np.divmod(within, self.count)
        places = (turn * self.parts + part) * self.count + row
        low = int(places.min())
        as_stored = replace(stored, format=self.inner)
        found = self.inner.rows(as_stored, low, int(places.max()) + 1)
        places -= low
        if not isinstance(found, WeightIntegers):
            floats = found if isinstance(found, np.ndarray) else found.dequantized()
            return floats[places]
        return replace(
            found,
            values=found.values[places],
            scales=found.scales[places],
            zeros=None if found.zeros is None else found.zeros[places],
            minimums=None if found.minimums is None else found.minimums[places],
        )
