"""Who may call, and on whose behalf: `Authorization: Bearer KEY` or `x-api-key: KEY`.

What shows all that a server does is for its operators: the holders of some of the keys.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence

from aioserve.errors import ConfigError
from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival
from aioserve.server.keys import ApiKey, digest_of

__all__ = ["OPERATOR_PATHS", "KeyGuard", "operators_of"]

OPERATOR_PATHS: frozenset[str] = frozenset({"/metrics", "/live", "/live/now", "/trace"})
"""Which show the requests of all keys together."""

CHALLENGE = (b"www-authenticate", b'Bearer realm="aioserve"')


class KeyGuard:
    """Lets everybody in where there are no keys."""

    def __init__(
        self, keys: Sequence[ApiKey], open_paths: Iterable[str], operators: Collection[str] = ()
    ) -> None:
        self._keys = keys
        self._open = frozenset(open_paths)
        self._operators = operators_of(keys, operators)

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
        if arrival.path in OPERATOR_PATHS and holder.name not in self._operators:
            raise ApiError(
                403,
                f"{arrival.path} shows what all keys ask for, and {holder.name} isn't the key of "
                "an operator: operators names those that are",
                code="operator_key_needed",
            )

    def _holder(self, key: bytes) -> ApiKey | None:
        """Takes the same time whichever key it is, and whether it is one: each is compared."""
        digest = digest_of(key.decode("latin-1"))
        found = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
        return found


def operators_of(keys: Sequence[ApiKey], names: Collection[str]) -> frozenset[str]:
    """Names of the keys of operators. Without `names` it is the only key, which sees nothing that
    is another's, and none where there are several. Raises `ConfigError` for one that no key has."""
    known = {key.name for key in keys}
    for name in names:
        if name not in known:
            # What isn't a name may be a key that was put in the wrong place.
            raise ConfigError(
                "operators must be names of api_keys, which are "
                f"{', '.join(sorted(known)) or 'none'}",
                argument="operators",
            )
    return frozenset(names or (known if len(known) == 1 else ()))


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
