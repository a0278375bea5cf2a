"""What each request must pass before a route sees it: one idea a file, in the order of `guards_of`.

A guard looks at the head of a request alone, and raises `ApiError` for what it doesn't let in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve.server.guards.arrival import Arrival, Guard
from aioserve.server.guards.headers import HeaderLimits
from aioserve.server.guards.hosts import HostGuard
from aioserve.server.guards.keys import KeyGuard
from aioserve.server.guards.origins import OriginGuard
from aioserve.server.guards.queries import QueryGuard
from aioserve.server.settings import ServerSettings

__all__ = ["Arrival", "Guard", "guards_of"]


def guards_of(settings: ServerSettings, open_paths: Iterable[str] = ()) -> Sequence[Guard]:
    """Those of one server; the first that refuses a request answers it. `open_paths` need no key,
    beside those of the settings. Raises `ConfigError`."""
    return (
        HeaderLimits(settings.max_headers, settings.max_header_bytes),
        HostGuard(settings.allowed_hosts),
        OriginGuard(settings.allowed_origins),
        QueryGuard(),
        KeyGuard(settings.keys, {*settings.open_paths, *open_paths}, settings.operators),
    )
