"""Checks of each request before a route sees it, in the order of `checks_of`.

A check reads the head of a request only, and raises `ApiError` to refuse it.

Hosts: a page of any site can point its own name to 127.0.0.1, and then shares its origin with a
server there (DNS rebinding). The browser still sends the name that it looked up in `Host`. An IP
address needs no look-up, so it is safe.

Origins: a browser sends `Origin` with any request that lets a page of another site read or send
something. It sends `Sec-Fetch-Site` with all requests. Programs send neither, and are let in. A
preflight carries no key, and is answered here before any route sees it.

Keys: `Authorization: Bearer KEY` or `x-api-key: KEY` identifies the caller. Paths that show all the
server does are for operators, who hold some of the keys. Credentials in URLs are refused, because
proxies, browsers and logs keep URLs.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from aioserve.errors import ConfigError
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError
from aioserve.server.settings import ApiKey, ServerSettings, digest_of

__all__ = [
    "MAX_REQUEST_ID_CHARS",
    "OPERATOR_PATHS",
    "Arrival",
    "HeaderCheck",
    "HostCheck",
    "KeyCheck",
    "OriginCheck",
    "Preflight",
    "QueryCheck",
    "RequestCheck",
    "checks_of",
    "given_request_id",
    "host_of",
    "is_request_id",
    "operators_of",
    "path_of",
]


class Arrival:
    """Request whose body isn't read yet."""

    __slots__ = ("call_log", "headers", "method", "path", "scope")

    def __init__(self, scope: Scope, call_log: CallLog) -> None:
        self.scope: Scope = scope
        self.call_log: CallLog = call_log
        self.method: str = scope["method"]
        self.path: str = path_of(scope)
        """Path below the app's mount point."""
        self.headers: dict[bytes, list[bytes]] = {}
        """Values of each header, by its name in lower case."""
        for name, value in scope["headers"]:
            self.headers.setdefault(name.lower(), []).append(value)

    def header(self, name: bytes) -> str | None:
        """Value of the header `name`; None without one. Raises `ApiError` if it is given more than
        once."""
        values = self.headers.get(name)
        if values is None:
            return None
        if len(values) > 1:
            raise ApiError(400, f"{name.decode()} is given {len(values)} times")
        return values[0].decode("latin-1").strip()

    @property
    def is_call(self) -> bool:
        """True for a POST, which asks for computation."""
        return self.method == "POST"


class RequestCheck(Protocol):
    def check(self, arrival: Arrival) -> None:
        """Raise `ApiError` to refuse a request. May write to `arrival.call_log`: findings, and
        headers of the answer."""
        ...


def path_of(scope: Scope) -> str:
    """Path that routes match, below the app's mount point."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


MAX_REQUEST_ID_CHARS = 128
PRINTABLE = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")


def given_request_id(headers: dict[bytes, list[bytes]]) -> str | None:
    """Request id of the client, if it sent exactly one of 1 to `MAX_REQUEST_ID_CHARS` printable
    ASCII characters. Any other is replaced, without an error."""
    texts = [value.decode("latin-1") for value in headers.get(b"x-request-id", ())]
    return texts[0] if len(texts) == 1 and is_request_id(texts[0]) else None


def is_request_id(text: str) -> bool:
    """True if `text` may be a request id."""
    return PRINTABLE.fullmatch(text) is not None


class HeaderCheck:
    def __init__(self, max_headers: int, max_bytes: int) -> None:
        self._max_headers = max_headers
        self._max_bytes = max_bytes

    def check(self, arrival: Arrival) -> None:
        scope = arrival.scope
        headers = scope["headers"]
        if len(headers) > self._max_headers:
            raise _too_large(f"{len(headers)} headers; {self._max_headers} are read")
        length = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
        for name, value in headers:
            length += len(name) + len(value)
        if length > self._max_bytes:
            raise _too_large(f"{length} bytes of path and headers; {self._max_bytes} are read")


def _too_large(what: str) -> ApiError:
    return ApiError(431, f"the request has {what}", code="headers_too_large")


AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?", re.I)
NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*|\[[0-9a-f:.]+\]", re.I)


def host_of(authority: str) -> tuple[str, str | None] | None:
    """Name in lower case, and port, of `name:port`; None for any other text."""
    found = AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    return found["host"].lower().removesuffix("."), found["port"]


class HostCheck:
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


ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@\\\s]+)", re.I)
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
DEFAULT_PORTS = {"http": "80", "https": "443"}
OTHER_SITES = ("cross-site", "same-site")
"""Values of `Sec-Fetch-Site` from other origins. Another port of the same name is "same-site"."""
PREFLIGHT_SECONDS = 600
"""Seconds that a browser may cache the answer to a preflight."""


class Preflight(Exception):
    """The request is a browser's preflight, which `arrival.call_log.headers` answer."""


