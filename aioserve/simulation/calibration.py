"""Cost tables from measured steps or from a published latency profile.

Tables of measured steps come with their prediction errors on held-out steps. The profile is that of
splitwise-sim (Patel et al., "Splitwise", ISCA 2024): prompt and token times of large models on
GPUs, measured with vLLM.

A row of the profile is a run of one batch, with these fields:

- `model`, `hardware` and `tensor_parallel`: the setup
- `prompt_size` and `token_size` of each request, and `batch_size`
- `prompt_time` of all prompts, in milliseconds
- `token_time` of one token of each completion, in milliseconds
- `e2e_time`, in milliseconds

The file is CSV, or JSON with one row a line; plain or `.gz`. Knows nothing about how steps are
measured; `aioserve calibrate` does that.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.simulation.cost import (
    MAX_POINTS,
    MAX_STEP_SECONDS,
    CostTable,
    StepLoad,
    nearest_to,
    place_on,
)
from aioserve.simulation.cost_table_file import CostTableFile, read_cost_table
from aioserve.simulation.step_noise import MAX_ORDER, NUM_RANKS
from aioserve.traces.files import Lines, short
from aioserve.traces.trace_request import MAX_REQUEST_TOKENS

__all__ = [
    "MOST_MEDIAN_ERROR",
    "MOST_TOTAL_ERROR",
    "PredictionError",
    "StepSample",
    "fit_table",
    "prediction_error",
    "read_cost",
    "read_latency_profile",
]

Floats = npt.NDArray[np.float64]

ROUNDS = 20
"""Rounds of reweighting: enough for the fit to settle within a thousandth."""
NUM_RATIOS = 32
"""Ratios of each point's noise: the longest 32nd of the steps has a ratio of its own."""
LEAST_NOISY = 64
"""Fewest steps for the noise of a point. A point with fewer also uses those of its neighbours."""
LEAST_ERROR = 1e-3
"""Floor of relative errors: smaller ones weigh the same. Also the floor of predictions, as a part
of the longest step.
"""
MOST_MEDIAN_ERROR = 0.5
MOST_TOTAL_ERROR = 0.25
MOST_HELD_UP = 5.0
"""Cap of a step's time relative to its prediction: a longer step counts as this much."""


class StepSample(msgspec.Struct, frozen=True):
    """One measured step."""

    load: StepLoad
    seconds: float


class PredictionError(msgspec.Struct, frozen=True):
    """Errors of a table on measured steps, relative to the measured times."""

    steps: int
    median: float
    """Median of the single steps' absolute errors."""
    p90: float
    total: float
    """Error of the sum of all steps; positive if the table overestimates."""

    @property
    def is_poor(self) -> bool:
        """True if the table predicts too badly.

        Half of the steps are off by more than `MOST_MEDIAN_ERROR`, or their sum by more than
        `MOST_TOTAL_ERROR`.
        """
        return not (self.median <= MOST_MEDIAN_ERROR and abs(self.total) <= MOST_TOTAL_ERROR)


