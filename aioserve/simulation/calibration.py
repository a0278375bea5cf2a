"""Makes cost tables: of measured steps, with how well they predict steps that they haven't seen,
and of the latency profile that was published with splitwise-sim (Patel et al., "Splitwise", ISCA
2024): prompt and token times of large models on GPUs, measured with vLLM.

A row of the profile is a run of one batch: `model`, `hardware`, `tensor_parallel`, `prompt_size`
and `token_size` of each request, `batch_size`, and in milliseconds `prompt_time` (all prompts),
`token_time` (one token of each completion) and `e2e_time`. The file is CSV, or JSON with one row a
line; plain or `.gz`.

Knows nothing about how steps are measured; `aioserve calibrate` does that.
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
from aioserve.traces.request import MAX_REQUEST_TOKENS

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
"""Ratios of each point's noise: of the longest steps, every 32nd shows by itself."""
LEAST_NOISY = 64
"""Steps from which a point's noise is made; a point with fewer takes in those of its nearest."""
LEAST_ERROR = 1e-3
"""Relative errors below this weigh the same, and so do predictions below this part of the longest
step."""
MOST_MEDIAN_ERROR = 0.5
MOST_TOTAL_ERROR = 0.25
MOST_HELD_UP = 5.0
"""A step that took longer than so many times what is predicted counts as so many."""


class StepSample(msgspec.Struct, frozen=True):
    """One measured step."""

    load: StepLoad
    seconds: float


class PredictionError(msgspec.Struct, frozen=True):
    """Errors of a table on measured steps, relative to what was measured."""

    steps: int
    median: float
    """Median of the single steps' errors, all taken as positive."""
    p90: float
    total: float
    """Error of the sum of all steps: positive where the table says more."""

    @property
    def is_poor(self) -> bool:
        """Whether the table tells too little: half of the steps are off by more than
        `MOST_MEDIAN_ERROR`, or their sum by more than `MOST_TOTAL_ERROR`."""
        return not (self.median <= MOST_MEDIAN_ERROR and abs(self.total) <= MOST_TOTAL_ERROR)


def fit_table(
    samples: Sequence[StepSample], prefill_tokens: Sequence[int], decode_batch: Sequence[int]
) -> CostTableFile:
    """Fit the table with those axes, both from 0, that has the least mean relative error.

    Its shape is a median regression (least absolute deviations, by iteratively reweighted least
    squares; Schlossmacher, "An Iterative Technique for Absolute Deviations Curve Fitting", JASA
    1973), so that a step which something else held up weighs no more than another. The grid is
    then made to grow along both axes, and all of it scaled by the factor that makes the sum of all
    steps right, since queues grow with the sum: seconds are means, and how far single steps are
    from them is the noise, in the order of `samples`, which is that of time. A step with neither
    prompt nor decoding tokens doesn't exist, and that point is given the value of a single decoding
    sequence.

    Raises `ConfigError` for axes that aren't such, and where points of the grid lack samples.
    """
    for name, axis in (("prefill_tokens", prefill_tokens), ("decode_batch", decode_batch)):
        if len(axis) < 2 or axis[0] != 0 or any(np.diff(axis) <= 0):
            raise ConfigError(f"{name} must be two or more growing counts from 0, got {axis}")
    shape = len(prefill_tokens), len(decode_batch)
    rows = np.array([_row(sample.load, prefill_tokens, decode_batch) for sample in samples])
    rows = rows.reshape(len(samples), shape[0] * shape[1] + 2)
    # The step that doesn't exist lends its weight to the one whose value it is given: free, it
    # could take any, and steps beyond an axis of two points lean on it.
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
    """Errors of a table on steps, at least one, preferably not those that it was fitted to."""
    measured = np.array([sample.seconds for sample in samples])
    predicted = np.array([table.seconds(sample.load) for sample in samples])
    errors = np.abs(predicted / measured - 1)
    median, p90 = np.percentile(errors, (50, 90)).tolist()
    return PredictionError(len(samples), median, p90, float(predicted.sum() / measured.sum() - 1))


def _row(load: StepLoad, prefill_tokens: Sequence[int], decode_batch: Sequence[int]) -> Floats:
    """Weights in a step of each point of the grid, a token of context and an attended pair."""
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
    """Ratios of what steps took to what the table says, by the point that each is nearest to; 1 on
    average at each point. Then the rank of each step among those of its point, in their order."""
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
    """Where each step is among those of its point: 0 for the shortest, up to 1."""

    def at(i: int, j: int) -> tuple[float, ...]:
        away = np.abs(nearest - (i, j))
        # Steps with a prompt are another kind than those without.
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
    """As many of each rank, so that steps take on average what the table says."""
    order = np.argsort(np.argsort(places, kind="stable"), kind="stable")
    return tuple((order * NUM_RANKS // len(places)).tolist())


def _equal_parts(ratios: Floats) -> tuple[float, ...]:
    """Means of as many equal parts of sorted values, relative to the mean of all."""
    sums = np.concatenate([[0.0], np.cumsum(ratios)])
    ends = np.linspace(0, len(ratios), NUM_RATIOS + 1)
    parts = np.diff(np.interp(ends, np.arange(len(sums)), sums))
    return tuple(np.round(parts / parts.mean(), 5).tolist())


def _least_absolute(rows: Floats, seconds: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    """Least sum of absolute errors over the `used` columns, the others' being 0. Errors are
    relative to what is predicted: a step that was measured too short must not weigh more for it."""
    # Columns of about the same size, or the small ones would be taken for rounding errors.
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
"""A profile's file, and the setup behind it."""

MOST_DRAWN_OUT = 2.0
"""Most times the sum of its parts that a run of one batch takes."""

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
        """Whether the batch fitted the memory; otherwise its parts ran one after the other."""
        parts = self.prompt_time + self.token_size * self.token_time
        return self.e2e_time < MOST_DRAWN_OUT * parts


def read_cost(source: str) -> CostTable:
    """Read a cost table's JSON file, or for `FILE:MODEL,HARDWARE,TENSOR_PARALLEL` a setup of a
    latency profile. The name of a profile ends in .csv or .jsonl, or in these and .gz.

    Raises `ConfigError` as `read_cost_table` and `read_latency_profile`.
    """
    profile = PROFILE.fullmatch(source)
    if profile is None:
        return read_cost_table(source)
    return read_latency_profile(profile[1], profile[2] or "")


def read_latency_profile(path: str | Path, setup: str) -> CostTable:
    """The table of one setup, `MODEL,HARDWARE,TENSOR_PARALLEL`, as in "llama2-70b,h100-80gb,8".

    Prompt time is taken by tokens of all prompts together, and token time by batch size: medians
    over the runs, made to grow. The profile has no steps with both. Such a step is taken to be as
    long as the prompt time of all its tokens, or as the token time of its sequences, whichever is
    longer. What context adds isn't told apart: token times are those of the profile's prompts, most
    of which have 512 tokens.

    Raises `ConfigError` for a file that is no profile and for a setup that isn't in it, listing
    those that are.
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
    """Seconds by size, from milliseconds; none less than that of a smaller size."""
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
