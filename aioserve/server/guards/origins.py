"""Which sites' pages may call from a browser.

A browser sends `Origin` with whatever a page asks another site for. Programs send none, and are let
in. A preflight asks first, and carries no key: it is answered here, and no route sees it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aioserve.errors import ConfigError
from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival
from aioserve.server.guards.hosts import host_of

__all__ = ["OriginGuard", "Preflight"]

ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@\\\s]+)", re.I)
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
DEFAULT_PORTS = {"http": "80", "https": "443"}
PREFLIGHT_SECONDS = 600
"""How long a browser may keep the answer."""


class Preflight(Exception):
    """The request is a browser's question, which `arrival.told.headers` answer."""


class OriginGuard:
    def __init__(self, allowed: Sequence[str]) -> None:
        for origin in allowed:
            if origin != "*" and _parts(origin) is None:
                raise ConfigError(
                    f"allowed_origins must be like 'https://example.org', or '*', got {origin!r}",
                    argument="allowed_origins",
                    value=origin,
                )
        self._any = "*" in allowed
        self._allowed = frozenset(_parts(origin) for origin in allowed if origin != "*")

    def check(self, arrival: Arrival) -> None:
        origin = arrival.header(b"origin")
        if origin is None:
            return
        parts = _parts(origin)
        if parts is None or not (self._any or parts in self._allowed):
            if parts is None or not _is_same(parts, arrival):
                raise ApiError(
                    403,
                    f"pages of {origin[:100]!r} may not call this server: allowed_origins names "
                    "those that may",
                    code="origin_not_allowed",
                )
            return
        headers = arrival.told.headers
        headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
        headers.append((b"vary", b"origin"))
        headers.append((b"access-control-expose-headers", b"retry-after, x-request-id"))
        if arrival.method == "OPTIONS" and b"access-control-request-method" in arrival.headers:
            wanted = arrival.header(b"access-control-request-headers") or ""
            if not HEADER_NAMES.fullmatch(wanted):
                raise ApiError(400, "access-control-request-headers must be names of headers")
            headers.append((b"access-control-allow-methods", b"GET, POST, DELETE"))
            headers.append((b"access-control-allow-headers", wanted.encode()))
            headers.append((b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS))
            raise Preflight


Parts = tuple[str, str, str | None]
"""Scheme, host and port; None for that of the scheme."""


def _parts(origin: str) -> Parts | None:
    found = ORIGIN.fullmatch(origin)
    where = host_of(found["authority"]) if found else None
    if found is None or where is None:
        return None
    scheme = found["scheme"].lower()
    return scheme, where[0], _port(scheme, where[1])


def _port(scheme: str, port: str | None) -> str | None:
    return None if port == DEFAULT_PORTS.get(scheme) else port


def _is_same(parts: Parts, arrival: Arrival) -> bool:
    """Behind a proxy that ends TLS the scheme isn't known here; name and port are."""
    scheme, name, port = parts
    where = host_of(arrival.header(b"host") or "")
    return where is not None and (name, port) == (where[0], _port(scheme, where[1]))
