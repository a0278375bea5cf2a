"""Rows of logits that an engine returns along a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioserve import Engine, RequestFailedError
from aioserve.cli._evaluation import divergence
from aioserve.cli._evaluation.divergence import RowReader, compare_text
from aioserve.cli._evaluation.scoring import score_text
from aioserve.cli._evaluation.text import EvaluatedText
from aioserve.cli._evaluation.windows import sliding_windows

pytestmark = pytest.mark.asyncio


async def test_rows_along_a_text_are_those_that_its_tokens_are_scored_by(tiny_model: Path) -> None:
    source = np.random.default_rng(2)
    ids = source.integers(0, 320, size=90).astype(np.int32)
    # The end-of-sequence id counts as any other token of the text.
    ids[40] = 0
    text = EvaluatedText((), ids, np.ones(90))
    windows = sliding_windows(90, 32, 16, 0)
    reader = RowReader()
    async with Engine(tiny_model, num_pages=64, plugins=(reader,)) as engine:
        scored = await score_text(engine, text, windows, 3, None)
        found = []
        for one in windows:
            prompt, targets = ids[one.start : one.scored], ids[one.scored : one.end]
            rows = await reader.read(engine, prompt.tolist(), targets.tolist())
            assert rows.shape == (one.num_scored, 320)
            logprobs = torch.from_numpy(rows).double().log_softmax(1).numpy()
            found += logprobs[np.arange(len(targets)), targets].tolist()
    np.testing.assert_allclose(scored.logprobs, found, atol=2e-6)


async def test_parts_of_windows_make_no_difference(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(3).integers(0, 320, size=100).astype(np.int32)
    text = EvaluatedText((7,), ids, np.ones(100))
    windows = sliding_windows(100, 31, 15, 1)
    readers = RowReader(), RowReader()
    options: dict[str, Any] = {"num_pages": 64, "max_num_seqs": 4}
    results, progress = [], []
    async with (
        Engine(tiny_model, plugins=(readers[0],), dtype="bfloat16", **options) as engine,
        Engine(tiny_model, plugins=(readers[1],), **options) as reference,
    ):
        for row_bytes, concurrency in ((1 << 29, 4), (8 * 320 * 2 * 3, 2), (1, 1)):
            monkeypatch.setattr(divergence, "ROW_BYTES", row_bytes)
            progress.clear()
            pair = engine, reference
            results.append(
                await compare_text(
                    pair, readers, text, windows, concurrency, lambda *at: progress.append(at)
                )
            )
            assert progress[-1] == (100, 100)
    for each in results[1:]:
        assert each.kl_nats.tolist() == results[0].kl_nats.tolist()
        assert each.same_top.tolist() == results[0].same_top.tolist()
    assert len(results[0].kl_nats) == 100
    assert 0 < results[0].kl_nats.mean() < 0.1


async def test_logits_that_are_no_numbers_are_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RowReader()
    original = divergence._Reading.process

    def process(self: object, prompt: torch.Tensor, answer: torch.Tensor, row: torch.Tensor):
        row[5] = math.nan
        return original(self, prompt, answer, row)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(divergence._Reading, "process", process)
    async with Engine(tiny_model, num_pages=16, plugins=(reader,)) as engine:
        with pytest.raises(RequestFailedError, match="logits that are not finite"):
            await reader.read(engine, [1, 2], [3, 4])


async def test_a_row_that_is_computed_again_takes_the_place_of_the_first() -> None:
    reading, none = divergence._Reading([7, 8]), torch.empty(0, dtype=torch.int64)
    for value, answer in ((1.0, none), (2.0, none), (3.0, torch.tensor([7]))):
        row = torch.full((10,), value)
        reading.process(none, answer, row)
        assert row.argmax() == (8 if len(answer) else 7)
        assert row.isinf().sum() == 9
    assert {place: row[0] for place, row in reading.rows.items()} == {0: 2.0, 1: 3.0}
