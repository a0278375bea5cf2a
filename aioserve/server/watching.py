"""Who watches the engine for an app: from when the app is made until its lifespan ends.

An app that is mounted in another has no lifespan of its own: it watches as long as the engine is
there, unless the other one runs `app.router.lifespan_context`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from aioserve import Observer
from aioserve.engine.engine import Engine

__all__ = ["Watching"]


class Watching:
    """The observers of one app."""

    def __init__(self, engine: Engine, observers: Sequence[Observer]) -> None:
        self._engine = engine
        self._observers = tuple(observers)
        self._stops: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Nothing happens where it has begun."""
        if not self._stops:
            self._stops += [self._engine.observe(observer) for observer in self._observers]

    def end(self) -> None:
        """Likewise."""
        while self._stops:
            self._stops.pop()()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """That of the app, which may run again."""
        self.begin()
        try:
            yield
        finally:
            self.end()
