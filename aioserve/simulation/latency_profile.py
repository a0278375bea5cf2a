"""Makes cost tables of the latency profile that was published with splitwise-sim (Patel et al.,
"Splitwise", ISCA 2024): prompt and token times of large models on GPUs, measured with vLLM.

A row is a run of one batch: `model`, `hardware`, `tensor_parallel`, `prompt_size` and `token_size`
of each request, `batch_size`, and in milliseconds `prompt_time` (all prompts), `token_time` (one
token of each completion) and `e2e_time`. The file is CSV, or JSON with one row a line; plain or
`.gz`.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import numpy as np

from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.simulation.cost import (
    MAX_POINTS,
    MAX_STEP_SECONDS,
    CostTable,
    CostTableFile,
    read_cost_table,
)
from aioserve.traces.files import Lines, short
from aioserve.traces.request import MAX_REQUEST_TOKENS

__all__ = ["read_cost", "read_latency_profile"]

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
