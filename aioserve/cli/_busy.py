"""Whether a machine did something else while it was measured.

Tells load before, what others and the hypervisor took of the processors meanwhile, and how much the
time of one fixed piece of work varied. What a system doesn't tell is left out.
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
"""Bytes that a probe hashes: this takes one processor some milliseconds and allocates nothing."""
PROBES = 7

MOST_LOAD = 0.5
"""Largest load of each processor, before anything is measured."""
MOST_OTHERS = 0.1
MOST_STOLEN = 0.02
MOST_SPREAD = 1.25
"""Largest ratio of the slowest probe to the fastest."""


class Busy(NamedTuple):
    """What is None isn't known."""

    num_processors: int
    load: float | None
    """Mean number of those that ran or wanted to in the minute before."""
    others: float | None
    """Share of the processors that other programs took."""
    stolen: float | None
    """Share that the hypervisor gave to other machines."""
    probe_seconds: tuple[float, ...]

    @property
    def findings(self) -> list[str]:
        """What is too much, by name and number; none on a machine that was left alone."""
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
        """For the table."""
        return {
            "load_before": None if self.load is None else round(self.load, 2),
            "others_share": None if self.others is None else round(self.others, 4),
            "stolen_share": None if self.stolen is None else round(self.stolen, 4),
            "probe_spread": round(max(self.probe_seconds) / min(self.probe_seconds), 4),
        }


class _Ticks(NamedTuple):
    """Ticks of the processors that this process may use, so far."""

    busy: float
    stolen: float
    own: float
    seconds: float


class MachineWatch:
    """Watches from its creation to `busy`. `probe` is called now and then: it holds the thread for
    some milliseconds."""

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
        """The median of some runs: one of them may well be interrupted."""
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
