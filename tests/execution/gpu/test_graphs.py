"""Decodes as graphs: their sizes, the size of each step, and the time of their capture."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.execution.gpu.graphs import DecodeGraphs, default_graph_sizes, is_decode
from aioserve.execution.step_arrays import PlanReader
from aioserve.request import SamplingParams
from aioserve.steps.plan import ScoredTokens, SlotStart, WorkItem
from aioserve.testing import expected_tokens, run_simulated
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.gpu_faults import GpuFaults
from tests.execution.gpu.plans import (
    NUM_SLOTS,
    PAGE_SIZE,
    decode,
    item,
    plan,
    simulated_runner,
    starts,
    step_model,
)

PROMPT = [9, 8, 7]
SCORED = ScoredTokens(offset=0, target_ids=np.array([7], np.int32))


@given(st.integers(1, 5000))
def test_default_sizes_end_with_the_largest_batch_and_pad_little(largest):
    sizes = default_graph_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert len(sizes) < 60
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller <= max(8, smaller / 2)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([decode(1, 4), decode(2, 7)], True),
        ([item(1, 4, [7])], True),
        ([item(1, 4, [7, 8])], False),
        ([decode(1, 4), item(2, 0, [7, 8])], False),
        ([decode(1, 4, rows=())], False),
        ([decode(1, 4, rows=(1, 2))], False),
        ([decode(1, 4, rows=(1, 3)), decode(2, 7, rows=())], False),
        ([msgspec.structs.replace(decode(1, 4, rows=()), scored=SCORED)], False),
    ],
)
def test_a_decode_has_one_token_and_one_row_for_each_sequence(items: list[WorkItem], expected):
    step = PlanReader(PAGE_SIZE, NUM_SLOTS).read(plan(0, *items, started=(1, 2, 3)))
    assert is_decode(step) is expected


def test_a_step_is_padded_to_the_next_size():
    async def main() -> None:
        graphs = DecodeGraphs(FakeGpu(), [6, 2, 3])
        found = {}
        for count in range(1, 8):
            reader = PlanReader(PAGE_SIZE, NUM_SLOTS)
            work = [decode(slot, 4) for slot in range(count)]
            found[count] = graphs.size_for(reader.read(plan(0, *work, started=range(count))))
        assert found == {1: 2, 2: 2, 3: 3, 4: 6, 5: 6, 6: 6, 7: None}
        with pytest.raises(ValueError, match="at least 1, got 0"):
            DecodeGraphs(FakeGpu(), [0, 4])

    run_simulated(main)


def decodes(count: int, step: int) -> list[WorkItem]:
    return [decode(slot, 3 + step) for slot in range(count)]


def prompts(count: int) -> list[WorkItem]:
    return [item(slot, 0, [slot, 1, 2, 3]) for slot in range(count)]


@pytest.mark.parametrize("uncapturable", [frozenset(), frozenset({0}), frozenset({0, 1})])
def test_a_size_is_captured_when_it_is_first_needed(uncapturable, caplog):
    """Steps of 3, padded to 4, then of 2. The first of each size runs eagerly. If the capture
    fails, so do all others."""

    async def main() -> None:
        gpu = FakeGpu(seed=6, faults=GpuFaults(uncapturable=uncapturable))
        runner = simulated_runner(gpu, graph_sizes=(2, 4))
        plans = [plan(0, *prompts(3), started=range(3))]
        plans += [plan(step, *decodes(3, step)) for step in range(1, 5)]
        plans += [plan(step, *decodes(2, step)) for step in range(5, 8)]
        outcomes = [await handle for handle in [runner.launch(each) for each in plans]]
        for slot in range(2):
            tokens = [outcome.token_ids[slot] for outcome in outcomes]
            assert tokens == expected_tokens([slot, 1, 2, 3], 8, seed=slot)
        assert gpu.num_captures == 2
        assert gpu.num_replays == 3 * (0 not in uncapturable) + 2 * (1 not in uncapturable)
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)
    assert caplog.text.count("run without a CUDA graph") == len(uncapturable)


def test_all_sizes_can_be_captured_at_the_start_largest_first():
    async def main() -> None:
        gpu = FakeGpu(seed=7)
        runner = simulated_runner(gpu, graph_sizes=(1, 2, 8))
        told: list[tuple[int, int]] = []
        await runner.capture_graphs(lambda done, total: told.append((done, total)))
        assert told == [(done, 6) for done in range(7)]
        assert gpu.num_captures == 6
        assert [key.size for key in runner._worker._graphs._graphs] == [8, 8, 2, 2, 1, 1]
        plans = [plan(0, *prompts(5), started=range(5))]
        plans += [plan(step, *decodes(5, step)) for step in range(1, 4)]
        outcomes = [await handle for handle in [runner.launch(each) for each in plans]]
        for slot in range(5):
            tokens = [outcome.token_ids[slot] for outcome in outcomes]
            assert tokens == expected_tokens([slot, 1, 2, 3], 4, seed=slot)
        assert gpu.num_replays == 3
        assert gpu.num_captures == 6
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


def test_padding_leaves_pages_and_slots_as_they_were():
    async def main() -> None:
        gpu = FakeGpu(seed=8)
        model = step_model(gpu)
        runner = simulated_runner(gpu, model, graph_sizes=(8,))
        await runner.launch(plan(0, *prompts(3), started=range(3)))
        kv, tokens = model.kv.array.copy(), model.last_tokens.array.copy()
        await runner.capture_graphs(lambda done, total: None)
        assert (model.kv.array[:-PAGE_SIZE] == kv[:-PAGE_SIZE]).all()
        assert (model.last_tokens.array[:-1] == tokens[:-1]).all()
        await runner.launch(plan(1, decode(1, 4)))
        changed = (model.kv.array[:-PAGE_SIZE] != kv[:-PAGE_SIZE]).nonzero()[0]
        assert changed.tolist() == [(4 + 1) * PAGE_SIZE]
        assert (model.last_tokens.array[:-1] != tokens[:-1]).nonzero()[0].tolist() == [1]
        await runner.aclose()

    run_simulated(main)


def test_a_graph_is_of_one_variant():
    """A step with a temperature runs other kernels than one without."""

    async def main() -> None:
        gpu = FakeGpu(seed=9)
        runner = simulated_runner(gpu, graph_sizes=(4,))
        warm = SlotStart(slot=5, params=SamplingParams(temperature=1.0), seed=5)
        first = msgspec.structs.replace(
            plan(0, *prompts(3), item(5, 0, PROMPT), started=range(3)),
            started_slots=(*starts(0, 1, 2), warm),
        )
        await runner.launch(first)
        for step in range(1, 9):
            work = decodes(2, step) if step % 2 else [*decodes(2, step), decode(5, 2 + step // 2)]
            await runner.launch(plan(step, *work))
        assert gpu.num_captures == 2
        assert gpu.num_replays == 6
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)
