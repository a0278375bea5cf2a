"""Several requests to the engine as one: what ends one of them ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import msgspec

from aioserve.engine.interface import TokenStreamLike
from aioserve.request import FinishReason, Token, Usage
from aioserve.server.call_log import sum_of
from aioserve.server.errors import as_named

__all__ = ["Batch", "Merged", "all_of"]

T = TypeVar("T")


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all, which run at the same time. Raises what the first that fails raises, once
    the others were cancelled."""
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, T] = {}
    failures: list[Exception] = []

    async def run(index: int) -> None:
        try:
            results[index] = await calls[index]()
        except Exception as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index in range(len(calls)):
            group.start_soon(run, index)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a stream had at one moment, which may be over when it is looked at."""

    tokens: list[Token]
    finish_reasons: tuple[FinishReason | None, ...]
    """Reasons of samples all of whose tokens were given out, with these."""


async def _next(stream: TokenStreamLike, min_tokens: int) -> Batch:
    return Batch(await stream.batch(min_tokens), stream.finish_reasons)


class Merged:
    """The tokens of several streams as they come, in batches as `TokenStream.batch` gives them: a
    `Source`."""

    def __init__(self, names: Mapping[str, str] = {}) -> None:
        """`names`: what the API calls arguments of the engine."""
        self._names = names
        self.streams: list[TokenStreamLike] = []
        self._num_given = 0
        """Tokens that were in batches."""
        self._waiting: dict[asyncio.Task[Batch], int] = {}
        """For the next tokens of each stream that goes on; its place."""

    @classmethod
    async def begun(
        cls,
        submissions: Sequence[Callable[[], TokenStreamLike]],
        names: Mapping[str, str] = {},
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> Merged:
        """Make every stream, or none where one can't be made. `before` is awaited before each."""
        merged = cls(names)
        try:
            for submit in submissions:
                if before is not None:
                    await before()
                merged.streams.append(submit())
        except BaseException:
            merged.close()
            raise
        return merged

    def in_words(self) -> AbstractContextManager[None]:
        return as_named(self._names)

    @property
    def usage(self) -> Usage:
        """Usage of all streams together so far."""
        return sum_of([stream.usage for stream in self.streams])

    @property
    def given_usage(self) -> Usage:
        """Usage so far, of the tokens that were in a batch."""
        return msgspec.structs.replace(self.usage, completion_tokens=self._num_given)

    async def started(self) -> None:
        """Until one of them has tokens, or its end. Raises what ended it, if that was an error."""
        if len(self.streams) == 1:
            await self.streams[0].started()
            return
        for place in range(len(self.streams)):
            self._wait_for(place, 1)
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=self._waiting.__getitem__):
            task.result()

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[tuple[int, Batch], None]:
        """The place of a stream, and what came next of it: no tokens at its end. Raises what ended
        the first that an error ends."""
        if len(self.streams) == 1:
            batch: Batch | None = None
            while batch is None or batch.tokens:
                batch = await _next(self.streams[0], min_tokens)
                self._num_given += len(batch.tokens)
                yield 0, batch
            return
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=self._waiting.__getitem__):
                place = self._waiting.pop(task)
                if (batch := task.result()).tokens:
                    self._num_given += len(batch.tokens)
                    self._wait_for(place, min_tokens)
                yield place, batch

    def _wait_for(self, place: int, min_tokens: int) -> None:
        task = asyncio.ensure_future(_next(self.streams[place], min_tokens))
        self._waiting[task] = place

    def close(self) -> None:
        """End the requests that haven't ended."""
        for stream in self.streams:
            stream.close()
        for task in self._waiting:
            task.add_done_callback(_unheard)


def _unheard(task: asyncio.Task[Batch]) -> None:
    """Drop what a task raises that is no longer awaited."""
    if not task.cancelled():
        task.exception()
