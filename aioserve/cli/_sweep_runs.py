"""The runs of a sweep: their list, and how their results come back from processes.

Processes are spawned: each imports what it needs anew, so nothing of this process is copied half
way. They don't receive Ctrl-C. This process ends them, and they end by themselves if it is gone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from aioserve.arguments import shown
from aioserve.cli._simulations import TRIAL_FLAGS, TrialFlags, source_of
from aioserve.errors import AioserveError, ConfigError, PluginError, TraceError
from aioserve.plugins import PluginRegistry
from aioserve.plugins.files import named_policy
from aioserve.progress_bar import OnProgress
from aioserve.simulation.calibration import read_cost
from aioserve.simulation.cost import CostTable
from aioserve.simulation.metrics import Metrics
from aioserve.simulation.options import TrialOptions
from aioserve.simulation.request_rows import lines_of
from aioserve.testing.trial import Trial
from aioserve.traces.checks import check_number
from aioserve.traces.trace_request import MAX_RATE

__all__ = ["Cell", "Done", "Grid", "SweepOptions", "Workers", "grid_of"]

T = TypeVar("T")
HEARS_SIGNALS_SECONDS = 0.5
MAX_CELLS = 100_000
DEFAULT_SEEDS = 3
NOT_VARIED = ("num_requests", "arrivals", "closed_loop", "priority", "predictor")
"""Options that make another workload. Such a workload isn't the same one at another rate."""
WITHOUT_DRAFT_TOKENS: dict[str, Any] = {"acceptance": None}
"""Value of `--acceptance` in a variant without draft tokens."""
KINDS = {kind.__name__: kind for kind in (ConfigError, PluginError, TraceError)}


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TrialFlags):
    """Options for what to run."""

    rates: str | None = None
    """Rates with commas between them, as 2,4,8. Not given: as recorded, or 4."""
    seeds: int | None = None
    """Number of seeds, counted from 0. Not given: 3 if something is drawn, else 1."""
    vary: Sequence[str] = ()
    """Option of the engine or the machine to try with each value, as NAME=VALUE,VALUE:
    max_num_seqs=64,256, say. May be given several times.
    """
    slo: str | None = None
    """Promise to keep: ttft_p99=2,tpot_p99=0.1 in seconds, say, or attainment=0.9 for the share of
    requests that meet their targets. The results then include the largest rate up to which all
    seeds keep it.
    """
    refine: int = 0
    """Times to try the rate halfway between the largest that keeps --slo and the next one. For each
    policy and set of options.
    """
    jobs: int | None = None
    """Processes that run at once. Not given: as many as there are processors."""
    csv: Path | None = None
    """Write a line for each run to this file."""
    report: Path | None = None
    """Write a page with charts to this file."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    source: str | Path
    policy: str
    rate: float | None
    seed: int
    varied: str
    """Varied options, as `max_num_seqs=64`; empty without."""
    options: TrialOptions
    requests: Path | None
    """File of lines about requests; only its name is used here."""


class Done(NamedTuple):
    """Results of a run, without its records: there may be millions."""

    metrics: Metrics
    arrived_rate: float
    """Requests that arrived per second."""
    lines: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All dimensions of a sweep's runs."""

    source: str | Path
    options: SweepOptions
    variants: dict[str, dict[str, Any]]
    """Options of each variant, by the text that distinguishes it, as `max_num_seqs=64`. The text is
    empty if nothing varies.
    """
    rates: list[float | None]
    seeds: int
    draws: dict[str, bool]
    """True if a seed changes anything, by variant."""

    def cells(self) -> list[Cell]:
        return [
            cell
            for policy in self.options.policy
            for varied in self.variants
            for rate in self.rates
            for cell in self.at(policy, varied, rate)
        ]

    def at(self, policy: str, varied: str, rate: float | None) -> list[Cell]:
        """Return a run for each seed, or the only one if nothing is drawn."""
        chosen, draws = self.variants[varied], self.draws[varied]
        return [
            Cell(
                self.source,
                policy,
                rate,
                seed,
                varied,
                replace(self.options, rate=rate, seed=seed if draws else None, **chosen),
                self.options.requests,
            )
            for seed in range(self.seeds if draws else 1)
        ]

    def tables(self) -> list[tuple[CostTable, TrialOptions]]:
        """Return each cost table with the longest context that it is tried with."""
        longest: dict[str, TrialOptions] = {}
        for chosen in self.variants.values():
            tried = replace(self.options, **chosen)
            table, context = tried.cost_table, tried.max_model_len
            if table is None or context is None:
                continue
            if table not in longest or context > (longest[table].max_model_len or 0):
                longest[table] = tried
        return [(read_cost(table), tried) for table, tried in longest.items()]


