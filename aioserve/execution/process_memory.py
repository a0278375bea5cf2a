"""How much memory of the machine the process may still use, containers included."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory_bytes", "total_memory_bytes"]

CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_memory_bytes() -> int:
    """The smaller of what the system has available and what the cgroup's limit leaves."""
    system = _meminfo_available()
    limits = [
        limit - used
        for limit, used in (
            (_read(CGROUP_V2 / "memory.max"), _read(CGROUP_V2 / "memory.current")),
            (
                _read(CGROUP_V1 / "memory.limit_in_bytes"),
                _read(CGROUP_V1 / "memory.usage_in_bytes"),
            ),
        )
        if limit is not None and used is not None
    ]
    return max(0, min([system, *limits]))


def total_memory_bytes() -> int:
    """The smaller of what the machine has and the cgroup's limit, whoever uses it now."""
    limits = (_read(CGROUP_V2 / "memory.max"), _read(CGROUP_V1 / "memory.limit_in_bytes"))
    return min([_machine(), *(limit for limit in limits if limit is not None)])


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _machine()


def _read(path: Path) -> int | None:
    """A byte count in a cgroup file; None where there is none ("max", or no such file)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