def fit_table(
    samples: Sequence[StepSample], prefill_tokens: Sequence[int], decode_batch: Sequence[int]
) -> CostTableFile:
    """Fit the table on these axes, both from 0, that has the least mean relative error.

    Its shape is a median regression, so a step that something else held up weighs no more than
    another. The method is least absolute deviations by iteratively reweighted least squares
    (Schlossmacher, "An Iterative Technique for Absolute Deviations Curve Fitting", JASA 1973).

    The grid is then made to grow along both axes. A factor makes the sum of all steps right, since
    queues grow with the sum. So seconds are means; the ratios of single steps to them are the
    noise, in the order of `samples`, which is that of time. The point without prompt and decoding
    tokens is no real step; it has the value of a single decoding sequence.

    Raises `ConfigError` for axes that don't grow from 0, and for points of the grid without
    samples.
    """
    for name, axis in (("prefill_tokens", prefill_tokens), ("decode_batch", decode_batch)):
        if len(axis) < 2 or axis[0] != 0 or any(np.diff(axis) <= 0):
            raise ConfigError(f"{name} must be two or more growing counts from 0, got {axis}")
    shape = len(prefill_tokens), len(decode_batch)
    rows = np.array([_row(sample.load, prefill_tokens, decode_batch) for sample in samples])
    rows = rows.reshape(len(samples), shape[0] * shape[1] + 2)
    # The empty step lends its weight to the step whose value it gets. If it were free, it could
    # take any value, and steps beyond an axis of two points depend on it.
    rows[:, 1] += rows[:, 0]
    rows[:, 0] = 0
    seconds = np.array([sample.seconds for sample in samples], float)
    used = np.array([column.any() for column in rows.T])
    for point in np.flatnonzero(~used[1:-2]) + 1:
        i, j = divmod(int(point), shape[1])
        raise ConfigError(
            f"no step was measured near prefill_tokens={prefill_tokens[i]} and "
            f"decode_batch={decode_batch[j]}"
        )
    found = _least_absolute(rows, seconds, used)
    for last in np.flatnonzero(found[-2:] < 0):
        used[last - 2] = False
    if not used[-2:].all():
        found = np.maximum(_least_absolute(rows, seconds, used), 0)
    grid = found[:-2].reshape(shape)
    grid[0, 0] = grid[0, 1]
    grid = np.maximum(grid, seconds.min() / 2)
    for axis in (0, 1):
        grid = np.maximum.accumulate(grid, axis=axis)
    predicted = rows @ np.concatenate([grid.ravel(), found[-2:]])
    level = np.minimum(seconds, MOST_HELD_UP * predicted).sum() / predicted.sum()
    ratios = np.minimum(seconds / (predicted * level), MOST_HELD_UP)
    step_noise, noise_order = _step_noise(samples, ratios, prefill_tokens, decode_batch)
    return CostTableFile(
        step_noise=step_noise,
        noise_order=noise_order,
        max_context_tokens=max(sample.load.context_tokens for sample in samples),
        max_attended_pairs=max(sample.load.attended_pairs for sample in samples),
        prefill_tokens=tuple(prefill_tokens),
        decode_batch=tuple(decode_batch),
        seconds=tuple(tuple(row) for row in (grid * level).tolist()),
        seconds_per_context_token=float(found[-2] * level),
        seconds_per_attended_pair=float(found[-1] * level),
    )


def prediction_error(table: CostTable, samples: Sequence[StepSample]) -> PredictionError:
    """Return the errors of a table on at least one step, preferably steps that it wasn't
    fitted to.
    """
    measured = np.array([sample.seconds for sample in samples])
    predicted = np.array([table.seconds(sample.load) for sample in samples])
    errors = np.abs(predicted / measured - 1)
    median, p90 = np.percentile(errors, (50, 90)).tolist()
    return PredictionError(len(samples), median, p90, float(predicted.sum() / measured.sum() - 1))


def _row(load: StepLoad, prefill_tokens: Sequence[int], decode_batch: Sequence[int]) -> Floats:
    """Return the weights in a step of each point of the grid, a token of context and an attended
    pair.
    """
    weights = np.zeros((len(prefill_tokens), len(decode_batch)))
    i, u = place_on(prefill_tokens, load.prefill_tokens)
    j, v = place_on(decode_batch, load.decode_batch)
    x, y = min(u, 1.0), min(v, 1.0)
    # As `CostTable.seconds` adds them up: inside the grid, then beyond each of its ends.
    weights[i : i + 2, j : j + 2] = np.outer((1 - x, x), (1 - y, y))
    weights[i : i + 2, j : j + 2] += np.outer((x - u, u - x), (1 - y, y))
    weights[i : i + 2, j : j + 2] += np.outer((1 - x, x), (y - v, v - y))
    return np.concatenate([weights.ravel(), [load.context_tokens, load.attended_pairs]])


