"""Models for retrieval in sentence-transformers' format, against transformers.

Vectors follow the model's own files, in chunks, with cached prefixes, preemption and neighbours."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from aioserve import Engine
from aioserve.errors import InvalidRequestError, WeightsError
from aioserve.testing.random_model import write_tokenizer
from aioserve.text.tokenizer import Tokenizer
from tests.parity.test_looks import preempting
from tests.parity.test_requests import ROOMY, TIGHT, prompt_of
from tests.parity.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.asyncio
EOS = 258
ATOL = 1e-5
QUERY = "Instruct: find\nQuery:"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
SCENES: list[dict[str, Any]] = [
    TIGHT,
    ROOMY,
    {**TIGHT, "max_num_batched_tokens": 1, "max_num_seqs": 1},
]


WORDS = ("no", "yes")


def write_model(directory: Path, kind: str, *, tied: bool = True, **config: Any) -> Any:
    """Write a random model of one of transformers' classes, with its files."""
    torch.manual_seed(7)
    settings = transformers.Qwen3Config(**SHAPE | config, tie_word_embeddings=tied)
    model = getattr(transformers, kind)(settings).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = {EOS: f"?{EOS}", 259: "<|im_start|>", 260: "<|im_end|>", 261: "no", 262: "yes"}
    for token_id in names.keys() - {EOS}:
        tokenizer["model"]["vocab"][names[token_id]] = tokenizer["model"]["vocab"].pop(
            f"?{token_id}"
        )
    tokenizer["added_tokens"] = [
        {"id": token_id, "content": name, "special": name not in WORDS, **flags}
        for token_id, name in names.items()
    ]
    part = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": f"?{EOS}", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [part, end],
        "pair": [part, end],
        "special_tokens": {f"?{EOS}": {"id": f"?{EOS}", "ids": [EOS], "tokens": [f"?{EOS}"]}},
    }
    file.write_text(json.dumps(tokenizer))
    return model


def write_modules(directory: Path, pooling: str, *, normalize: bool, **more: Any) -> None:
    kinds = [
        "Transformer",
        "Pooling",
        *(["Normalize"] if normalize else []),
        *more.get("kinds", ()),
    ]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == pooling for name in ("lasttoken", "mean_tokens")}
    modes |= {f"pooling_mode_{pooling}": True}
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps(modes | {"include_prompt": True})
    )
    said = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": more.get("default")}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(said))


def without_head(directory: Path) -> None:
    """Rename tensors as in Qwen3-Embedding, and leave the head out."""
    from safetensors.numpy import load_file, save_file

    file = directory / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, file)


