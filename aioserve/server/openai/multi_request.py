"""Several requests to the engine as one: an error of one ends them all."""

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
    """Run all calls at the same time, and return their results. The first error cancels the others,
    and is raised then."""
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
    """Tokens and ends of a stream at one moment. The stream may have moved on since."""

    tokens: list[Token]
    finish_reasons: tuple[FinishReason | None, ...]
    """Reasons of the samples whose tokens were all given out, including those here."""


async def _next(stream: TokenStreamLike, min_tokens: int) -> Batch:
    return Batch(await stream.batch(min_tokens), stream.finish_reasons)


class Merged:
    """Tokens of several streams as they come, in batches like those of `TokenStream.batch`: a
    `Source`."""

    def __init__(self, names: Mapping[str, str] = {}) -> None:
        """`names` has the API's names for arguments of the engine."""
        self._names = names
        self.streams: list[TokenStreamLike] = []
        self._num_given = 0
        """Tokens in batches so far."""
        self._waiting: dict[asyncio.Task[Batch], int] = {}
        """Tasks that wait for the next tokens of the open streams, and the place of each stream."""

    @classmethod
    async def begun(
        cls,
        submissions: Sequence[Callable[[], TokenStreamLike]],
        names: Mapping[str, str] = {},
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> Merged:
        """Make every stream, or none if one can't be made. `before` is awaited before each."""
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
        """Usage so far, with only the generated tokens that were in a batch."""
        return msgspec.structs.replace(self.usage, completion_tokens=self._num_given)

    async def started(self) -> None:
        """Wait until one stream has tokens, or has ended. Raises the error that ended it."""
        if len(self.streams) == 1:
            await self.streams[0].started()
            return
        for place in range(len(self.streams)):
            self._wait_for(place, 1)
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=self._waiting.__getitem__):
            task.result()

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[tuple[int, Batch], None]:
        """Yield the place of a stream and its next batch, without tokens at its end. Raises the
        first error that ends a stream."""
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
    """Drop the error of a task that is no longer awaited."""
    if not task.cancelled():
        task.exception()
