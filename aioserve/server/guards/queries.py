"""No credentials in URLs: proxies, browsers and logs keep those."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival

__all__ = ["QueryGuard"]

CREDENTIALS = frozenset(
    {"accesstoken", "apikey", "auth", "authorization", "bearer", "key", "token", "xapikey"}
)


class QueryGuard:
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
