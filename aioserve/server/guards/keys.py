"""Who may call, and on whose behalf: `Authorization: Bearer KEY` or `x-api-key: KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival
from aioserve.server.keys import ApiKey, digest_of

__all__ = ["KeyGuard"]

CHALLENGE = (b"www-authenticate", b'Bearer realm="aioserve"')


class KeyGuard:
    """Lets everybody in where there are no keys."""

    def __init__(self, keys: Sequence[ApiKey], open_paths: Iterable[str]) -> None:
        self._keys = keys
        self._open = frozenset(open_paths)

    def check(self, arrival: Arrival) -> None:
        if not self._keys or (arrival.path in self._open and arrival.method in ("GET", "HEAD")):
            return
        given = [*arrival.headers.get(b"x-api-key", ()), *_bearers(arrival)]
        if not given:
            raise _refused(arrival, "an API key is needed: authorization: Bearer KEY")
        holders = {self._holder(key.strip()) for key in given}
        holder = holders.pop()
        if holder is None or holders:  # two keys that differ leave open who calls
            raise _refused(arrival, "the API key isn't one of this server's")
        arrival.told.tenant = holder.name
        arrival.told.cache_salt = holder.cache_salt

    def _holder(self, key: bytes) -> ApiKey | None:
        """Takes the same time whichever key it is, and whether it is one: each is compared."""
        digest = digest_of(key.decode("latin-1"))
        found = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
        return found


def _bearers(arrival: Arrival) -> list[bytes]:
    found = []
    for value in arrival.headers.get(b"authorization", ()):
        scheme, _, key = value.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise _refused(arrival, "authorization must be Bearer KEY")
        found.append(key)
    return found


def _refused(arrival: Arrival, message: str) -> ApiError:
    arrival.told.headers.append(CHALLENGE)
    return ApiError(401, message, code="invalid_api_key")
