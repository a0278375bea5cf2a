"""The calls that an app is answering, counted, so that whoever ends it can wait for their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Calls"]


class Calls:
    """Of one app."""

    def __init__(self) -> None:
        self._num_running = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def num_running(self) -> int:
        """Those whose body is being read, or whose answer isn't sent to its end."""
        return self._num_running

    @contextmanager
    def one(self) -> Iterator[None]:
        """While it is answered."""
        self._num_running += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._none_left.set()

    async def wait_none(self) -> None:
        """Until none is left."""
        await self._none_left.wait()
