"""Sums of hidden states from a device come with the tokens of their step, in one copy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers

from aioserve import Engine, InvalidRequestError, SamplingParams
from aioserve.execution.gpu.worker import CudaWorker, StepOnDevice
from aioserve.steps.plan import PooledTokens, StepPlan, WorkItem
from aioserve.testing import expected_tokens, run_simulated
from aioserve.testing.fake_device import expected_hidden
from tests.doubles.fake_gpu import FakeGpu
from tests.execution.gpu.assembled import on_host
from tests.execution.gpu.host_device import cuda_is_the_host
from tests.execution.gpu.plans import decode, item, plan, simulated_runner
from tests.parity.test_reranking import ROLES, relevance
from tests.parity.test_retrieval import pooled, states_of, write_model, write_modules
from tests.parity.tiny_models import write

ATOL = 1e-5
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 11,
    "max_model_len": 48,
    "output_reserve_tokens": 0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def pooling(work: WorkItem, offset: int, count: int) -> WorkItem:
    return msgspec.structs.replace(work, pooled=PooledTokens(offset=offset, count=count))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("graph_sizes", [(), (2, 4)], ids=["eager", "graphs"])
def test_sums_stay_those_of_their_step_when_others_have_its_memory(seed, graph_sizes):
    """Many steps are launched at once, and read after all have ended."""
    prompts = {slot: prompt(slot, 4 + slot) for slot in range(1, 5)}
    plans: list[StepPlan] = [plan(0, item(0, 0, [5]), started=(0,))]
    wanted: list[list[list[float]]] = [[]]
    for slot, ids in prompts.items():
        states = expected_hidden(ids)
        first = pooling(item(slot, 0, ids[:3], rows=()), 1, 2)
        rest = pooling(item(slot, 3, ids[3:]), 0, len(ids) - 3)
        for work, started, part in ((first, (slot,), states[1:3]), (rest, (), states[3:])):
            step = len(plans)
            plans.append(plan(step, decode(0, step), work, started=started))
            wanted.append([part.sum(axis=0).tolist()])
    both = [pooling(item(slot, 0, prompts[slot]), 0, slot) for slot in (2, 3)]
    plans.append(plan(len(plans), decode(0, len(plans)), *both))
    wanted.append([expected_hidden(prompts[slot])[:slot].sum(axis=0).tolist() for slot in (2, 3)])
    plans += [plan(step, decode(0, step)) for step in range(len(plans), len(plans) + 2)]
    wanted += [[], []]

    async def main() -> None:
        gpu = FakeGpu(seed=seed)
        runner = simulated_runner(gpu, graph_sizes=graph_sizes)
        outcomes = await asyncio.gather(*[runner.launch(each) for each in plans])
        await runner.aclose()
        found = [[part.tolist() for part in outcome.pooled] for outcome in outcomes]
        assert found == wanted
        tokens = [outcome.token_ids[0] for outcome in outcomes]
        assert tokens == expected_tokens([5], len(plans), seed=0)
        for step in (2, 4, 6, 8):
            slot = step // 2
            assert outcomes[step].token_ids[1:] == tuple(
                expected_tokens(prompts[slot], 1, seed=slot)
            )
        assert gpu.num_replays == (2 if graph_sizes else 0)
        assert not gpu.violations

    run_simulated(main, seed=seed)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    write("qwen3", path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return path, model.float().eval()


@pytest.mark.more
@pytest.mark.asyncio
async def test_embeddings_are_those_of_transformers_and_change_no_token(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks, beside generating requests, and twice, so that prefixes are found."""
    path, model = tiny
    shared = prompt(1, 9)
    prompts = [[*shared, *prompt(2, 8)], [*shared, 3], [7]]
    written = [prompt(50, 3), prompt(51, 12)]
    states = [states_of(model, ids) for ids in prompts]
    wanted = {
        "last": np.stack([each[-1] for each in states]),
        "mean": np.stack([each.mean(axis=0) for each in states]),
    }
    source = on_host(path)
    sums: list[int] = []
    told = CudaWorker._ended

    def ended(self: CudaWorker, pending: StepOnDevice) -> None:
        if pending.packed is not None:
            sums.append(pending.packed.result_shape.num_pooled)
        told(self, pending)

    monkeypatch.setattr(CudaWorker, "_ended", ended)
    async with Engine(source, graph_sizes=(2,), **OPTIONS) as engine:
        alone = [(await engine.generate(ids, GREEDY)).token_ids for ids in written]
        captured, replays = source.device.captured, source.device.replays
        assert set(sums) == {0}
        for pooling in ("last", "mean", "last"):
            found, answers = await asyncio.gather(
                engine.embed(prompts, pooling=pooling, normalize=False),
                asyncio.gather(*[engine.generate(ids, GREEDY) for ids in written]),
            )
            np.testing.assert_allclose(found, wanted[pooling], atol=ATOL)
            assert [one.token_ids for one in answers] == alone
        assert engine.stats().tokens_cached_total > 0
    assert max(sums) > 1
    assert source.device.captured == captured
    assert source.device.replays > replays


@pytest.mark.asyncio
async def test_a_model_without_a_head_embeds_texts_as_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_is_the_host(monkeypatch)
    model = write_model(tmp_path, "Qwen3Model", tied=False)
    write_modules(tmp_path, "lasttoken", normalize=True)
    texts = ["how to parse", "x"]
    async with Engine(str(tmp_path), device="cuda", graph_sizes=(), **OPTIONS) as engine:
        assert engine.retrieval.is_from_files
        ids = [engine.tokenizer.encode(text) for text in texts]
        found = await engine.embed(texts)
        with pytest.raises(InvalidRequestError, match="no output layer"):
            await engine.generate([5, 6])
    wanted = [pooled(states_of(model, one), "lasttoken", normalize=True) for one in ids]
    np.testing.assert_allclose(found, wanted, atol=ATOL)


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 1}),
        ("Qwen3ForCausalLM", {"classifier_from_token": ["no", "yes"]}),
    ],
    ids=["classifier", "by-tokens"],
)
async def test_relevance_is_that_of_transformers(
    kind: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_is_the_host(monkeypatch)
    model = write_model(tmp_path, kind, **config)
    (tmp_path / "chat_template.jinja").write_text(ROLES)
    pairs = [("JSON", "dumps"), ("JSON", "threads")]
    async with Engine(str(tmp_path), device="cuda", graph_sizes=(), **OPTIONS) as engine:
        assert engine.tells_relevance
        texts = [f"<|im_start|>{query}<|im_start|>{document}" for query, document in pairs]
        ids = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        found, usage = await engine.relevance(pairs)
    assert usage.prompt_tokens == sum(map(len, ids))
    np.testing.assert_allclose(found, [relevance(model, one) for one in ids], atol=ATOL)
