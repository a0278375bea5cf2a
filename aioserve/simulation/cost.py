"""How long a step takes: a model of it, since nothing is computed here.

A cost model sees the plan that a runner would see, and knows neither policies nor requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ModelShape
from aioserve.config import MAX_COUNT
from aioserve.errors import ConfigError, TraceError
from aioserve.execution.plan import CopyKind, StepPlan
from aioserve.isolation import shown
from aioserve.traces.checks import check_number, named
from aioserve.traces.files import open_file, short

__all__ = [
    "CostModel",
    "CostTable",
    "CostTableFile",
    "RooflineCost",
    "StepLoad",
    "place_on",
    "read_cost_table",
]

MAX_TABLE_BYTES = 16 << 20
MAX_POINTS = 1024
"""Of one axis."""
MAX_STEP_SECONDS = 1e6


class CostModel(Protocol):
    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds, more than 0, from the launch of a step to its tokens."""
        ...


class RooflineCost:
    """A step takes as long as its arithmetic or its memory traffic, whichever is longer, and a
    fixed time more (Williams et al., "Roofline", CACM 2009).

    Every step reads all weights, and every sequence all keys and values before it. A token costs
    two operations for each weight, and four for each value of a query head and each token that it
    attends to.

    Raises `ConfigError` for devices that can't share the model's KV heads evenly.
    """

    def __init__(self, model: ModelShape, hardware: Hardware) -> None:
        if not isinstance(model, ModelShape) or not isinstance(hardware, Hardware):
            raise ConfigError(
                "a roofline is of a ModelShape and a Hardware, got "
                f"{shown(model)} and {shown(hardware)}"
            )
        if model.num_kv_heads % hardware.num_devices:
            raise ConfigError(
                f"num_devices must divide the model's {model.num_kv_heads} KV heads, which are "
                f"shared evenly, got {hardware.num_devices}"
            )
        self.model = model
        self.hardware = hardware
        self._flops = hardware.flops_per_second * hardware.compute_efficiency
        self._bytes = hardware.bytes_per_second * hardware.bandwidth_efficiency
        self._weight_bytes = (model.layer_params + model.head_params) * model.bytes_per_value
        self._kv_bytes = model.kv_bytes_per_token
        self._pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim

    def step_seconds(self, plan: StepPlan) -> float:
        tokens = sampled = pairs = kv_tokens = 0
        for item in plan.items:
            count, end = item.count, item.start + item.count
            tokens += count
            sampled += len(item.rows)
            # Read once up to the end, and written where computed.
            kv_tokens += end + count
            pairs += count * (item.start + end + 1) // 2
        for copy in plan.copies:
            kv_tokens += 2 * copy.num_tokens if copy.kind is CopyKind.DEVICE else copy.num_tokens
        model = self.model
        flops = 2 * (model.layer_params * tokens + model.head_params * sampled)
        flops += self._pair_flops * pairs
        moved = self._weight_bytes + self._kv_bytes * kv_tokens
        return self.hardware.step_seconds + max(flops / self._flops, moved / self._bytes)


