"""Steps as bytes: computing from these gives the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from aioserve import Engine, SamplingParams, Speculation
from aioserve.errors import InvariantError
from aioserve.execution.block import packed, unpacked
from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.step_arrays import PlanReader, StepArrays
from aioserve.ops.batch import BATCH_FIELDS, SAMPLE_FIELDS, HostBatch, SampleRows
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, StepPlan
from tests.execution.test_step_thread_runner import WARM, LogitsByToken, cache, item, starts
from tests.placed import placed_plan

PROMPT = "What does json.dumps do?"
ASKED = (
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=12, seed=3, top_p=0.9, top_k=40, min_p=0.01, logprobs=2),
    SamplingParams(max_tokens=4, seed=4, prompt_logprobs=3, typical_p=0.8),
)
HERE = Path(__file__).resolve()


def travelled(block: StepArrays) -> StepArrays:
    """Pack and unpack a block, and restore what its host keeps of it."""
    sent = packed(replace(block, verified=None))
    return replace(unpacked(bytearray(bytes(sent))), verified=block.verified)


@pytest.mark.asyncio
@pytest.mark.parametrize("speculation", [None, Speculation(drafter="ngram", max_tokens=3)])
async def test_an_engine_gives_the_same_tokens_where_each_step_travels_as_bytes(
    speculation: Speculation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers() -> list[Any]:
        async with Engine("pyhelp", speculation=speculation, num_host_pages=8) as engine:
            asked = [await engine.generate(PROMPT, params) for params in ASKED]
            embedded = await engine.embed(PROMPT, pooling="mean")
            return [
                [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in asked],
                embedded.tolist(),
            ]

    expected, step, count = await answers(), CpuWorker.step, 0

    def by_bytes(self: CpuWorker, block: StepArrays) -> Any:
        nonlocal count
        count += 1
        return step(self, travelled(block))

    monkeypatch.setattr(CpuWorker, "step", by_bytes)
    assert await answers() == expected
    assert count > 10


PLANS = (
    placed_plan(
        step=1,
        started_slots=(*starts(0, 1), *starts(2, params=WARM, seed=7)),
        items=(item(0, 0, [20, 21, 22], 0, 1), item(2, 5, [30], 2)),
    ),
    placed_plan(step=2, items=(), copies=(PageCopy(0, 1, 0, 5, 3),)),
    placed_plan(
        step=3,
        items=tuple([item(slot, 6, [PENDING_TOKEN], slot) for slot in (2, 0, 1)]),
    ),
)


def tokens_of(blocks: list[StepArrays]) -> list[list[int]]:
    """Return the tokens that a worker in another process would compute for steps."""
    pages = cache(8)
    worker = CpuWorker(cast(Any, LogitsByToken()), pages, num_slots=16)
    with torch.inference_mode():
        return [list(worker.step(block).outcome().token_ids) for block in blocks]


def read(plans: tuple[StepPlan, ...]) -> list[StepArrays]:
    reader = PlanReader(4, 16)
    return [reader.read(plan) for plan in plans]


IN_A_PROCESS = """
import json, sys
from aioserve.execution.block import unpacked
from tests.execution.test_block import tokens_of

blocks = [unpacked(bytearray.fromhex(line)) for line in sys.stdin.read().split()]
print(json.dumps(tokens_of(blocks)))
"""


def test_another_process_gives_the_same_tokens_for_the_bytes() -> None:
    blocks = read(PLANS)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        input="\n".join(packed(block).hex() for block in blocks),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=HERE.parents[2],
    )
    assert done.returncode == 0, done.stderr
    tokens = tokens_of(blocks)
    assert json.loads(done.stdout) == tokens
    assert tokens[0][:2] == [23, 23]
    assert [len(ids) for ids in tokens] == [3, 0, 3]


def test_the_arrays_of_bytes_are_views_of_them() -> None:
    (first, *_), data = read(PLANS), packed(read(PLANS)[0])
    there = unpacked(data)
    assert there.step == first.step
    assert there.batch is not None
    assert first.batch is not None
    for field in BATCH_FIELDS:
        expected = getattr(first.batch, field.name)
        np.testing.assert_array_equal(getattr(there.batch, field.name), expected)
    for name, expected in first.samples.arrays().items():
        np.testing.assert_array_equal(there.samples.arrays()[name], expected)
    there.batch.token_ids[0] = 77
    again = unpacked(data).batch
    assert again is not None
    assert again.token_ids[0] == 77


def test_copies_and_counts_of_pooled_tokens_travel_too() -> None:
    first, copying, _ = read(PLANS)
    assert unpacked(packed(copying)).copies.tolist() == [[0, 1, 0, 5, 3]]
    assert unpacked(packed(replace(first, pooled=(3, 5)))).pooled == (3, 5)


def test_each_array_of_a_step_has_a_field() -> None:
    assert {field.name for field in fields(HostBatch)} == {field.name for field in BATCH_FIELDS}
    assert list(SampleRows.none().arrays()) == [field.name for field in SAMPLE_FIELDS]


def test_bytes_that_are_of_no_step_are_refused() -> None:
    data = packed(read(PLANS)[0])
    with pytest.raises(ValueError, match=f"a step of {len(data)} bytes has {len(data) + 8}"):
        unpacked(data + bytes(8))


def test_edits_stay_with_the_worker_that_draws() -> None:
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    plan = placed_plan(
        step=4, started_slots=starts(0, params=params), items=(item(0, 0, [5, 6], 0),)
    )
    with pytest.raises(InvariantError, match="step 4 has rows with edits"):
        packed(read((plan,))[0])
