"""Choice of the short times whose steps a report shows one by one.

They are where the policies differ most. For each policy, they are also where most requests wait
under it that another one has let run. Knows when requests started and ended, and nothing of how
steps are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report.layout import PolicyRun

__all__ = ["Window", "Windows", "busiest_window", "choose_windows"]

WINDOW_STEPS = 60

Window = tuple[float, float]
Times = npt.NDArray[np.float64]


class Windows(msgspec.Struct, frozen=True):
    """Windows of some runs, in seconds on the trace's clock."""

    common: Window
    """Window in which the runs are compared."""
    differ: bool
    """True if the runs differ in it."""
    own: tuple[Window | None, ...]
    """A window of each run; None if that is the common one."""


def choose_windows(runs: Sequence[PolicyRun]) -> Windows:
    """Choose the windows of runs that have steps.

    A request differs at a time if it waits under one policy, and has started or is gone under
    another. It also differs if it is gone under only one of them. The common window has the most
    requests that differ, summed over its time. If none differ, it is the busiest one of the first
    run. A run's own window has the most requests that wait under it and have started under another.
    """
    began, ended = _times_of(runs)
    first, last = began.min(axis=0), began.max(axis=0)
    gone, all_gone = ended.min(axis=0), ended.max(axis=0)
    # A request may be gone under one policy before it starts under another.
    spans = [(first, last), (np.maximum(gone, last), all_gone)]
    starts = np.concatenate([run.timeline.column("began_seconds") for run in runs])
    seconds = float(np.median(np.concatenate([_seconds_of_windows(run) for run in runs])))
    common = _most_covered(spans, np.sort(starts), seconds)
    differ = common is not None
    common = common or busiest_window(runs[0])
    own: list[Window | None] = []
    for index, run in enumerate(runs):
        others = np.delete(began, index, axis=0)
        window = None
        if len(others):
            behind = [(others.min(axis=0), began[index])]
            seconds = float(np.median(_seconds_of_windows(run)))
            window = _most_covered(behind, run.timeline.column("began_seconds"), seconds)
        window = window or busiest_window(run)
        own.append(None if window == common else window)
    return Windows(common, differ, tuple(own))


def busiest_window(run: PolicyRun) -> Window:
    """Return the window of `WINDOW_STEPS` consecutive steps, or all, with the most requests.

    The first of equally busy ones is chosen.
    """
    began, ended = run.timeline.column("began_seconds"), run.timeline.column("ended_seconds")
    if not len(began):
        return (0.0, 1.0)
    present = run.timeline.column("waiting") + run.timeline.column("running")
    total = np.concatenate(([0.0], np.cumsum(present)))
    length = min(WINDOW_STEPS, len(present))
    first = int(np.argmax(total[length:] - total[:-length]))
    return (float(began[first]), float(ended[first + length - 1]))


# -- parts


def _times_of(runs: Sequence[PolicyRun]) -> tuple[Times, Times]:
    """Return the start and end of each request: float64 `[runs, requests]`, requests by number."""
    by_number = [
        sorted(run.result.requests, key=lambda record: record.request.number) for run in runs
    ]
    began = [[_start(record) for record in records] for records in by_number]
    ended = [[_end(record) for record in records] for records in by_number]
    return np.array(began, np.float64), np.array(ended, np.float64)


def _start(record: RequestRecord) -> float:
    """Return the time from which it doesn't wait; for a request that never started, its end."""
    return _end(record) if record.started_seconds is None else record.started_seconds


def _end(record: RequestRecord) -> float:
    return record.request.arrival_seconds if record.end_seconds is None else record.end_seconds


def _seconds_of_windows(run: PolicyRun) -> Times:
    """Return the length of each window of `WINDOW_STEPS` consecutive steps, or of all steps."""
    began, ended = run.timeline.column("began_seconds"), run.timeline.column("ended_seconds")
    length = min(WINDOW_STEPS, len(began))
    return ended[length - 1 :] - began[: len(began) - length + 1]


def _most_covered(
    spans: Sequence[tuple[Times, Times]], starts: Times, seconds: float
) -> Window | None:
    """Return the first window that has the most of `spans` in it, summed over its time.

    Windows begin at `starts`, which ascend, and take `seconds`. A span is two arrays, begins and
    ends; a span that ends before it begins is ignored. None if no window has any span.
    """
    begins = np.concatenate([begin for begin, end in spans])
    ends = np.concatenate([end for begin, end in spans])
    begins, ends = begins[ends > begins], ends[ends > begins]
    if not len(begins):
        return None
    at = np.concatenate((begins, ends))
    order = np.argsort(at, kind="stable")
    at = at[order]
    count = np.cumsum(np.repeat((1.0, -1.0), len(begins))[order])
    until = np.concatenate(([0.0], np.cumsum(count[:-1] * np.diff(at))))
    covered = np.interp(starts + seconds, at, until) - np.interp(starts, at, until)
    best = int(np.argmax(covered))
    return (float(starts[best]), float(starts[best] + seconds)) if covered[best] > 0 else None