class StepLoad(msgspec.Struct, frozen=True):
    """What a cost table sees of a step."""

    prefill_tokens: int
    """Tokens of prompts."""
    decode_batch: int
    """Sequences with one token that is sampled from."""
    context_tokens: int
    """That these decoding sequences attend to, together."""
    attended_pairs: int
    """Of a prompt's token and a token that it attends to, over all prompt tokens."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        prefill = decode = context = pairs = 0
        for item in plan.items:
            end = item.start + item.count
            if item.count > 1 or not item.rows:
                prefill += item.count
                pairs += item.count * (item.start + end + 1) // 2
            else:
                decode += 1
                context += end
        return cls(prefill, decode, context, pairs)


class CostTable:
    """Measured steps: seconds by prompt tokens and by decoding sequences of the step, and what each
    token of context adds.

    Between the points of the grid a step takes what bilinear interpolation says, and beyond it it
    grows as between the last two points on that side. A step below the first point of an axis takes
    as long as one there. Forks and page copies are not counted.
    """

    def __init__(
        self,
        prefill_tokens: Sequence[int],
        decode_batch: Sequence[int],
        seconds: Sequence[Sequence[float]],
        *,
        seconds_per_context_token: float = 0.0,
        seconds_per_attended_pair: float = 0.0,
    ) -> None:
        """`seconds[i][j]` is a step of `prefill_tokens[i]` and `decode_batch[j]` without context;
        see `StepLoad` for what the other two are multiplied with.

        Raises `ConfigError` unless both axes grow, have two points or more, and fit the grid, each
        step takes time, none that has more to do takes less, and context costs no less than 0.
        """
        with named("cost table"):
            axes = tuple(
                _axis(name, points)
                for name, points in (
                    ("prefill_tokens", prefill_tokens),
                    ("decode_batch", decode_batch),
                )
            )
            # Of what is too long, no more is taken than tells so.
            high, wide = (len(axis) for axis in axes)
            rows = [[*islice(row, wide + 1)] for row in islice(seconds, high + 1)]
            if len(rows) != high or any(len(row) != wide for row in rows):
                raise ConfigError(f"seconds must be a grid of {high} by {wide} values")
            grid = np.array(rows, float)
        self._axes = axes
        if not np.isfinite(grid).all() or grid.min() < 0 or (grid == 0).sum() > self._has_empty:
            raise ConfigError("seconds must be finite and, but for an empty step, more than 0")
        if (np.diff(grid, axis=0) < 0).any() or (np.diff(grid, axis=1) < 0).any():
            raise ConfigError("seconds must not shrink as prefill_tokens or decode_batch grow")
        for name, value in (
            ("seconds", float(grid.max())),
            ("seconds_per_context_token", seconds_per_context_token),
            ("seconds_per_attended_pair", seconds_per_attended_pair),
        ):
            check_number(name, value, MAX_STEP_SECONDS, above=None)
        self._seconds: list[list[float]] = grid.tolist()
        self._per_context_token = seconds_per_context_token
        self._per_attended_pair = seconds_per_attended_pair

    @property
    def _has_empty(self) -> bool:
        return all(axis[0] == 0 for axis in self._axes)

    def step_seconds(self, plan: StepPlan) -> float:
        return self.seconds(StepLoad.of(plan))

    def seconds(self, load: StepLoad) -> float:
        """What a step of that load takes."""
        i, u = place_on(self._axes[0], load.prefill_tokens)
        j, v = place_on(self._axes[1], load.decode_batch)
        low, high = self._seconds[i], self._seconds[i + 1]
        # Inside the grid, or on its edge; what lies beyond is added along each axis by itself.
        x, y = min(u, 1.0), min(v, 1.0)
        at_low, at_high = low[j] + y * (low[j + 1] - low[j]), high[j] + y * (high[j + 1] - high[j])
        along_decode = (1 - x) * (low[j + 1] - low[j]) + x * (high[j + 1] - high[j])
        inside = (1 - x) * at_low + x * at_high
        context = load.context_tokens * self._per_context_token
        context += load.attended_pairs * self._per_attended_pair
        return inside + (u - x) * (at_high - at_low) + (v - y) * along_decode + context


class CostTableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cost table as JSON. The fields are those that `CostTable` takes, and two more."""

    prefill_tokens: tuple[int, ...]
    decode_batch: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    seconds_per_context_token: float = 0.0
    seconds_per_attended_pair: float = 0.0
    measured: dict[str, str | int | float | bool | None] = {}
    """Where the figures come from: for people, and not read by the simulator."""
    version: Literal[1] = 1
    """Of the format."""

    def table(self) -> CostTable:
        """Raises `ConfigError` for figures that make no sense."""
        return CostTable(
            self.prefill_tokens,
            self.decode_batch,
            self.seconds,
            seconds_per_context_token=self.seconds_per_context_token,
            seconds_per_attended_pair=self.seconds_per_attended_pair,
        )


def read_cost_table(path: str | Path) -> CostTable:
    """The table in a file that `CostTableFile` describes.

    Raises `ConfigError` for anything else, naming the file.
    """
    place = f"cost table {short(path)}"
    try:
        with open_file(path) as file:
            data = file.read(MAX_TABLE_BYTES + 1)
        if len(data) > MAX_TABLE_BYTES:
            raise ConfigError(f"a file of over {MAX_TABLE_BYTES:,} bytes")
        return msgspec.json.decode(data, type=CostTableFile).table()
    except TraceError as error:
        raise ConfigError(f"cost table {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply") from error
    except (OSError, ValueError) as error:  # those of JSON and of the table are ValueErrors
        raise ConfigError(f"{place}: {short(error)}") from error


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
    """The segment of an axis that holds `value`, and how far along it that lies: 0 to 1, and more
    beyond the end."""
    index = min(max(bisect_left(axis, value) - 1, 0), len(axis) - 2)
    return index, max(0.0, (value - axis[index]) / (axis[index + 1] - axis[index]))