class OriginCheck:
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
            self._check_site(arrival)
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
        headers = arrival.call_log.headers
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

    def _check_site(self, arrival: Arrival) -> None:
        """Refuse requests of other sites' pages that have no `Origin`.

        Browsers leave `Origin` out for images and the like. The page couldn't read the answer, but
        the server would compute it, or stream for ever. A link that leads to a page of this server
        is allowed.
        """
        if self._any or arrival.header(b"sec-fetch-site") not in OTHER_SITES:
            return
        leads_here = arrival.header(b"sec-fetch-mode") == "navigate"
        if not leads_here or arrival.path in OPERATOR_PATHS:
            raise ApiError(
                403,
                f"pages of other sites may not ask for {arrival.path[:100]}: allowed_origins "
                "names those that may, by requests with the header origin",
                code="origin_not_allowed",
            )


Parts = tuple[str, str, str | None]
"""Scheme, host and port of an origin. The port is None if it is the scheme's default."""


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
    """True if name and port are this server's. The scheme may differ: a proxy that ends TLS hides
    it."""
    scheme, name, port = parts
    where = host_of(arrival.header(b"host") or "")
    return where is not None and (name, port) == (where[0], _port(scheme, where[1]))


CREDENTIALS = frozenset(
    {"accesstoken", "apikey", "auth", "authorization", "bearer", "key", "token", "xapikey"}
)


class QueryCheck:
    def check(self, arrival: Arrival) -> None:
        query = arrival.scope["query_string"]
        if not query:
            return
        for part in query.split(b"&"):
            name = unquote_to_bytes(part.split(b"=", 1)[0].replace(b"+", b" "))
            if re.sub(rb"[^a-z]", b"", name.lower()).decode() in CREDENTIALS:
                raise ApiError(
                    400,
                    "credentials belong into the header authorization, and not into the query",
                    code="credentials_in_query",
                )


OPERATOR_PATHS: frozenset[str] = frozenset(
    {
        *("/metrics", "/live", "/live/now", "/trace", "/server_info"),
        *("/reset_prefix_cache", "/abort_requests", "/abort_request"),
    }
)
"""Paths that show the requests of all keys together, or change what all keys share."""

CHALLENGE = (b"www-authenticate", b'Bearer realm="aioserve"')


class KeyCheck:
    """Check of API keys. Without any keys, every caller is let in."""

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
        if holder is None or holders:  # two different keys leave open who calls
            raise _refused(arrival, "the API key isn't one of this server's")
        arrival.call_log.tenant = holder.name
        arrival.call_log.cache_salt = holder.cache_salt
        if arrival.path in OPERATOR_PATHS and holder.name not in self._operators:
            raise ApiError(
                403,
                f"{arrival.path} is about what all keys ask for, and {holder.name} isn't the key "
                "of an operator: operators names those that are",
                code="operator_key_needed",
            )

    def _holder(self, key: bytes) -> ApiKey | None:
        """Key that matches, or None. Compares every key, so that the time reveals nothing."""
        digest = digest_of(key.decode("latin-1"))
        found = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
        return found


def operators_of(keys: Sequence[ApiKey], names: Collection[str]) -> frozenset[str]:
    """Names of the operators' keys.

    Without `names`, a single key is an operator's, as it can't see another's requests. With several
    keys there is no operator then. Raises `ConfigError` for a name without a key.
    """
    known = {key.name for key in keys}
    for name in names:
        if name not in known:
            # An unknown name may be a key in the wrong place: it isn't shown.
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
    arrival.call_log.headers.append(CHALLENGE)
    return ApiError(401, message, code="invalid_api_key")


def checks_of(settings: ServerSettings, open_paths: Iterable[str] = ()) -> Sequence[RequestCheck]:
    """Checks of one server; the first that refuses a request answers it. `open_paths` need no key,
    like those of the settings. Raises `ConfigError` for invalid hosts, origins or operators."""
    return (
        HeaderCheck(settings.max_headers, settings.max_header_bytes),
        HostCheck(settings.allowed_hosts),
        OriginCheck(settings.allowed_origins),
        QueryCheck(),
        KeyCheck(settings.keys, {*settings.open_paths, *open_paths}, settings.operators),
    )
