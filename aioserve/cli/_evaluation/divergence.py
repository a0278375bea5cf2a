"""Divergence of a model's distributions from another model's, at each scored token of a text.

    KL(reference || model) = sum over all tokens v of  p(v) * (log p(v) - log q(v))

Here p is the reference's distribution of the next token and q the model's: the full softmax over
the vocabulary, in float64. A logits processor takes the rows of logits out of an engine. It keeps
the row that a token would be drawn from, and leaves the text's next token as the only one to draw.
So windows are decoded along the text.

Memory holds rows of both models for a part of each window in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve import LogitsProcessor, LogitsProcessorSpec, hookimpl
from aioserve.cli._evaluation.scoring import at_once
from aioserve.cli._evaluation.text import EvaluatedText
from aioserve.cli._evaluation.windows import Window
from aioserve.errors import RequestFailedError
from aioserve.plugins import API_VERSION
from aioserve.progress_bar import OnProgress
from aioserve.request import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from aioserve import Engine

__all__ = ["Divergence", "RowReader", "compare_rows", "compare_text"]

ROW_BYTES = 1 << 29
"""Most bytes of rows of logits that are kept at once."""
NAME = "aioserve_evaluate_rows"


class Divergence(NamedTuple):
    """Comparison of two models at each scored token, in the order of the text."""

    kl_nats: npt.NDArray[np.float64]
    """float64 `[scored tokens]`: KL divergence."""
    same_top: npt.NDArray[np.bool_]
    """bool `[scored tokens]`: True if both models find the same token the most likely one."""


class RowReader:
    """Plugin of one engine, which reads the rows of logits along given tokens."""

    def __init__(self) -> None:
        self._open: dict[int, _Reading] = {}
        self._number = 0

    @hookimpl
    def aioserve_logits_processors(self) -> Sequence[LogitsProcessorSpec]:
        return [LogitsProcessorSpec(NAME, self._processor, api=API_VERSION)]

    def _processor(self, *, reading: int) -> LogitsProcessor:
        return self._open[reading]

    async def read(
        self, engine: Engine, prompt: list[int], targets: list[int]
    ) -> npt.NDArray[np.float32]:
        """Return rows of logits, float32 `[targets, V]`. Row `i` follows the prompt and `i`
        targets.

        Raises what `Engine.generate` raises, and `RequestFailedError` for logits with NaN or
        infinity.
        """
        number = self._number = self._number + 1
        reading = self._open[number] = _Reading(targets)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(targets),
            ignore_eos=True,
            logits_processors=(f"{NAME}:reading={number}",),
        )
        try:
            await engine.generate(prompt, params)
        finally:
            del self._open[number]
        rows = np.stack([reading.rows[index] for index in range(len(targets))])
        if not np.isfinite(rows.max(axis=1)).all():  # the maximum of a row with a NaN is NaN
            raise RequestFailedError(f"{engine.model_name} gives logits that are not finite")
        return rows


class _Reading(LogitsProcessor):
    """Keeps rows by their place. A row that is computed again replaces the first."""

    def __init__(self, targets: list[int]) -> None:
        self._targets = targets
        self.rows: dict[int, npt.NDArray[np.float32]] = {}

    def process(self, prompt_ids: Tensor, answer_ids: Tensor, logits: Tensor) -> None:
        place = len(answer_ids)
        self.rows[place] = logits.cpu().numpy().copy()
        logits.fill_(float("-inf"))
        logits[self._targets[place]] = 0.0


async def compare_text(
    engines: tuple[Engine, Engine],
    readers: tuple[RowReader, RowReader],
    text: EvaluatedText,
    windows: Sequence[Window],
    concurrency: int,
    progress: OnProgress | None,
) -> Divergence:
    """Compare a model with its reference: the first and the second of `engines`."""
    vocab_size = engines[0].limits.vocab_size
    tokens_at_once = max(1, ROW_BYTES // (8 * vocab_size * concurrency))
    found: list[list[Divergence]] = [[] for _ in windows]
    total = sum(window.num_scored for window in windows)
    num_done = 0
    for first in range(0, len(windows), concurrency):
        group = list(enumerate(windows))[first : first + concurrency]
        # Parts of one window follow each other, so each finds the KV of the part before.
        while parts := [(at, _part(window, tokens_at_once)) for at, window in group]:
            rows = [
                await _rows_of(engine, reader, text, [part for _, part in parts])
                for engine, reader in zip(engines, readers, strict=True)
            ]
            for (at, part), ours, theirs in zip(parts, *rows, strict=True):
                found[at].append(await asyncio.to_thread(compare_rows, theirs, ours))
                num_done += part.num_scored
                if progress is not None:
                    progress(num_done, total)
            group = [
                (at, Window(window.start, part.end, window.end))
                for (at, window), (_, part) in zip(group, parts, strict=True)
                if part.end < window.end
            ]
    every = [part for parts in found for part in parts]
    return Divergence(
        np.concatenate([part.kl_nats for part in every]),
        np.concatenate([part.same_top for part in every]),
    )


def _part(window: Window, most: int) -> Window:
    return Window(window.start, window.scored, min(window.end, window.scored + most))


async def _rows_of(
    engine: Engine, reader: RowReader, text: EvaluatedText, parts: Sequence[Window]
) -> list[npt.NDArray[np.float32]]:
    found: list[Any] = [None] * len(parts)

    async def read(index: int, part: Window) -> None:
        ids = text.token_ids
        prompt = [*text.before, *ids[part.start : part.scored].tolist()]
        found[index] = await reader.read(engine, prompt, ids[part.scored : part.end].tolist())

    await at_once([partial(read, index, part) for index, part in enumerate(parts)], len(parts))
    return found


def compare_rows(reference: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> Divergence:
    """Return KL(reference || rows) of rows of logits, float32 `[N, V]` both."""
    kl_nats = np.empty(len(rows), np.float64)
    for place, pair in enumerate(zip(reference, rows, strict=True)):
        log_p, log_q = map(_log_softmax, pair)
        p = np.exp(log_p)
        there = p > 0
        # Rounding may make a divergence of 0 slightly negative.
        kl_nats[place] = max(0.0, float(np.sum(p[there] * (log_p - log_q)[there])))
    return Divergence(kl_nats, reference.argmax(axis=1) == rows.argmax(axis=1))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.sum(np.exp(shifted)))
