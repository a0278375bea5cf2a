"""Completions of many prompts by one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from aioserve.arguments import shown
from aioserve.engine.options import StreamOptions
from aioserve.engine.prompt_only import noting_place, request_ids_of
from aioserve.engine.prompts import check_single, listed
from aioserve.engine.stream import TokenStream, collect
from aioserve.errors import InvalidRequestError, QueueFullError
from aioserve.progress_bar import OnProgress, OnTokens, token_bar_on_terminal
from aioserve.request import Completion, SamplingParams

__all__ = ["Progress", "check_no_progress", "completions_of"]

Progress = OnProgress | bool | None
"""Callback that gets the number of finished prompts, from 0 on, and their total. None and True
draw a bar if standard error is a terminal; False draws nothing."""

MAX_PROMPTS = 1_000_000
LOOK_SECONDS = 0.1
"""Time between two updates of the number of tokens in a bar."""


async def completions_of(
    submit: Callable[[Any, Any, Any], Awaitable[TokenStream]],
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] | None,
    at_once: int,
    progress: Progress,
    options: StreamOptions,
) -> list[Completion]:
    """Return completions in the order of the prompts, with `at_once` requests at a time.

    Each end of a request starts the next. A prompt that the queue refuses waits until another of
    the batch ends. The first error ends the others and is raised. `submit` makes the stream of one
    prompt, from its parameters and the options.
    """
    every = listed("prompts", prompts, MAX_PROMPTS)
    each_params = _params_of_each(params, len(every))
    ids = request_ids_of(options.get("request_id"), len(every))
    found: list[Completion | None] = [None] * len(every)
    left = iter(range(len(every)))
    room = _Room()

    with _shown(progress, len(every)) as watch:

        async def work() -> None:
            for index in left:
                check_single(f"prompts[{index}]", every[index])
                wanted = each_params[index]
                named = {**options, "request_id": ids[index]}
                with noting_place("prompts", index):
                    stream = await room.begun(partial(submit, every[index], wanted, named))
                    watch.began(index, stream, wanted)
                    try:
                        found[index] = await collect(stream, wanted)
                    finally:
                        room.ended()
                watch.ended(index)

        workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(every)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [one for one in found if one is not None]


class _Room:
    """Room in the engine's queue, as the prompts of one batch find it."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._refused: deque[asyncio.Future[None]] = deque()

    async def begun(self, submit: Callable[[], Awaitable[TokenStream]]) -> TokenStream:
        """Return the stream that `submit` gives, once there is room.

        Raises `QueueFullError` if only requests of others fill the queue.
        """
        while True:
            try:
                stream = await submit()
            except QueueFullError:
                if not self._in_flight:
                    raise
                turn = asyncio.get_running_loop().create_future()
                self._refused.append(turn)
                await turn
            else:
                self._in_flight += 1
                self._try_again()  # there may be room for more than one
                return stream

    def ended(self) -> None:
        """Note that a request has ended."""
        self._in_flight -= 1
        self._try_again()

    def _try_again(self) -> None:
        """Let the oldest refused prompt try again; if it finds room, it lets the next one try."""
        while self._refused:
            turn = self._refused.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class _Watch:
    """A batch without an observer."""

    def began(self, index: int, stream: TokenStream, params: SamplingParams | None) -> None:
        """Note that a prompt has its stream."""

    def ended(self, index: int) -> None:
        """Note that a prompt has its completion."""


class _Told(_Watch):
    """A batch that reports each end of a prompt to a callback."""

    def __init__(self, tell: OnProgress, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0
        tell(0, total)

    def ended(self, index: int) -> None:
        self._done += 1
        self._tell(self._done, self._total)


class _Drawn(_Watch):
    """A batch with a progress bar.

    The bar is updated every `LOOK_SECONDS` of the loop's clock. Tokens cost nothing in between.
    """

    def __init__(self, bar: OnTokens) -> None:
        self._bar, self._done, self._tokens = bar, 0, 0
        self._going: dict[int, tuple[TokenStream, int | None]] = {}
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def began(self, index: int, stream: TokenStream, params: SamplingParams | None) -> None:
        self._going[index] = stream, _most_tokens(params)

    def ended(self, index: int) -> None:
        stream, _ = self._going.pop(index)
        self._tokens += stream.usage.completion_tokens
        self._done += 1

    def _look(self) -> None:
        self.draw()
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def draw(self) -> None:
        """Update the bar."""
        tokens, share = self._tokens, float(self._done)
        for stream, most in self._going.values():
            count = stream.usage.completion_tokens
            tokens += count
            if most is not None:
                share += count / most
        self._bar(self._done, share, tokens, self._loop.time() - self._since)

    def close(self) -> None:
        self._timer.cancel()


def _most_tokens(params: Any) -> int | None:
    """Most tokens that the samples of a prompt may have together, if its parameters limit them."""
    if not isinstance(params, SamplingParams) or params.max_tokens is None:
        return None
    return params.max_tokens * (params.best_of or params.n)


def _params_of_each(params: Any, count: int) -> Sequence[Any]:
    if not isinstance(params, list | tuple):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"params must be one for all prompts, or one for each of {count}, got {len(params)}",
            argument="params",
            value=len(params),
            limit=count,
        )
    return params


def check_no_progress(progress: object) -> None:
    """Raise `InvalidRequestError` for a `progress` beside a single prompt."""
    if progress is not None:
        raise InvalidRequestError(
            "progress goes with a sequence of prompts", argument="progress", value=progress
        )


@contextmanager
def _shown(progress: Any, total: int) -> Iterator[_Watch]:
    if progress is False:
        yield _Watch()
    elif callable(progress):
        yield _Told(cast("OnProgress", progress), total)
    elif progress is None or progress is True:
        with token_bar_on_terminal("completions", total) as bar:
            if bar is None:
                yield _Watch()
                return
            drawn = _Drawn(bar)
            try:
                yield drawn
                drawn.draw()
            finally:
                drawn.close()
    else:
        raise InvalidRequestError(
            f"progress must be a function, True, False or None, got {shown(progress)}",
            argument="progress",
            value=progress,
        )
