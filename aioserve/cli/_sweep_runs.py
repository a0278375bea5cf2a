"""The runs of a sweep, in processes of their own: which there are, and how they come back.

Processes are spawned: each imports what it needs anew, so that nothing of this one is copied half
way. They hear of no Ctrl-C; this one ends them, and they end by themselves where it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from aioserve.cli._progress import OnProgress
from aioserve.errors import AioserveError, ConfigError, PluginError, TraceError

if TYPE_CHECKING:
    from aioserve.simulation.metrics import Metrics
    from aioserve.simulation.trial_options import TrialOptions

__all__ = ["Cell", "Done", "Workers"]

T = TypeVar("T")
HEARS_SIGNALS_SECONDS = 0.5
KINDS = {kind.__name__: kind for kind in (ConfigError, PluginError, TraceError)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    source: str | Path
    policy: str
    rate: float | None
    seed: int
    varied: str
    """What was varied, as `max_num_seqs=64`; empty without."""
    options: TrialOptions
    requests: Path | None
    """Where lines about requests go; only its name counts here."""


class Done(NamedTuple):
    """What comes back of a run: no records, of which there may be millions."""

    metrics: Metrics
    arrived_rate: float
    """Requests that came in a second."""
    lines: str


class _Failed(NamedTuple):
    """An error of ours, as text: not every error can be sent from one process to another."""

    kind: str
    message: str


class Workers:
    """So many processes at most, each started when it is first needed, for all that is run until
    the end: use it as a context manager. With one job, runs are in this process."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()
        """Processes that were there before."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """They are gone afterwards, whatever they were about."""
        if self._pool is None:
            return
        if kind is None:
            self._pool.shutdown()
            return
        started = set(multiprocessing.active_children()) - self._others
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.terminate()
        for process in started:
            process.join()

    def run(
        self, cells: Sequence[Cell], on_progress: OnProgress | None = None
    ) -> Generator[Done, None, None]:
        """What came of each, in their order. `on_progress(count, total)` is told how many have
        ended. Raises what a run raised."""
        if self._jobs == 1 or len(cells) == 1:
            for count, cell in enumerate(cells, 1):
                done = run_cell(cell)
                if on_progress is not None:
                    on_progress(count, len(cells))
                yield done
            return
        pool = self._started_pool()  # before: what it makes lets interrupts in again
        with _interrupts_wait():  # a process keeps the mask that it was started with
            futures = [pool.submit(_run_in_process, cell) for cell in cells]
        place = {future: index for index, future in enumerate(futures)}
        waiting: dict[int, Done] = {}
        following = 0
        for count, future in enumerate(_as_completed(futures), 1):
            waiting[place[future]] = _result_of(future)
            if on_progress is not None:
                on_progress(count, len(cells))
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._others = set(multiprocessing.active_children())
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_begin_process
            )
        return self._pool


def run_cell(cell: Cell) -> Done:
    """One run, here and now."""
    from aioserve.simulation.request_rows import lines_of
    from aioserve.testing.trial import Trial

    trial = Trial(cell.source, cell.options)
    result, metrics = trial.run(cell.policy)
    lines = ""
    if cell.requests is not None:
        labels = {
            "policy": cell.policy,
            "varied": cell.varied,
            "rate": cell.rate,
            "seed": cell.seed,
        }
        lines = lines_of(cell.requests, result.requests, labels)
    arrivals = [record.request.arrival_seconds for record in result.requests]
    seconds = max(arrivals) - min(arrivals)
    return Done(metrics, len(arrivals) / seconds if seconds else 0.0, lines)


def _begin_process() -> None:
    """What policies print belongs to no table. And where the first process is killed, nobody tells
    this one to end."""
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run_in_process(cell: Cell) -> Done | _Failed:
    try:
        return run_cell(cell)
    except AioserveError as error:
        return _Failed(type(error).__name__, str(error))


def _as_completed(futures: Sequence[Future[T]]) -> Iterator[Future[T]]:
    """The futures in the order in which they end.

    It waits for a while at a time: Python hears of a signal that came just before a wait when that
    is over, and a run may take hours.
    """
    left = set(futures)
    while left:
        done, left = wait(left, HEARS_SIGNALS_SECONDS, FIRST_COMPLETED)
        yield from done


def _result_of(future: Future[Done | _Failed]) -> Done:
    try:
        done = future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "jobs: a process ended before its run was done, as one does that is killed where "
            "memory is short: give fewer jobs, or fewer requests"
        ) from error
    if isinstance(done, _Failed):
        raise KINDS.get(done.kind, ConfigError)(done.message)
    return done


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C is heard of afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
