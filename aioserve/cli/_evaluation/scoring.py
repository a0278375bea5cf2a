"""Log-probabilities that a model gives the tokens of a text, window by window.

They are those of `Engine.score`: each window is a prompt, and its scored tokens the continuation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.cli._evaluation.text import EvaluatedText
from aioserve.cli._evaluation.windows import Window
from aioserve.progress_bar import OnProgress

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["Scored", "at_once", "score_text"]


class Scored(NamedTuple):
    """Scores of all windows."""

    logprobs: npt.NDArray[np.float64]
    """float64 `[scored tokens]`, in the order of the text: natural logarithms."""
    num_computed: int
    """Tokens of all windows, context included."""
    seconds: float


async def score_text(
    engine: Engine,
    text: EvaluatedText,
    windows: Sequence[Window],
    concurrency: int,
    progress: OnProgress | None,
) -> Scored:
    """Score windows, at most `concurrency` at once. Raises what `Engine.score` raises."""
    found: list[Sequence[float]] = [()] * len(windows)
    total = sum(window.num_scored for window in windows)
    num_done = num_computed = 0

    async def score(index: int, window: Window) -> None:
        nonlocal num_done, num_computed
        ids = text.token_ids
        prompt = [*text.before, *ids[window.start : window.scored].tolist()]
        score = await engine.score(prompt, ids[window.scored : window.end].tolist())
        found[index] = [one.logprob for one in score.logprobs]
        num_done += window.num_scored
        num_computed += score.usage.prompt_tokens
        if progress is not None:
            progress(num_done, total)

    began = time.perf_counter()
    await at_once([lambda at=at: score(*at) for at in enumerate(windows)], concurrency)
    seconds = time.perf_counter() - began
    logprobs = np.concatenate([np.array(part, np.float64) for part in found])
    return Scored(logprobs, num_computed, seconds)


async def at_once(jobs: Iterable[Callable[[], Awaitable[None]]], most: int) -> None:
    """Run jobs in their order, at most `most` of them at once.

    Raises the error of the first job that fails; the others are cancelled.
    """
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await job()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
