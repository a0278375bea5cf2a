"""How much of a request may come before its body."""

from __future__ import annotations

from aioserve.server.errors import ApiError
from aioserve.server.guards.arrival import Arrival

__all__ = ["HeaderLimits"]


class HeaderLimits:
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