@torch.inference_mode()
def states_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    body = getattr(model, "model", model)
    return body(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double().numpy()


def pooled(states: np.ndarray[Any, Any], pooling: str, *, normalize: bool) -> np.ndarray[Any, Any]:
    vector = states[-1] if pooling == "lasttoken" else states.mean(axis=0)
    return vector / np.linalg.norm(vector) if normalize else vector


TEXTS = ["how to parse", "how to parse JSON with a library", "x", "thr\u00e9ads " * 6]


@pytest.mark.parametrize("settings", SCENES, ids=["tight", "roomy", "one-by-one"])
@pytest.mark.parametrize(
    ("kind", "tied", "pooling", "normalize"),
    [
        ("Qwen3Model", False, "lasttoken", True),
        ("Qwen3ForCausalLM", False, "lasttoken", True),
        ("Qwen3ForCausalLM", True, "mean_tokens", False),
    ],
)
async def test_vectors_are_those_that_the_files_ask_for(
    kind: str, tied: bool, pooling: str, normalize: bool, settings: Any, tmp_path: Path
) -> None:
    model = write_model(tmp_path, kind, tied=tied)
    write_modules(tmp_path, pooling, normalize=normalize)
    if not tied and kind == "Qwen3ForCausalLM":
        without_head(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert all(one[-1] == EOS for one in ids)
    prompts = [*ids, *(prompt_of(seed, 30) for seed in (1, 1, 2))]
    expected = [pooled(states_of(model, one), pooling, normalize=normalize) for one in prompts]
    async with Engine(str(tmp_path), dtype="float32", **settings) as engine:
        assert engine.retrieval.is_from_files
        for _ in range(2):
            async with preempting(engine):
                texts, found, alone = await asyncio.gather(
                    engine.embed(TEXTS), engine.embed(prompts), engine.embed(prompts[1])
                )
            np.testing.assert_allclose(found, expected, atol=ATOL)
            np.testing.assert_allclose(texts, expected[: len(TEXTS)], atol=ATOL)
            apart = 0 if pooling == "lasttoken" else 1e-6  # chunks change the order of a sum
            np.testing.assert_allclose(texts, found[: len(TEXTS)], atol=apart, rtol=0)
            np.testing.assert_allclose(alone, found[1], atol=apart, rtol=0)
        assert engine.stats().tokens_cached_total > 0 or pooling != "lasttoken"
        query = await engine.embed("rain", prompt_name="query")
        wanted = states_of(model, tokenizer.encode(QUERY + "rain"))
        np.testing.assert_allclose(query, pooled(wanted, pooling, normalize=normalize), atol=ATOL)
        if pooling == "lasttoken":
            mean = await engine.embed(ids[0], pooling="mean", normalize=False)
            np.testing.assert_allclose(mean, states_of(model, ids[0]).mean(axis=0), atol=ATOL)


async def test_a_model_without_a_head_says_so_where_it_is_to_write(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3Model", tied=False)
    async with Engine(str(tmp_path), **ROOMY) as engine:
        assert not engine.retrieval.is_from_files
        assert (await engine.embed([5, 6])).shape == (48,)
        with pytest.raises(InvalidRequestError, match="no output layer"):
            await engine.generate([5, 6])
        with pytest.raises(InvalidRequestError, match="no output layer"):
            await engine.score([5, 6], [7])


async def test_a_head_that_is_lost_is_missed_where_a_model_is_to_write(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3ForCausalLM", tied=False)
    without_head(tmp_path)
    with pytest.raises(WeightsError, match=r"lack lm_head\.weight"):
        async with Engine(str(tmp_path), **ROOMY):
            pass


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ("cls_token", {}, r"1_Pooling/config\.json: pooling_mode_cls_token is not .* itself alone"),
        ("max_tokens", {}, r"pooling_mode_max_tokens is not supported; pooling_mode_lasttoken and"),
        ("weightedmean_tokens", {}, "pooling_mode_weightedmean_tokens is not supported"),
        ("lasttoken", {"kinds": ["Dense"]}, r"modules\.json: \[3\]\.type = .*Dense' is not"),
    ],
)
async def test_what_is_not_supported_is_named_and_can_be_overridden(
    pooling: str, more: Any, message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "Qwen3ForCausalLM")
    write_modules(tmp_path, pooling, normalize=True, **more)
    async with Engine(str(tmp_path), **ROOMY) as engine:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await engine.embed("a")
        assert caught.value.argument == "pooling"
        assert (await engine.embed("a", pooling="last")).shape == (48,)
        assert await engine.generate("a")


async def test_prompts_go_before_texts_by_their_names(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3ForCausalLM")
    write_modules(tmp_path, "lasttoken", normalize=True, default="query")
    async with Engine(str(tmp_path), **ROOMY) as engine:
        by_default, named, bare = [
            await engine.embed(text, prompt_name=name)
            for text, name in (("a", None), ("a", "query"), (f"{QUERY}a", ""))
        ]
        np.testing.assert_array_equal(by_default, named)
        np.testing.assert_array_equal(by_default, bare)
        document = await engine.embed("a", prompt_name="document")
        assert not np.allclose(document, named)
        ids = engine.tokenizer.encode("a")
        np.testing.assert_array_equal(await engine.embed(ids), document)
        with pytest.raises(InvalidRequestError, match=r"\(\[.*\]\), got 'passage'"):
            await engine.embed("a", prompt_name="passage")
        with pytest.raises(InvalidRequestError, match="goes with text alone"):
            await engine.embed(ids, prompt_name="query")
