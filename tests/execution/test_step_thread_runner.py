"""The runner: copies, then one forward pass, then a token for each item that samples."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from aioserve.errors import InvariantError
from aioserve.execution import prefault
from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.host import Host
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.ops import Backend, Batch, Drawn, KVCache, LogitEdits, SampleRows
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, SampleRow, SlotStart, StepPlan, WorkItem
from tests.ops.contents import contents, fill
from tests.ops.scenarios import BACKENDS, NATIVE, allocate
from tests.placed import placed_item, placed_plan
from tests.waits import until

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0)
VOCAB_SIZE = 50
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
PAGES = np.arange(4, dtype=np.int32)


class LogitsByToken:
    """A model whose logits depend only on the last token: token t makes t + 1 the most likely.

    Remembers the batches, and the contents of the KV cache at each.
    """

    def __init__(self, backend: Backend = NATIVE) -> None:
        self.backend = backend
        self.batches: list[Batch] = []
        self.storages: list[torch.Tensor] = []
        self.inference: list[bool] = []

    def make_room(self, num_tokens: int) -> None:
        pass

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        self.inference.append(torch.is_inference_mode_enabled())
        self.batches.append(batch)
        self.storages.append(contents(kv))
        token_ids = batch.token_ids[batch.logit_rows]
        logits = torch.zeros(len(token_ids), VOCAB_SIZE)
        logits[torch.arange(len(token_ids)), (token_ids + 1) % VOCAB_SIZE] = 3.0
        logits[token_ids == VOCAB_SIZE - 1] = float("nan")
        return logits

    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        edits: LogitEdits | None,
    ) -> Drawn:
        logits = self.forward(batch, kv)
        if edits is not None:
            edits.apply(logits)
        return self.backend.draw(logits, rows, last_tokens)


def cache(num_pages: int, start: int = 0, backend: Backend = NATIVE) -> KVCache:
    allocated = allocate(backend, 2, num_pages, 4, 1, 2, torch.float32)
    plain = contents(allocated)
    fill(allocated, torch.arange(start, start + plain.numel()).view_as(plain))
    return allocated


def runner_of(model: LogitsByToken, device: KVCache, **options: Any) -> StepThreadRunner:
    worker = CpuWorker(cast(Any, model), device, num_slots=16, **options)
    return StepThreadRunner(Host(device.page_size, 16, 1), worker, name="test")


async def run(
    *plans: StepPlan, model: LogitsByToken | None = None, **caches: KVCache
) -> list[StepOutcome]:
    model = model or LogitsByToken()
    device = caches.get("device") or cache(8, backend=model.backend)
    runner = runner_of(model, device, host_cache=caches.get("host"))
    try:
        handles = [runner.launch(plan) for plan in plans]
        return [await handle for handle in handles]
    finally:
        await runner.aclose()


def item(slot: int, start: int, ids: list[int], *samples: int) -> WorkItem:
    """Make an item that samples from its last token for each of these slots."""
    return placed_item(
        sequence_id=slot,
        slot=slot,
        start=start,
        count=len(ids),
        token_ids=np.array(ids, np.int32),
        page_ids=PAGES,
        rows=tuple(SampleRow(offset=len(ids) - 1, slot=sample) for sample in samples),
    )


def starts(*slots: int, params: SamplingParams = GREEDY, seed: int = 0) -> tuple[SlotStart, ...]:
    return tuple(SlotStart(slot=slot, params=params, seed=seed) for slot in slots)


@on_every_backend
@pytest.mark.asyncio
async def test_samples_of_one_row_go_on_in_their_own_slots(backend):
    items = (
        item(0, 3, [20], 0, 1),
        item(2, 5, [30], 2, 5),
        item(3, 0, [6, 7, 8]),
        item(4, 0, [40, 41], 4, 6),
    )
    then = tuple(item(slot, 6, [PENDING_TOKEN], slot) for slot in (5, 1, 6, 4, 0, 2))

    first, second = await run(
        placed_plan(step=1, started_slots=starts(*range(7)), items=items),
        placed_plan(step=2, items=then),
        model=LogitsByToken(backend),
    )

    assert first.token_ids == (21, 21, 31, 31, 42, 42)
    assert second.token_ids == (32, 22, 43, 43, 22, 32)


@pytest.mark.asyncio
async def test_samples_of_one_row_are_computed_once():
    model = LogitsByToken()
    items = (item(0, 3, [20], 0, 1, 2), item(3, 7, [5], 3))
    await run(placed_plan(step=1, started_slots=starts(0, 1, 2, 3), items=items), model=model)
    (batch,) = model.batches
    assert batch.positions.tolist() == [3, 7]
    assert batch.token_ids.tolist() == [20, 5]
    assert batch.logit_rows.tolist() == [0, 0, 0, 1]


@pytest.mark.asyncio
async def test_torch_keeps_nothing_for_gradients():
    model = LogitsByToken()
    plans = [placed_plan(step=1, started_slots=starts(0), items=(item(0, 3, [20], 0),))]
    await run(*plans, placed_plan(step=2, items=(item(0, 4, [PENDING_TOKEN], 0),)), model=model)
    assert model.inference == [True, True]


@pytest.mark.asyncio
async def test_a_plan_that_cannot_be_read_fails_its_step_alone():
    """Slots that it starts have started all the same, as the scheduler assumes."""
    bad = placed_plan(step=2, started_slots=starts(1), items=(item(5, 3, [20], 5),))
    good = placed_plan(step=3, items=(item(0, 4, [PENDING_TOKEN], 0), item(1, 3, [30], 1)))
    first = placed_plan(step=1, started_slots=starts(0), items=(item(0, 3, [20], 0),))
    runner = runner_of(LogitsByToken(), cache(8))
    handles = [runner.launch(plan) for plan in (first, bad, good)]
    assert (await handles[0]).token_ids == (21,)
    with pytest.raises(InvariantError, match=r"slots \[5\] sample"):
        await handles[1]
    assert (await handles[2]).token_ids == (22, 31)
    await runner.aclose()


@pytest.mark.asyncio
async def test_memory_is_provided_past_the_pages_that_steps_have_written(monkeypatch):
    asked: set[tuple[int, ...]] = set()
    device = cache(8)
    monkeypatch.setattr(type(device), "prefault", lambda self, *piece: asked.add(piece))
    monkeypatch.setattr(prefault, "PIECE_BYTES", 1)  # a page at a time
    runner = runner_of(LogitsByToken(), device, prefault_pages=2)

    async def is_asked_for(*pages: int) -> None:
        expected = {(page, page + 1) for page in pages}
        await until(lambda: asked >= expected)
        await asyncio.sleep(0.05)  # and no more
        assert asked == expected
        asked.clear()

    await is_asked_for(0, 1)
    pages = np.array([3], np.int32)
    writes = placed_item(
        sequence_id=0,
        slot=0,
        start=0,
        count=2,
        token_ids=np.array([6, 7], np.int32),
        page_ids=pages,
    )
    await runner.launch(placed_plan(step=1, started_slots=starts(0), items=(writes,)))
    await is_asked_for(4, 5)
    await runner.launch(placed_plan(step=2, items=(item(0, 3, [20], 0),)))
    await is_asked_for()
    await runner.aclose()


@pytest.mark.asyncio
async def test_any_offset_of_an_item_may_be_sampled():
    rows = tuple(SampleRow(offset=offset, slot=offset) for offset in (0, 2))
    chunk = msgspec.structs.replace(item(0, 0, [6, 30, 8]), rows=rows)
    plan = placed_plan(step=1, started_slots=starts(0, 2), items=(chunk,))
    (outcome,) = await run(plan)
    assert outcome.token_ids == (7, 9)


@pytest.mark.asyncio
async def test_each_sample_draws_what_a_request_of_its_seed_draws_alone():
    """Logits are equal and seeds `s + i`: sample i equals that of a single request with its
    seed."""
    first_seed = 2**64 - 4
    slots = range(8)
    started = [starts(i, params=WARM, seed=(first_seed + i) % 2**64) for i in slots]
    both = tuple(start for each in started for start in each)
    fork = placed_plan(step=1, started_slots=both, items=(item(0, 3, [20], *slots),))
    alone = [placed_plan(step=2 + i, items=(item(i, 3, [20], i),)) for i in slots]

    together, *separate = await run(fork, *alone)

    assert together.token_ids == tuple(outcome.token_ids[0] for outcome in separate)
    assert len(set(together.token_ids)) > 3


@pytest.mark.asyncio
async def test_a_sample_obeys_its_own_parameters():
    started = (*starts(0, 2, seed=5), *starts(1, params=WARM, seed=5))
    plan = placed_plan(step=1, started_slots=started, items=(item(0, 3, [20], 0, 1, 2),))
    draws = [(await run(plan))[0] for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0].token_ids[0] == draws[0].token_ids[2] == 21
    assert draws[0].token_ids[1] != 21


@pytest.mark.asyncio
async def test_a_row_that_cannot_be_sampled_fails_its_samples_and_nobody_else():
    items = (
        item(4, 0, [6, 7]),
        item(2, 3, [9], 2),
        item(0, 3, [VOCAB_SIZE - 1], 0, 1),
        item(3, 3, [10], 3),
    )
    (outcome,) = await run(placed_plan(step=1, started_slots=starts(0, 1, 2, 3), items=items))
    assert sorted(outcome.row_errors) == [1, 2]
    assert (outcome.token_ids[0], outcome.token_ids[3]) == (10, 11)


@on_every_backend
@pytest.mark.asyncio
async def test_copies_are_done_in_order_before_the_forward_pass(backend):
    """A page goes to the host, another takes its place, and it returns to the other's old place."""
    device, host = cache(8, backend=backend), cache(3, 10_000, backend)
    model = LogitsByToken(backend)
    before, on_host = contents(device), contents(host)
    copies = (
        PageCopy(0, 1, 1, 2, 4),
        PageCopy(0, 6, 0, 1, 4),
        PageCopy(1, 2, 0, 6, 4),
        PageCopy(1, 0, 0, 7, 3),
    )
    plan = placed_plan(step=1, items=(item(0, 0, [1]),), copies=copies)

    await run(plan, model=model, device=device, host=host)

    (seen,) = model.storages
    assert torch.equal(seen[:, :, [1, 6]], before[:, :, [6, 1]])
    assert torch.equal(seen[:, :, 7, :, :3], on_host[:, :, 0, :, :3])
    assert torch.equal(seen[:, :, 7, :, 3], before[:, :, 7, :, 3])
    assert torch.equal(seen[:, :, :1], before[:, :, :1])
    assert torch.equal(seen[:, :, 2:6], before[:, :, 2:6])
    assert torch.equal(contents(host)[:, :, 2], before[:, :, 1])
    assert torch.equal(contents(host)[:, :, :2], on_host[:, :, :2])


@pytest.mark.asyncio
async def test_a_step_may_do_nothing_but_copies():
    device, model = cache(8), LogitsByToken()
    plan = placed_plan(step=1, items=(), copies=(PageCopy(0, 3, 0, 4, 4),))
    (outcome,) = await run(plan, model=model, device=device)
    assert outcome == StepOutcome(step=1, token_ids=())
    assert torch.equal(contents(device)[:, :, 4], contents(device)[:, :, 3])
    assert model.batches == []


@pytest.mark.asyncio
async def test_a_copy_to_a_host_pool_that_is_not_there_fails_its_step_alone():
    bad = placed_plan(step=1, items=(item(0, 0, [1]),), copies=(PageCopy(0, 0, 1, 0, 4),))
    with pytest.raises(ValueError, match="target cache 1 of 1"):
        await run(bad)
