"""Under which names a server may be addressed.

A page of any site can make its own name point to 127.0.0.1, and is then of the same origin as a
server there (DNS rebinding). The browser still says in `Host` which name it looked up. An address
needs no look-up, so it can't be another's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from aioserve.errors import ConfigError
from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival

__all__ = ["HostGuard", "host_of"]

AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?", re.I)
NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*|\[[0-9a-f:.]+\]", re.I)


def host_of(authority: str) -> tuple[str, str | None] | None:
    """Name, in lower case, and port of `name:port`; None for what isn't that."""
    found = AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    return found["host"].lower().removesuffix("."), found["port"]


class HostGuard:
    def __init__(self, allowed: Sequence[str]) -> None:
        for name in allowed:
            if not NAME.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts must be names of hosts without ports, or '*', got {name!r}",
                    argument="allowed_hosts",
                    value=name,
                )
        self._any = "*" in allowed
        self._names = frozenset(name.lower() for name in allowed)
        self._below = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    def check(self, arrival: Arrival) -> None:
        if self._any:
            return
        given = arrival.header(b"host")
        found = host_of(given) if given else None
        if found is None:
            raise ApiError(400, "host must name this server", code="host_not_allowed")
        if not self._is_served(found[0]):
            raise ApiError(
                403,
                f"the host {found[0]:.100} isn't served here: allowed_hosts names those that are",
                code="host_not_allowed",
            )

    def _is_served(self, name: str) -> bool:
        by_name = name == "localhost" or name in self._names
        return by_name or name.endswith((".localhost", *self._below)) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        if name.startswith("["):
            ipaddress.IPv6Address(name[1:-1])
        else:
            ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True
