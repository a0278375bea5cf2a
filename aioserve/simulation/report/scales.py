"""Axes: they map values to places from 0 to 1, and choose the values written beside them."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from aioserve.simulation.figures import NEVER

__all__ = ["TAIL_END", "Linear", "Log", "Scale", "Tail", "WithNever", "fitting", "plain"]

TAIL_END = 0.999
"""Last share that a `Tail` shows."""
FEW_TICKS = 5
LEAST = 1e-9
"""Smallest value, in any unit, that isn't shown as nothing."""
FINITE_END = 0.85
NEVER_AT = 0.95
"""Places on an axis that shows infinite values: the end of finite ones, and the place of infinite
ones.
"""


class Scale(Protocol):
    """One axis."""

    @property
    def high(self) -> float:
        """Value at the end."""
        ...

    def at(self, value: float) -> float:
        """Return the place of a value: 0 at the beginning of the axis, 1 at its end."""
        ...

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values to write, in order, with their texts."""
        ...


class Linear(msgspec.Struct, frozen=True):
    """Axis of equal steps; `percent` writes 0.25 as 25%."""

    low: float
    high: float
    percent: bool = False

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        step = _round_step((self.high - self.low) / FEW_TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [round(step * n, 12) for n in range(first, last + 1)]
        return [(v, f"{v * 100:.10g}%" if self.percent else plain(v)) for v in values]


class Log(msgspec.Struct, frozen=True):
    """Axis of equal factors; both ends are above 0."""

    low: float
    high: float

    def at(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[tuple[float, str]]:
        decades = math.log10(self.high / self.low)
        of_each = (1, 2, 5) if decades <= 2 else (1,)
        every = max(1, math.ceil(decades / (FEW_TICKS + 1)))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        values = [m * 10.0**d for d in range(first, last + 1) if d % every == 0 for m in of_each]
        slack = 1 + 1e-9
        return [
            (value, plain(value))
            for value in values
            if self.low / slack <= value <= self.high * slack
        ]


class Tail(msgspec.Struct, frozen=True):
    """Axis of shares from 0 to `TAIL_END`, each further nine as wide as the one before.

    The place of `p` is proportional to -log10(1 - p).
    """

    @property
    def high(self) -> float:
        return TAIL_END

    def at(self, value: float) -> float:
        return math.log10(1 - min(value, TAIL_END)) / math.log10(1 - TAIL_END)

    def ticks(self) -> list[tuple[float, str]]:
        return [(0.0, "0%"), (0.5, "50%"), (0.9, "90%"), (0.99, "99%"), (0.999, "99.9%")]

    def share(self, place: float) -> float:
        """Return the share at a place."""
        return 1 - (1 - TAIL_END) ** place


class WithNever(msgspec.Struct, frozen=True):
    """Axis of finite values, if there are any, with a place for infinite ones after them."""

    finite: Linear | Log | None

    @property
    def high(self) -> float:
        return math.inf if self.finite is None else self.finite.high

    def at(self, value: float) -> float:
        if value == math.inf or self.finite is None:
            return NEVER_AT
        return FINITE_END * self.finite.at(value)

    def ticks(self) -> list[tuple[float, str]]:
        return [*(() if self.finite is None else self.finite.ticks()), (math.inf, NEVER)]


def fitting(values: list[float]) -> Scale:
    """Make an axis that holds all values, with a place for infinite ones.

    It is logarithmic if finite values differ by more than a factor of 20, and otherwise begins at
    0.
    """
    finite = [value for value in values if value < math.inf]
    if len(finite) == len(values):
        return _fitting(finite)
    return WithNever(_fitting(finite) if finite else None)


def plain(value: float) -> str:
    """Return the text of a value: 0.5, 20, 1,000."""
    return f"{value:,.10g}"


# -- parts


def _fitting(values: list[float]) -> Linear | Log:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > LEAST and high > 20 * low:
        return Log(_rounded_down(low), _rounded_up(high))
    return Linear(0.0, high * 1.04 if high > LEAST else 1.0)


def _round_step(least: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, no less than `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def _rounded_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value)


def _rounded_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next((m * power for m in (5, 2, 1) if m * power <= value), value)
