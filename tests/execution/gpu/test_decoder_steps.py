"""A whole engine over the runner for GPUs, a decoder's steps and Triton's kernels, interpreted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve import Completion, ConfigError, Engine, SamplingParams
from aioserve.config import EngineConfig
from aioserve.execution.gpu.graphs import graph_sizes
from aioserve.execution.gpu.memory import MemoryUse, largest_step, room_bytes
from aioserve.steps.plan import MAX_SCORED_TOKENS
from tests.execution.gpu.assembled import on_host
from tests.execution.gpu.host_device import HostCounts
from tests.parity.tiny_models import VOCAB_SIZE, write

PROMPTS = [list(range(3, 11)), list(range(20, 28)), [7, 7, 8, 9, 9]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    write("qwen3", path, dtype="float32")
    return path


ASKING = {"repetition_penalty": 1.5, "logit_bias": {9: 2.0}, "logprobs": 2, "prompt_logprobs": 1}


async def answers(
    engine: Engine, *, drawn: bool, max_tokens: int = 3
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return tokens, and the log-probabilities of the request that asks for them.

    With `drawn`, one request has a temperature, and another one asks for more than a draw.
    """

    async def one(index: int, prompt: list[int]) -> Completion:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.8 if drawn and index == 0 else 0.0,
            seed=5,
            ignore_eos=True,
            **(ASKING if drawn and index == 2 else {}),
        )
        return await engine.generate(prompt, params)

    found = await asyncio.gather(*[one(*entry) for entry in enumerate(PROMPTS)])
    told = [each for one in found for each in [*(one.prompt_logprobs or ()), *(one.logprobs or ())]]
    logprobs = [
        logprob
        for each in told
        if each is not None
        for logprob in [each.logprob, *[top.logprob for top in each.top]]
    ]
    return [one.token_ids for one in found], logprobs


OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 40,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 10,
    "max_model_len": 20,
    "output_reserve_tokens": 0,
}


@pytest.mark.sampled(1)
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [
        {"graph_sizes": (2,)},
        {"graph_sizes": (1, 2), "capture_graphs": False},
        {"graph_sizes": (), "num_pages": 5, "num_host_pages": 8, "preemption": "swap"},
    ],
    ids=["graphs", "lazily", "eager and swapped"],
)
async def test_an_engine_gives_the_tokens_of_the_reference(
    tiny: Path, options: dict[str, Any]
) -> None:
    how = {
        "drawn": options == {"graph_sizes": (2,)},
        "max_tokens": 7 if "num_pages" in options else 3,
    }
    reference = Engine(tiny, backend="reference", dtype="float32", **OPTIONS)
    async with reference:
        expected, logprobs = await answers(reference, **how)
    source = on_host(tiny)
    engine = Engine(source, dtype="float32", **(OPTIONS | options))
    async with engine:
        tokens, found = await answers(engine, **how)
        stats = engine.stats()
    assert tokens == expected
    assert len(logprobs) == (4 * 2 + 3 * 3 if how["drawn"] else 0)
    assert found == pytest.approx(logprobs, abs=1e-4)
    sizes = options["graph_sizes"]
    if options.get("capture_graphs", True):
        total = 2 * len(sizes)
        told = [(done, total) for done in range(total + 1)] if sizes else []
        assert source.captures == told
        # Steps that ask for log-probabilities have a separate graph, without the sampling.
        assert source.device.captured == total + (1 if sizes and how["drawn"] else 0)
    else:
        assert source.device.captured > 0
    assert (source.device.replays > 0) == bool(sizes)
    if "num_host_pages" in options:
        assert stats.preemptions_total > 0


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize("quantization", ["int4", "int8"])
async def test_quantised_layers_run_in_graphs_and_give_the_tokens_of_the_reference(
    tiny: Path, quantization: str
) -> None:
    """The reference computes with the same weights, dequantised."""
    options = {"dtype": "float32", "quantization": quantization, **OPTIONS}
    reference = Engine(tiny, backend="reference", **options)
    async with reference:
        expected, _ = await answers(reference, drawn=False)
    source = on_host(tiny)
    engine = Engine(source, graph_sizes=(1, 2), **options)
    async with engine:
        tokens, _ = await answers(engine, drawn=False)
        held = sum(engine.dump()["model"]["weight_bytes"].values())
    assert tokens == expected
    assert source.device.replays > 0
    async with Engine(on_host(tiny), graph_sizes=(), dtype="float32", **OPTIONS) as plain:
        floats = sum(plain.dump()["model"]["weight_bytes"].values())
    assert held < floats


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize(("pages", "graphs"), [(60, ()), (101, (1,))])
async def test_the_pool_has_what_the_largest_step_leaves(
    tiny: Path, pages: int, graphs: tuple[int, ...]
) -> None:
    """Graphs leave logits, which the measured step doesn't ask for."""
    source = on_host(tiny)
    probe = Engine(source, dtype="float32", graph_sizes=(), **OPTIONS)
    async with probe:
        page_bytes = probe.dump()["model"]["kv_cache_bytes"] // (OPTIONS["num_pages"] + 1)

    taken, step = 5000, 3000
    logits = 4 * max(source.num_slots, OPTIONS["max_num_seqs"]) * VOCAB_SIZE if graphs else 0
    total = 2 * (taken + step + logits + (pages + 1) * page_bytes)  # one for padding
    counts = HostCounts(total, taken, step)
    source = on_host(tiny, counts)
    options = OPTIONS | {"num_pages": None, "max_model_len": None, "memory_utilization": 0.5}
    options |= {"graph_sizes": graphs, **({"capture_graphs": False} if graphs else {})}
    engine = Engine(source, dtype="float32", **options)
    async with engine:
        assert engine.stats().pages_total == pages
    assert counts.resets == 1


