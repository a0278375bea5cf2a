"""Directories that transformers writes: its config spelling, several shards, other towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioserve.cli.doctor import facts_of_model
from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

PROMPT = [(7 * i) % VOCAB_SIZE for i in range(40)]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_in_shards_loads_as_the_same_model(
    name, directory_of, oracle, tmp_path
):
    oracle(name).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    ours, theirs = load_model(directory_of(name)), load_model(tmp_path)

    assert theirs.config == model_files(tmp_path).config()
    assert theirs.config == ours.config
    expected = PagedRun(ours).step({"a": PROMPT})["a"]
    assert torch.equal(PagedRun(theirs).step({"a": PROMPT})["a"], expected)


def _gemma3_with_vision() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = {key: value for key, value in CONFIGS["gemma3"].items() if key != "architectures"}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    return model


def test_the_language_model_of_a_gemma_3_image_checkpoint_gives_the_same_logits(tmp_path, backend):
    model = _gemma3_with_vision()
    model.save_pretrained(tmp_path)

    run = PagedRun(load_model(tmp_path, backend=backend))

    logits = run.step({"a": PROMPT})["a"]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.1
    assert (logits - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("name", ["mistral", "mistral-full", "ministral3"])
def test_the_language_model_of_a_mistral_3_image_checkpoint_gives_the_same_logits(
    name, tmp_path, backend
):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    text = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 4,
    }
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    model.save_pretrained(tmp_path)

    run = PagedRun(load_model(tmp_path, backend=backend))

    logits = run.step({"a": PROMPT})["a"]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.1
    assert (logits - expected).abs().max().item() < 1e-4


@pytest.mark.asyncio
async def test_a_gemma_3_image_checkpoint_says_that_its_text_alone_is_served(tmp_path, caplog):
    _gemma3_with_vision().save_pretrained(tmp_path)
    config = EngineConfig(num_pages=8, max_model_len=32)
    loaded = await loading.load(str(tmp_path), config, num_slots=2)
    await loaded.runner.aclose()
    said = "Gemma3ForConditionalGeneration takes images as well; aioserve serves its text alone"
    assert [said in record.message for record in caplog.records].count(True) == 1
    assert facts_of_model(str(tmp_path))["takes"] == "text, not the images that it could"


def test_a_model_of_text_alone_says_nothing_of_images():
    assert facts_of_model("pyhelp")["takes"] == "text"
