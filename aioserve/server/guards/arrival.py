"""The head of a request, read once for all guards."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

from aioserve.server.errors import ApiError
from aioserve.server.record import CallRecord

__all__ = ["Arrival", "Guard", "path_of"]


class Arrival:
    """A request whose body nobody has read."""

    __slots__ = ("headers", "method", "path", "scope", "told")

    def __init__(self, scope: Scope, told: CallRecord) -> None:
        self.scope: Scope = scope
        self.told: CallRecord = told
        self.method: str = scope["method"]
        self.path: str = path_of(scope)
        """Below where the app is mounted."""
        self.headers: dict[bytes, list[bytes]] = {}
        """By name in lower case."""
        for name, value in scope["headers"]:
            self.headers.setdefault(name.lower(), []).append(value)

    def header(self, name: bytes) -> str | None:
        """The one of that name; None where there is none. Raises `ApiError` for two."""
        values = self.headers.get(name)
        if values is None:
            return None
        if len(values) > 1:
            raise ApiError(400, f"{name.decode()} is given {len(values)} times")
        return values[0].decode("latin-1").strip()

    @property
    def is_call(self) -> bool:
        """Whether it asks for something to be computed."""
        return self.method == "POST"


class Guard(Protocol):
    def check(self, arrival: Arrival) -> None:
        """Raises `ApiError` for a request that isn't let in. May note in `arrival.told` what it
        finds, and which headers the answer needs."""
        ...


def path_of(scope: Scope) -> str:
    """The path that routes are matched with."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path
