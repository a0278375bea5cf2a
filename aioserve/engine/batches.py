"""Completions of many prompts by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from aioserve.arguments import shown
from aioserve.engine.options import StreamOptions
from aioserve.engine.prompt_only import request_ids_of
from aioserve.engine.prompts import listed
from aioserve.errors import InvalidRequestError
from aioserve.progress_bar import OnProgress, bar_on_terminal
from aioserve.request import Completion, SamplingParams

__all__ = ["Progress", "check_no_progress", "completions_of"]

Progress = OnProgress | bool | None
"""Is called with how many prompts have their completion, and how many there are. None draws a bar
where standard error is a terminal, and False doesn't; True is None."""

MAX_PROMPTS = 1_000_000


async def completions_of(
    generate: Callable[..., Awaitable[Completion]],
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] | None,
    at_once: int,
    progress: Progress,
    options: StreamOptions,
) -> list[Completion]:
    """Completions in the order of the prompts, of which `at_once` are asked for at once: as one
    ends, the next begins. Raises what the first of them raises that fails, and ends the others.
    `generate` gives that of one prompt, its parameters and the `options`."""
    every = listed("prompts", prompts, MAX_PROMPTS)
    each_params = _params_of_each(params, len(every))
    shared: dict[str, Any] = {**options}
    ids = request_ids_of(shared.pop("request_id", None), len(every))
    found: list[Completion | None] = [None] * len(every)
    left, done = iter(range(len(every))), 0

    with _shown(progress) as tell:

        async def work() -> None:
            nonlocal done
            for index in left:
                found[index] = await generate(
                    every[index], each_params[index], request_id=ids[index], **shared
                )
                done += 1
                if tell is not None:
                    tell(done, len(every))

        workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(every)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [one for one in found if one is not None]


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
def _shown(progress: Any) -> Iterator[OnProgress | None]:
    if progress is None or progress is True:
        bar = bar_on_terminal("completions")
    elif progress is False:
        bar = nullcontext(None)
    elif callable(progress):
        bar = nullcontext(cast("OnProgress", progress))
    else:
        raise InvalidRequestError(
            f"progress must be a function, True, False or None, got {shown(progress)}",
            argument="progress",
            value=progress,
        )
    with bar as tell:
        yield tell
