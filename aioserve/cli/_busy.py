"""Checks that a machine was idle while something was measured on it.

It checks the load before, the processors' time that others took, and how much a fixed piece of work
varied. Others are programs and the hypervisor. Figures that a system doesn't report are left out.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from aioserve.arguments import counted

__all__ = ["Busy", "MachineWatch", "usable_processors"]

PROBE = bytes(4 << 20)
"""Bytes that a probe hashes. It takes one processor some milliseconds and allocates nothing."""
PROBES = 7

MOST_LOAD = 0.5
"""Largest load per processor before the measurement."""
MOST_OTHERS = 0.1
MOST_STOLEN = 0.02
MOST_SPREAD = 1.25
"""Largest ratio of the slowest probe to the fastest."""


class Busy(NamedTuple):
    """Use of the machine by others during a measurement. Unknown figures are None."""

    num_processors: int
    load: float | None
    """Mean number of runnable processes in the minute before."""
    others: float | None
    """Share of the processors' time that other programs took."""
    stolen: float | None
    """Share of the processors' time that the hypervisor gave to other machines."""
    probe_seconds: tuple[float, ...]

    @property
    def findings(self) -> list[str]:
        """Figures that are too large, in words; empty for a machine that was left alone."""
        found: list[str] = []
        if self.load is not None and self.load > MOST_LOAD * self.num_processors:
            found.append(
                f"load {self.load:.1f} on {counted(self.num_processors, 'processor')} before"
            )
        if self.others is not None and self.others > MOST_OTHERS:
            found.append(f"other programs took {self.others:.0%} of the processors")
        if self.stolen is not None and self.stolen > MOST_STOLEN:
            found.append(f"{self.stolen:.0%} of the processors' time was stolen by the hypervisor")
        least, most = min(self.probe_seconds), max(self.probe_seconds)
        if most > MOST_SPREAD * least:
            found.append(f"the same work took {least * 1e3:.1f} to {most * 1e3:.1f} ms")
        return found

    @property
    def facts(self) -> dict[str, float | None]:
        """Figures for the table, rounded."""
        return {
            "load_before": None if self.load is None else round(self.load, 2),
            "others_share": None if self.others is None else round(self.others, 4),
            "stolen_share": None if self.stolen is None else round(self.stolen, 4),
            "probe_spread": round(max(self.probe_seconds) / min(self.probe_seconds), 4),
        }


class _Ticks(NamedTuple):
    """Processor seconds so far: `busy` and `stolen` of usable processors, `own` of this process.

    `seconds` is the time on the clock.
    """

    busy: float
    stolen: float
    own: float
    seconds: float


class MachineWatch:
    """Watches the machine from its creation to `busy`.

    Call `probe` now and then: it holds the thread for some milliseconds.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._processors = usable_processors()
        self.num_processors: int = len(self._processors)
        """Processors that this process may use."""
        self._load = _load()
        self._began = self._ticks()
        self._probe_seconds: list[float] = []
        self.probe()

    def probe(self) -> None:
        """Time the fixed piece of work. The median of some runs counts, as one may be
        interrupted.
        """
        took: list[float] = []
        for _ in range(PROBES):
            began = time.perf_counter()
            hashlib.sha256(PROBE).digest()
            took.append(time.perf_counter() - began)
        self._probe_seconds.append(sorted(took)[PROBES // 2])

    def busy(self) -> Busy:
        self.probe()
        others = stolen = None
        began, ended = self._began, self._ticks()
        if began is not None and ended is not None:
            whole = self.num_processors * (ended.seconds - began.seconds)
            own = ended.own - began.own
            others = min(1.0, max(0.0, ended.busy - began.busy - own) / whole)
            stolen = (ended.stolen - began.stolen) / whole
        return Busy(self.num_processors, self._load, others, stolen, tuple(self._probe_seconds))

    def _ticks(self) -> _Ticks | None:
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
            per_second = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        busy = stolen = 0
        for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
            if name[3:].isdigit() and int(name[3:]) in self._processors and len(counts) >= 8:
                user, nice, system, _, _, irq, soft_irq, steal = map(int, counts[:8])
                busy += user + nice + system + irq + soft_irq
                stolen += steal
        own = os.times()
        used = own.user + own.system + own.children_user + own.children_system
        return _Ticks(busy / per_second, stolen / per_second, used, time.perf_counter())


def usable_processors() -> frozenset[int]:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
