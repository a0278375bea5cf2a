"""Embeddings and relevance against transformers, on the GPU, beside requests that generate.

transformers computes on the CPU in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioserve import Engine, SamplingParams
from tests.execution.gpu.host_device import cuda_is_the_host
from tests.gpu.answers import OPTIONS
from tests.gpu.place import Place
from tests.gpu.test_models import prompt

SPREAD = {"float32": 1e-4, "bfloat16": 0.06}
"""Root mean square of errors, as a share of the hidden states' standard deviation."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("qwen3", "gemma3", "deepseek3", "mixtral", "gpt-oss")),
        ("qwen3", "bfloat16"),
    ],
)
def test_embeddings_are_those_of_transformers_and_change_no_token(
    place: Place, directory_of: Callable[[str], Path], name: str, dtype: str
) -> None:
    """Prompts come in chunks and begin alike, so that a second time finds what is cached."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory_of(name), attn_implementation="eager", dtype=torch.float32
    ).eval()
    shared = prompt(place.size(22, 6), 1)
    lengths = [1, 9, 31, 40][: place.size(4, 2)]
    prompts = [[*shared, *prompt(length, 2 + length)] for length in lengths]
    with torch.inference_mode():
        states = [
            model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].numpy()
            for ids in prompts
        ]
    wanted = {
        "last": np.stack([each[-1] for each in states]),
        "mean": np.stack([each.mean(axis=0) for each in states]),
    }
    written = [prompt(length, 50) for length in (3, 25)]

    async def main() -> None:
        options: dict[str, Any] = OPTIONS | {"max_num_batched_tokens": 37, "dtype": dtype}
        source = place.assembled(directory_of(name))
        async with Engine(source, graph_sizes=(2,), **options) as engine:
            alone = await asyncio.gather(*(engine.generate(ids, GREEDY) for ids in written))
            captured = source.device.captured
            for pooling in ("last", "mean", "last")[: place.size(3, 2)]:
                found, answers = await asyncio.gather(
                    engine.embed(prompts, pooling=pooling, normalize=False),
                    asyncio.gather(*(engine.generate(ids, GREEDY) for ids in written)),
                )
                error = np.sqrt(np.square(found - wanted[pooling]).mean())
                assert error / wanted[pooling].std() < SPREAD[dtype]
                if dtype == "float32":
                    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
            assert source.device.captured == captured
            assert engine.stats().tokens_cached_total > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 1}),
        ("Qwen3ForCausalLM", {"classifier_from_token": ["no", "yes"]}),
    ],
    ids=["classifier", "by-tokens"],
)
def test_relevance_is_that_of_transformers(
    place: Place,
    kind: str,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models are loaded from files, as programs do."""
    pytest.importorskip("transformers")
    from tests.parity.test_reranking import ROLES, relevance
    from tests.parity.test_retrieval import write_model

    if not place.is_card:
        cuda_is_the_host(monkeypatch)
    model = write_model(tmp_path, kind, **config)
    (tmp_path / "chat_template.jinja").write_text(ROLES)
    pairs = [("JSON", document) for document in ("dumps", "threads", "a", "json.loads reads")]
    pairs = pairs[: place.size(4, 2)]

    async def main() -> None:
        options: dict[str, Any] = OPTIONS | {"dtype": "float32", "graph_sizes": ()}
        async with Engine(str(tmp_path), device="cuda", **options) as engine:
            texts = [f"<|im_start|>{query}<|im_start|>{document}" for query, document in pairs]
            ids = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
            found, usage = await engine.relevance(pairs)
        np.testing.assert_allclose(found, [relevance(model, one) for one in ids], atol=1e-4)
        assert usage.prompt_tokens == sum(map(len, ids))

    asyncio.run(main())
