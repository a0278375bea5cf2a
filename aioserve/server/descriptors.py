"""Log message of a process that is about to run out of file descriptors.

Without free descriptors, the system drops new connections, and event loops may not report it.
"""

from __future__ import annotations

import logging

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

__all__ = ["DescriptorWatch"]

logger: logging.Logger = logging.getLogger(__name__)

FEW_LEFT = 8
SECONDS_BETWEEN = 60.0


class DescriptorWatch:
    """Watch over the descriptors of one server's connections. A new descriptor is the lowest free
    one, so a high number means that many are in use."""

    def __init__(self) -> None:
        self._logged_seconds: float | None = None

    def taken(self, descriptor: int, now_seconds: float) -> None:
        """Log an error if the descriptor of a new connection is near the limit, at most once a
        minute."""
        limit = _limit()
        if limit is None or descriptor < limit - FEW_LEFT:
            return
        told = self._logged_seconds
        if told is None or now_seconds - told >= SECONDS_BETWEEN:
            self._logged_seconds = now_seconds
            logger.error(
                "this process may open %d file descriptors, and nearly all are in use: new "
                "connections are dropped until some end (ulimit -n sets the limit)",
                limit,
            )


def _limit() -> int | None:
    """Most descriptors of the process; None without a limit."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
