"""Memory that the process may use, limits of containers included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["available_memory_bytes", "total_memory_bytes"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Files of a cgroup that tell about its memory."""

    limit: str
    used: str
    unused_cache: str
    """Entry of `memory.stat` with the bytes of files not read lately. The system reclaims these
    by itself."""


V2 = _Files("memory.max", "memory.current", "inactive_file")
V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory_bytes() -> int:
    """Memory that is still available: the least of what the system has, and of what the limits
    of cgroups leave."""
    left = [
        limit - used + _stat(group, files.unused_cache)
        for group, files, limit in _limits()
        if (used := _read(group / files.used)) is not None
    ]
    return max(0, min([_meminfo_available(), *left]))


def total_memory_bytes() -> int:
    """Total memory, used or free: the least of what the machine has, and of the limits of
    cgroups."""
    return min([_machine(), *(limit for _, _, limit in _limits())])


def _limits() -> Iterator[tuple[Path, _Files, int]]:
    """Limits of the process's cgroups and of those around them. A container may see its own as
    the root, whatever its name outside."""
    for root, files, own in ((CGROUPS, V2, _own("")), (CGROUPS / "memory", V1, _own("memory"))):
        for group in dict.fromkeys([own, *own.parents]):
            if (limit := _read(root / group / files.limit)) is not None:
                yield root / group, files, limit


def _own(controller: str) -> Path:
    """Path of the process's cgroup of a controller, below the root. An empty name means v2."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return Path()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path.lstrip("/"))
    return Path()


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


def _stat(group: Path, name: str) -> int:
    """A number in a cgroup's `memory.stat`; 0 if it is missing."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _read(path: Path) -> int | None:
    """Bytes in a cgroup file; None for "max", or without the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