def grid_of(trace: Path | None, options: SweepOptions) -> tuple[Grid, Trial]:
    """Return all runs, and the trial of the first: an error in its workload is raised at once."""
    source = source_of(trace, options)
    registry = PluginRegistry()
    registry.check_selected()
    for name in options.policy:
        named_policy(registry, name)
    rates, variants = _rates(options.rates), _variants(options.vary)
    first = replace(options, rate=rates[0], **next(iter(variants.values())))
    trial = Trial(source, first, registry)
    trial.eviction()
    draws = {varied: _draws(trial, source, chosen) for varied, chosen in variants.items()}
    if options.seeds is not None and options.seeds > 1 and not any(draws.values()):
        raise ConfigError(
            f"seeds: nothing of a trace is drawn, and no step varies, got {options.seeds}: all "
            "runs would be the same"
        )
    seeds = options.seeds or (DEFAULT_SEEDS if any(draws.values()) else 1)
    count = len(options.policy) * len(variants) * (len(rates) + options.refine) * seeds
    if count > MAX_CELLS:
        raise ConfigError(f"a sweep may have at most {MAX_CELLS:,} runs, and these are {count:,}")
    grid = Grid(
        source=source,
        options=options,
        variants=variants,
        rates=rates,
        seeds=seeds,
        draws=draws,
    )
    return grid, trial


def _draws(trial: Trial, source: str | Path, chosen: Mapping[str, Any]) -> bool:
    """True if a seed changes anything in a variant."""
    max_draft_tokens = chosen.get("speculation_max_tokens", trial.options.speculation_max_tokens)
    return (
        trial.machine.noise_seed is not None or trial.options.draws(source) or max_draft_tokens != 0
    )


def _rates(text: str | None) -> list[float | None]:
    if text is None:
        return [None]
    rates: list[float | None] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            raise ConfigError(
                f"rates must be numbers with commas between them, got {shown(text)}"
            ) from None
        check_number(f"rates: {part.strip()!r}", rate, MAX_RATE)
        if rate in rates:
            raise ConfigError(f"rates: {part.strip()} is given twice")
        rates.append(rate)
    return rates


def _variants(vary: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return every combination of the values, by its text. Raises `ConfigError`."""
    hints = get_type_hints(TrialOptions)
    known = [name for name in TRIAL_FLAGS if name in hints and name not in NOT_VARIED]
    values: dict[str, list[Any]] = {}
    for one in vary:
        name, equals, texts = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known or name in values:
            raise ConfigError(
                f"vary must be NAME=VALUE,VALUE, once for each of {', '.join(known)}, got {one!r}"
            )
        values[name] = [_value(name, text.strip(), hints[name]) for text in texts.split(",")]
        if len(set(values[name])) < len(values[name]):
            raise ConfigError(f"vary: a value of {name} is given twice, got {texts!r}")
    variants = [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]
    return {
        ",".join(f"{n}={value}" for n, value in one.items()): WITHOUT_DRAFT_TOKENS | one
        if one.get("speculation_max_tokens") == 0
        else one
        for one in variants
    }


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = (hint, *get_args(hint))
    kind: Any = next((one for one in (str, bool, int, float) if one in kinds), str)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "an int"}.get(kind, f"a {kind.__name__}")
        raise ConfigError(f"vary: {name} must be {what}, got {text!r}") from None


class _Failed(NamedTuple):
    """An error of ours, as text: some errors can't be sent from one process to another."""

    kind: str
    message: str


class Workers:
    """Pool of up to `jobs` processes that share the runs; a context manager.

    A process starts when it is first needed and stays until the end. With one job, runs are in this
    process.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()
        """Processes that were there before."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the processes, whatever they are doing."""
        if self._pool is None:
            return
        if kind is None:
            self._pool.shutdown()
            return
        started = set(multiprocessing.active_children()) - self._others
        for process in started:
            process.terminate()
        # Wait for the pool: otherwise, if the interpreter ends meanwhile, the pool's own thread
        # closes what the interpreter writes to.
        self._pool.shutdown(cancel_futures=True)
        for process in started:
            process.join()

    def run(
        self, cells: Sequence[Cell], on_progress: OnProgress | None = None
    ) -> Generator[Done, None, None]:
        """Yield the results of the runs, in their order.

        `on_progress(count, total)` receives the number of runs that have ended. Raises what a run
        raised.
        """
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
    """Run one cell in this process."""
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
    """Prepare a process of the pool.

    Output of policies goes to stderr, as it belongs to no table. The process ends itself if the
    first process is killed: nobody else would end it.
    """
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
    """Yield the futures in the order in which they end.

    Each wait is short, as a run may take hours. Python handles a signal that came just before a
    wait only when the wait is over.
    """
    ended: SimpleQueue[Future[T]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    num_left = len(futures)
    while num_left:
        with suppress(Empty):
            yield ended.get(timeout=HEARS_SIGNALS_SECONDS)
            num_left -= 1


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
    """Defer Ctrl-C until the end of the block.

    This thread blocks the signal. The kernel may give it to another thread, so Python has a handler
    that only records it.
    """
    noted: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda signum, _: noted.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if noted:
            signal.raise_signal(signal.SIGINT)
