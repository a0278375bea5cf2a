"""Many points become few: what is drawn of a long run, without changing what it says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["cumulative_shares", "means_over_time", "peaks_over_time"]

Floats = npt.NDArray[np.float64]


def cumulative_shares(
    values: Sequence[float], out_of: int, most_points: int
) -> tuple[Floats, Floats]:
    """The values in ascending order, and the share of `out_of` that is at most as large.

    Of more than `most_points` values, that many are left: the extremes and evenly spread ranks.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    ranks = np.arange(1, len(ordered) + 1)
    if len(ordered) > most_points:
        kept = np.unique(np.linspace(0, len(ordered) - 1, most_points).round().astype(int))
        ordered, ranks = ordered[kept], ranks[kept]
    return ordered, ranks / out_of


def means_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Mean over each span between `edges` of what is `values[i]` from `began[i]` to `ended[i]`, and
    0 between one's end and the next one's beginning."""
    if not len(values):
        return np.zeros(len(edges) - 1)
    times = np.column_stack((began, ended)).reshape(-1)
    gained = np.column_stack((np.zeros_like(values), values * (ended - began))).reshape(-1)
    return np.diff(np.interp(edges, times, np.cumsum(gained))) / np.diff(edges)


def peaks_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """The largest of `values` in each span between `edges`; 0 where there is none."""
    peaks = np.zeros(len(edges) - 1)
    last = len(peaks) - 1
    first_bins = np.clip(np.searchsorted(edges, began, side="right") - 1, 0, last)
    last_bins = np.clip(np.searchsorted(edges, ended, side="left") - 1, first_bins, last)
    np.maximum.at(peaks, first_bins, values)
    for index in np.flatnonzero(last_bins > first_bins):
        reach = slice(first_bins[index], last_bins[index] + 1)
        peaks[reach] = np.maximum(peaks[reach], values[index])
    return peaks
