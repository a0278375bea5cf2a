"""Reduces many points of a long run to few, without changing what the picture says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["means_of_steps", "means_over_time", "peaks_over_time", "quantile"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def quantile(
    values: Floats | Sequence[float],
    share: float,
    *,
    counts: Counts | None = None,
    missing: int = 0,
) -> float | None:
    """Value that this share of all does not exceed, interpolated linearly as `numpy.percentile`
    does.

    values: in ascending order.
    counts: how often each of them is there; once unless given.
    missing: further values, larger than all. None where the result is among them.
    """
    upto = np.arange(1, len(values) + 1) if counts is None else np.cumsum(counts)
    known = int(upto[-1]) if len(upto) else 0
    place = share * (known + missing - 1)
    low, part = math.floor(place + 1e-9), max(0.0, place - math.floor(place + 1e-9))
    high = low + 1 if part > 1e-9 else low
    if not known or high >= known:
        return None
    below = float(values[int(np.searchsorted(upto, low, side="right"))])
    above = float(values[int(np.searchsorted(upto, high, side="right"))])
    return below + (above - below) * part


def means_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Mean over each span between `edges` of what is `values[i]` from `began[i]` to `ended[i]`, and
    0 between one's end and the next one's beginning."""
    if not len(values):
        return np.zeros(len(edges) - 1)
    times = np.column_stack((began, ended)).reshape(-1)
    gained = np.column_stack((np.zeros_like(values), values * (ended - began))).reshape(-1)
    return np.diff(np.interp(edges, times, np.cumsum(gained))) / np.diff(edges)


def means_of_steps(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Mean like `means_over_time`, over the time of steps alone; NaN where none ran."""
    busy = means_over_time(edges, began, ended, np.ones_like(values))
    ran = busy > 1e-6
    means = np.full(len(busy), np.nan)
    means[ran] = means_over_time(edges, began, ended, values)[ran] / busy[ran]
    return means


def peaks_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Largest of `values` in each span between `edges`; 0 where there is none."""
    peaks = np.zeros(len(edges) - 1)
    last = len(peaks) - 1
    first_bins = np.clip(np.searchsorted(edges, began, side="right") - 1, 0, last)
    last_bins = np.clip(np.searchsorted(edges, ended, side="left") - 1, first_bins, last)
    np.maximum.at(peaks, first_bins, values)
    for index in np.flatnonzero(last_bins > first_bins):
        reach = slice(first_bins[index], last_bins[index] + 1)
        peaks[reach] = np.maximum(peaks[reach], values[index])
    return peaks
