"""Models of the time that a step takes, since nothing is computed here.

A cost model sees the plan that a runner would see, and knows neither policies nor requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from aioserve.config import MAX_COUNT
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.paging.pages import capacity_tokens, window_pages
from aioserve.sampling_params import MAX_SEED
from aioserve.simulation.step_noise import StepNoise
from aioserve.steps.plan import StepPlan
from aioserve.traces.checks import check_int, check_number, named

__all__ = [
    "NO_TIME",
    "WAKE_AFTER_SECONDS",
    "CostModel",
    "CostTable",
    "HostTimes",
    "MeasuredKV",
    "StepLoad",
    "StepsOutside",
    "TableSteps",
    "check_windows",
    "nearest_to",
    "place_on",
    "steps_of",
]

Floats = npt.NDArray[np.float64]
_Place = tuple[int, float, int, float]
"""Segment of each axis, and a step's place along it."""

MAX_POINTS = 1024
"""Most points of one axis."""
MAX_STEP_SECONDS = 1e6
MAX_LOAD = 1 << 60
"""Most tokens of context, or attended pairs, of one step."""


class CostModel(Protocol):
    def step_seconds(self, plan: StepPlan) -> float:
        """Return the seconds, more than 0, from the launch of a step to its tokens."""
        ...


class StepLoad(msgspec.Struct, frozen=True):
    """Load of a step, as a cost table sees it."""

    prefill_tokens: int
    """Tokens of prompts."""
    decode_batch: int
    """Sequences with a single token that is sampled from."""
    context_tokens: int
    """Tokens that the decoding sequences attend to, together."""
    attended_pairs: int
    """Pairs of a prompt's token and a token that it attends to, over all prompt tokens."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        prefill = decode = context = pairs = 0
        for item in plan.items:
            end = item.index + item.count
            if item.count > 1 or not item.rows:
                prefill += item.count
                pairs += item.count * (item.index + end + 1) // 2
            else:
                decode += 1
                context += end
        return cls(prefill, decode, context, pairs)


LEAST_OF_KV = {"max_model_len": 2, "num_window_groups": 0, "window": 0}


class MeasuredKV(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV memory of the engine whose steps were measured. Raises `ConfigError` for invalid
    values.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    """Most tokens of a prompt and its completion."""
    bytes_per_token: int | None = None
    """Bytes of one token in a page, for the layers that share the page."""
    num_window_groups: int = 0
    """Groups of layers whose pages leave with the window, as in `KVLayout`."""
    window: int = 0
    """Last positions that these groups keep; 0 without window groups."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None or name != "bytes_per_token":
                least = LEAST_OF_KV.get(name, 1)
                check_int(f"cost table: kv: {name}", value, least, MAX_COUNT)
        with named("cost table: kv"):
            check_windows(self.num_window_groups, self.window)

    def tokens_of(self, num_seqs: int) -> int:
        """Return the most computed tokens that `num_seqs` sequences can have together in the
        pages.
        """
        groups, size = self.num_window_groups, self.page_size
        kept = num_seqs * window_pages(self.window, size)
        whole = max(self.num_pages // (1 + groups), self.num_pages - groups * kept)
        return capacity_tokens(whole, size)


def check_windows(num_window_groups: int, window: int) -> None:
    """Raise `ConfigError` for window groups without a window, and for a window without groups."""
    if (window > 0) != (num_window_groups > 0):
        raise ConfigError(
            "window must be at least 1 with num_window_groups, and 0 without, got "
            f"window={window} and num_window_groups={num_window_groups}"
        )


WAKE_AFTER_SECONDS = 0.005
"""Idle time, in seconds, after which the next step finds little of its data in the caches."""


class HostTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a request takes outside of steps, and adds to them.

    Raises `ConfigError` for invalid times.
    """

    intake_seconds: float = 0.0
    """Time from a request's arrival until a step with it can be launched."""
    delivery_seconds: float = 0.0
    """Time from the end of a step until its tokens are there for their readers."""
    step_delay_seconds: float = 0.0
    """Time that a request adds to the steps during which it arrives. Taking it in needs the event
    loop and a processor.
    """
    wake_seconds: float = 0.0
    """Extra time of the first step after `WAKE_AFTER_SECONDS` or more without a step."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            check_number(f"cost table: host: {name}", value, MAX_STEP_SECONDS, above=None)

    def __str__(self) -> str:
        return (
            f"a request takes {self.intake_seconds * 1e6:.0f} µs before its first step and "
            f"{self.delivery_seconds * 1e6:.0f} behind one, and delays those it comes during "
            f"by {self.step_delay_seconds * 1e6:.0f}; the first step after an idle time takes "
            f"{self.wake_seconds * 1e6:.0f} longer"
        )


NO_TIME = HostTimes()


class CostTable:
    """Measured steps: seconds by prompt tokens and decoding sequences, and the cost of each token
    of context.

    Between the points of the grid, times are interpolated bilinearly. Beyond it they grow as
    between the last two points on that side. A step below the first point of an axis takes as long
    as one there. Forks and page copies are not counted.

    These are means. With `step_noise`, a single step takes its mean times a ratio that is drawn for
    it.
    """

    def __init__(
        self,
        prefill_tokens: Sequence[int],
        decode_batch: Sequence[int],
        seconds: Sequence[Sequence[float]],
        *,
        seconds_per_context_token: float = 0.0,
        seconds_per_attended_pair: float = 0.0,
        step_noise: Sequence[Sequence[Sequence[float]]] | None = None,
        max_context_tokens: int | None = None,
        max_attended_pairs: int | None = None,
        kv: MeasuredKV | None = None,
        noise_order: Sequence[int] | None = None,
        host: HostTimes = NO_TIME,
    ) -> None:
        """Make a table of measured steps.

        - `prefill_tokens` and `decode_batch` are the axes of the grid.
        - `seconds[i][j]` is a step of `prefill_tokens[i]` and `decode_batch[j]` without context.
        - `seconds_per_context_token` and `seconds_per_attended_pair` are factors of these fields of
          `StepLoad`.
        - `max_context_tokens` and `max_attended_pairs` are the most that were measured, if known.
        - `step_noise` and `noise_order` are the arguments of `StepNoise`.
        - `host` has the times of requests outside of steps.

        Raises `ConfigError` unless both axes grow, have two points or more, and fit the grid. Times
        must be positive and must not shrink as steps grow. Context must cost at least 0. The ratios
        of each point must be 1 on average.
        """
        axes, grid = _checked_grid(prefill_tokens, decode_batch, seconds)
        for name, value in (
            ("seconds", float(grid.max())),
            ("seconds_per_context_token", seconds_per_context_token),
            ("seconds_per_attended_pair", seconds_per_attended_pair),
        ):
            check_number(name, value, MAX_STEP_SECONDS, above=None)
        for name, most in (
            ("max_context_tokens", max_context_tokens),
            ("max_attended_pairs", max_attended_pairs),
        ):
            if most is not None:
                check_int(name, most, 0, MAX_LOAD)
        if kv is not None and type(kv) is not MeasuredKV:
            raise ConfigError(f"kv must be a MeasuredKV, got {shown(kv)}")
        self._axes = axes
        self._seconds: list[list[float]] = grid.tolist()
        self._per_context_token = float(seconds_per_context_token)
        self._per_attended_pair = float(seconds_per_attended_pair)
        self._measured = (
            ("prefill_tokens", axes[0][0], axes[0][-1]),
            ("decode_batch", axes[1][0], axes[1][-1]),
            ("context_tokens", 0, MAX_LOAD if max_context_tokens is None else max_context_tokens),
            ("attended_pairs", 0, MAX_LOAD if max_attended_pairs is None else max_attended_pairs),
        )
        self.max_context_tokens: int | None = max_context_tokens
        self.step_noise: StepNoise | None = None
        if step_noise is not None:
            self.step_noise = StepNoise(step_noise, grid.shape, noise_order)
        elif noise_order is not None:
            raise ConfigError("noise_order: there is no step_noise that it could be the order of")
        if type(host) is not HostTimes:
            raise ConfigError(f"host must be HostTimes, got {shown(host)}")
        self.host: HostTimes = host
        self.kv: MeasuredKV | None = kv

    def step_seconds(self, plan: StepPlan) -> float:
        return self.seconds(StepLoad.of(plan))

    def seconds(self, load: StepLoad) -> float:
        """Return the mean seconds of a step with this load."""
        return self._seconds_at(self._place(load), load)

    def noisy_seconds(self, load: StepLoad, seed: int, step: int) -> float:
        """Return the seconds of step number `step`, with the ratio that is drawn for it from
        `seed`.

        Raises `ConfigError` for a table without noise.
        """
        place, noise = self._place(load), self._known_noise()
        return self._seconds_at(place, load) * noise.ratio(
            *nearest_to(*place), noise.draw(seed, step)
        )

    def decode_seconds(
        self, load: StepLoad, count: int, *, seed: int | None = None, step: int = 0
    ) -> Floats:
        """Return the seconds of `count` steps without prompts, the first of this load.

        Each further step has one more token of context for each sequence. The values equal, to the
        last digit, those of `seconds`, or of `noisy_seconds` from number `step` on if a seed is
        given.
        """
        place = self._place(load)
        grown = (load.context_tokens + load.decode_batch * np.arange(count)).astype(np.float64)
        context = grown * self._per_context_token
        context += load.attended_pairs * self._per_attended_pair
        seconds: Floats = self._grid_seconds(place) + context
        if seed is None:
            return seconds
        noise = self._known_noise()
        ratios = noise.ratios(*nearest_to(*place), noise.draws(seed, step, count))
        return seconds * ratios

    def outside(self, load: StepLoad) -> str | None:
        """Return how a step lies outside the measured ones; None if it lies between them."""
        for name, least, most in self._measured:
            value = getattr(load, name)
            if not least <= value <= most:
                return f"{name} = {value:,} (measured: {least:,} to {most:,})"
        return None

    def _known_noise(self) -> StepNoise:
        if self.step_noise is None:
            raise ConfigError("the cost table has no noise: give no seed for it")
        return self.step_noise

    def _place(self, load: StepLoad) -> _Place:
        prefill, decode = self._axes
        return *place_on(prefill, load.prefill_tokens), *place_on(decode, load.decode_batch)

    def _seconds_at(self, place: _Place, load: StepLoad) -> float:
        context = load.context_tokens * self._per_context_token
        context += load.attended_pairs * self._per_attended_pair
        return self._grid_seconds(place) + context

    def _grid_seconds(self, place: _Place) -> float:
        i, u, j, v = place
        low, high = self._seconds[i], self._seconds[i + 1]
        # Inside the grid, or on its edge. The part beyond is added for each axis separately.
        x, y = min(u, 1.0), min(v, 1.0)
        at_low, at_high = low[j] + y * (low[j + 1] - low[j]), high[j] + y * (high[j + 1] - high[j])
        along_decode = (1 - x) * (low[j + 1] - low[j]) + x * (high[j + 1] - high[j])
        inside = (1 - x) * at_low + x * at_high
        return inside + (u - x) * (at_high - at_low) + (v - y) * along_decode


def _checked_grid(
    prefill_tokens: Sequence[int], decode_batch: Sequence[int], seconds: Sequence[Sequence[float]]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], Floats]:
    """Return both axes, and the seconds at their points; raises as `CostTable`."""
    with named("cost table"):
        prefill = _axis("prefill_tokens", prefill_tokens)
        decode = _axis("decode_batch", decode_batch)
        # Read no more of overlong rows than shows that they are too long.
        high, wide = len(prefill), len(decode)
        rows = [[*islice(row, wide + 1)] for row in islice(seconds, high + 1)]
        if len(rows) != high or any(len(row) != wide for row in rows):
            raise ConfigError(f"seconds must be a grid of {high} by {wide} values")
        grid = np.array(rows, np.float64)
    has_empty = prefill[0] == decode[0] == 0
    if not np.isfinite(grid).all() or grid.min() < 0 or (grid == 0).sum() > has_empty:
        raise ConfigError("seconds must be finite and, but for an empty step, more than 0")
    if (np.diff(grid, axis=0) < 0).any() or (np.diff(grid, axis=1) < 0).any():
        raise ConfigError("seconds must not shrink as prefill_tokens or decode_batch grow")
    return (prefill, decode), grid


def _axis(name: str, points: Sequence[int]) -> tuple[int, ...]:
    axis = tuple(islice(points, MAX_POINTS + 1))
    if not 2 <= len(axis) <= MAX_POINTS or any(type(point) is not int for point in axis):
        raise ConfigError(
            f"{name} must be two or more growing counts, and at most {MAX_POINTS}, got "
            f"{shown(axis)}"
        )
    if not 0 <= axis[0] <= axis[-1] <= MAX_COUNT or any(a >= b for a, b in pairwise(axis)):
        raise ConfigError(
            f"{name} must be two or more growing counts up to {MAX_COUNT}, got {shown(axis)}"
        )
    return axis


def place_on(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Return the segment of an axis that holds `value`, and its place there: 0 to 1, more beyond
    the end.
    """
    index = min(max(bisect_left(axis, value) - 1, 0), len(axis) - 2)
    return index, max(0.0, (value - axis[index]) / (axis[index + 1] - axis[index]))


def nearest_to(i: int, u: float, j: int, v: float) -> tuple[int, int]:
    """Return the grid point nearest to a step that `place_on` found on both axes."""
    return i + (u > 0.5), j + (v > 0.5)


class StepsOutside(msgspec.Struct, frozen=True):
    """Steps of a run outside the range that its cost table was measured for.

    Their times are extrapolated by the table's last segment, or are those of its first point.
    """

    steps: int
    share: float
    """Share of all steps."""
    first: str | None
    """Description of the first step outside; None if there is none."""


class TableSteps:
    """`CostModel` of a table for one run. It counts steps outside the table."""

    def __init__(self, table: CostTable, noise_seed: int | None) -> None:
        self._table = table
        self._seed = noise_seed
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
        return self._table.noisy_seconds(load, self._seed, plan.step)

    @property
    def host(self) -> HostTimes:
        return self._table.host

    @property
    def tells_several(self) -> bool:
        """True if `decode_seconds` agrees with `step_seconds`: a subclass of the table may override
        one.
        """
        return type(self._table) is CostTable

    def decode_seconds(self, load: StepLoad, step: int, count: int) -> list[float]:
        """Return the seconds that `step_seconds` would return, to the last digit, of `count` steps
        from number `step` on.

        The first step has this load, of decoding sequences alone. Each further step has one more
        token of each sequence. These steps aren't counted.
        """
        return self._table.decode_seconds(load, count, seed=self._seed, step=step).tolist()

    def count_decodes(self, load: StepLoad, count: int) -> None:
        """Count these steps as executed."""

        def outside(step: int) -> str | None:
            context = load.context_tokens + step * load.decode_batch
            return self._table.outside(replace(load, context_tokens=context))

        self._steps += count
        # Context grows, so all steps after the first outside step are outside too.
        begins = bisect_left(range(count), True, key=lambda step: outside(step) is not None)
        if begins < count:
            self._outside += count - begins
            self._first = self._first or outside(begins)

    @property
    def outside(self) -> StepsOutside:
        """Steps outside the table so far."""
        return StepsOutside(self._outside, self._outside / (self._steps or 1), self._first)


def steps_of(cost: CostModel, noise_seed: Any) -> CostModel:
    """Return the cost model for the steps of one run.

    Raises `ConfigError` for a seed without noise.
    """
    if noise_seed is not None:
        check_int("noise_seed", noise_seed, 0, MAX_SEED)
        if not isinstance(cost, CostTable) or cost.step_noise is None:
            raise ConfigError(
                f"noise_seed: cost has no noise, only a cost table that was measured with it, "
                f"got {shown(noise_seed)}"
            )
    return TableSteps(cost, noise_seed) if isinstance(cost, CostTable) else cost