def _step_noise(
    samples: Sequence[StepSample],
    ratios: Floats,
    prefill_tokens: Sequence[int],
    decode_batch: Sequence[int],
) -> tuple[tuple[tuple[tuple[float, ...], ...], ...], tuple[int, ...]]:
    """Return the noise of each point, and the order of the measured steps.

    The noise is the ratios of the steps' times to the table's, by the nearest point; 1 on average
    at each point. The order is each step's rank among those of its point.
    """
    nearest = np.array(
        [
            nearest_to(
                *place_on(prefill_tokens, sample.load.prefill_tokens),
                *place_on(decode_batch, sample.load.decode_batch),
            )
            for sample in samples
        ]
    )
    places = np.zeros(len(ratios))
    """Place of each step among those of its point: 0 for the shortest, up to 1."""

    def at(i: int, j: int) -> tuple[float, ...]:
        away = np.abs(nearest - (i, j))
        # Steps with a prompt are of another kind than steps without.
        other_kind = (nearest[:, 0] > 0) != (i > 0)
        distances = away.sum(axis=1) + other_kind * sum(grid_shape)
        reach = np.sort(distances)[min(LEAST_NOISY, len(distances)) - 1]
        near, here = np.sort(ratios[distances <= reach]), distances == 0
        places[here] = np.searchsorted(near, ratios[here]) / len(near)
        return _equal_parts(near)

    grid_shape = len(prefill_tokens), len(decode_batch)
    high, wide = grid_shape
    noise = tuple(tuple(at(i, j) for j in range(wide)) for i in range(high))
    return noise, _ranks(places[-MAX_ORDER:])