def test_room_that_is_not_there_is_an_error_that_says_what_to_lower() -> None:
    use = MemoryUse(total=1000, free=400, held=600, peak=700)
    assert room_bytes(use, 100, 0.9) == 200
    with pytest.raises(ConfigError, match=r"memory_utilization=0.6 .* 600 are taken.* takes 100"):
        room_bytes(use, 100, 0.6)


@pytest.mark.parametrize(
    ("tokens", "sequences", "length"), [(16, 4, 64), (300, 4, 64), (3, 8, 10), (40, 4, 16)]
)
def test_the_largest_step_has_all_tokens_and_rows_that_fit(
    tokens: int, sequences: int, length: int
) -> None:
    step = largest_step(tokens, sequences, length, 4, num_slots=3, num_groups=2, vocab_size=7)
    assert step.batch is not None
    counts = step.batch.query_start[1:] - step.batch.query_start[:-1]
    assert len(counts) == len(step.samples) == min(tokens, sequences)
    assert np.array_equal(np.unique(step.samples.slots), range(min(len(counts), 3)))
    assert step.extras is not None
    wanted = step.extras.logprobs
    assert wanted is not None
    assert (len(wanted.sampled), wanted.width) == (len(counts), 7)
    assert len(wanted.target_ids) == min(counts.sum(), MAX_SCORED_TOKENS)
    unscored = counts.sum() - len(wanted.target_ids)
    assert sum(step.pooled) == unscored
    assert len(step.batch.logit_rows) == len(wanted) + unscored
    assert len(np.unique(step.batch.logit_rows[len(counts) :])) == counts.sum()
    assert all(0 < each <= count for each, count in zip(step.pooled, counts, strict=False))
    assert step.batch.logit_rows.max() < counts.sum()
    assert counts.sum() == min(tokens, sequences * length)
    assert (counts >= 1).all()
    assert (counts <= step.batch.context_lens).all()
    assert step.batch.max_context <= length
    assert (step.batch.positions >= 0).all()
    assert (step.batch.positions < length).all()


def test_graph_sizes_are_those_given_or_a_ladder() -> None:
    assert graph_sizes(EngineConfig(max_num_seqs=20)) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(EngineConfig(graph_sizes=[8, 2])) == (8, 2)