def _ranks(places: Floats) -> tuple[int, ...]:
    """Return ranks, equally many of each, so that steps take on average what the table says."""
    order = np.argsort(np.argsort(places, kind="stable"), kind="stable")
    return tuple((order * NUM_RANKS // len(places)).tolist())


def _equal_parts(ratios: Floats) -> tuple[float, ...]:
    """Return the means of `NUM_RATIOS` equal parts of sorted values, relative to the mean of
    all.
    """
    sums = np.concatenate([[0.0], np.cumsum(ratios)])
    ends = np.linspace(0, len(ratios), NUM_RATIOS + 1)
    parts = np.diff(np.interp(ends, np.arange(len(sums)), sums))
    return tuple(np.round(parts / parts.mean(), 5).tolist())


def _least_absolute(rows: Floats, seconds: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    """Return the solution with the least sum of absolute errors; columns that aren't `used` get 0.

    Errors are relative to the predictions, so that a step that was measured too short doesn't weigh
    more.
    """
    # Scale columns to about the same size; otherwise small ones would look like rounding errors.
    scale = np.maximum(rows[:, used].max(axis=0), 1e-300)
    scaled = rows[:, used] / scale
    weights = np.ones(len(seconds))
    found = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        found[used] = np.linalg.lstsq(scaled * weights[:, None], seconds * weights, rcond=None)[0]
        predicted = np.maximum(scaled @ found[used], LEAST_ERROR * seconds.max())
        errors = np.maximum(np.abs(predicted - seconds), LEAST_ERROR * predicted)
        weights = 1 / np.sqrt(errors * predicted)
    found[used] /= scale
    return found


PROFILE = re.compile(r"(.+\.(?:csv|jsonl)(?:\.gz)?)(?::([^:]*))?")
"""Pattern of a profile's file, and the setup after it."""

MOST_DRAWN_OUT = 2.0
"""Largest ratio of a run of one batch to the sum of its parts."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=1000 * MAX_STEP_SECONDS)]


class ProfileRow(msgspec.Struct, frozen=True):
    model: str
    hardware: str
    tensor_parallel: Count
    prompt_size: Count
    batch_size: Count
    token_size: Count
    prompt_time: Milliseconds
    token_time: Milliseconds
    e2e_time: Milliseconds

    @property
    def setup(self) -> str:
        return f"{self.model},{self.hardware},{self.tensor_parallel}"

    @property
    def in_one_batch(self) -> bool:
        """True if the batch fitted the memory; otherwise its parts ran one after the other."""
        parts = self.prompt_time + self.token_size * self.token_time
        return self.e2e_time < MOST_DRAWN_OUT * parts


def read_cost(source: str) -> CostTable:
    """Read a cost table: a JSON file, or a setup of a latency profile.

    A setup is named `FILE:MODEL,HARDWARE,TENSOR_PARALLEL`. The name of a profile ends in .csv or
    .jsonl, possibly followed by .gz. Raises `ConfigError` as `read_cost_table` and
    `read_latency_profile` do.
    """
    profile = PROFILE.fullmatch(source)
    if profile is None:
        return read_cost_table(source)
    return read_latency_profile(profile[1], profile[2] or "")


def read_latency_profile(path: str | Path, setup: str) -> CostTable:
    """Read the table of one setup, `MODEL,HARDWARE,TENSOR_PARALLEL`, as in
    "llama2-70b,h100-80gb,8".

    Prompt time depends on the tokens of all prompts together, and token time on the batch size.
    Both are medians over the runs, made to grow. The profile has no steps with both: they take the
    longer of the prompt time of all tokens and the token time of the sequences. The cost of context
    isn't separate: token times are those of the profile's prompts, most of which have 512 tokens.

    Raises `ConfigError` for a file that is no profile, and for an unknown setup, with a list of the
    known ones.
    """
    place = f"cost table {short(path)}"
    wanted = ",".join(part.strip() for part in setup.split(","))
    found: list[ProfileRow] = []
    setups: set[str] = set()
    for row in _rows(path):
        setups.add(row.setup)
        if row.setup == wanted:
            found.append(row)
    if not found:
        known = short("; ".join(sorted(setups)))
        raise ConfigError(f"{place}: no setup {shown(setup)}; there are: {known}")
    rows = [row for row in found if row.in_one_batch]
    prompts = _medians([(row.prompt_size * row.batch_size, row.prompt_time) for row in rows])
    tokens = _medians([(row.batch_size, row.token_time) for row in rows])
    if len(prompts) < 2 or len(tokens) < 2:
        raise ConfigError(f"{place}: {wanted} has not two prompt and two batch sizes")
    # A point or two come before them.
    if max(len(prompts), len(tokens)) > MAX_POINTS - 2:
        raise ConfigError(f"{place}: {wanted} has more than {MAX_POINTS - 2} sizes")
    try:
        return _table(prompts, tokens)
    except ConfigError as error:
        raise ConfigError(f"{place}: {wanted}: {error}") from error


def _table(prompts: dict[int, float], tokens: dict[int, float]) -> CostTable:
    prefill, decode = (0, 1, *(size for size in prompts if size > 1)), (0, *tokens)
    sizes, times = np.array(list(prompts)), np.array(list(prompts.values()))
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    grid = np.zeros((len(prefill), len(decode)))
    for j, batch in enumerate(decode):
        total = np.array(prefill[1:]) + batch
        beyond = np.maximum(total - sizes[-1], 0) * slope
        grid[1:, j] = np.interp(total, sizes, times) + beyond
        if batch:
            grid[:, j] = np.maximum(grid[:, j], tokens[batch])
    return CostTableFile(prefill, decode, tuple(map(tuple, grid.tolist()))).table()


def _medians(runs: list[tuple[int, float]]) -> dict[int, float]:
    """Return seconds by size, from milliseconds; none is less than that of a smaller size."""
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for size, milliseconds in runs:
        by_size[size].append(milliseconds / 1000)
    longest, found = 0.0, dict[int, float]()
    for size in sorted(by_size):
        longest = found[size] = max(longest, median(by_size[size]))
    return found


def _rows(path: str | Path) -> Iterator[ProfileRow]:
    lines = Lines(path)
    try:
        is_json = lines.first().startswith("{")
        for row in map(json.loads, lines) if is_json else csv.DictReader(lines):
            yield msgspec.convert(row, ProfileRow, strict=False)
    except TraceError as error:
        raise ConfigError(f"cost table {error}") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"cost table {lines.place}: no latency profile: {short(error)}"
        ) from error
