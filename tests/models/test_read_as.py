"""Models of an unsupported architecture with Llama's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import ConfigError, Engine, SamplingParams, UnsupportedModelError
from aioserve.models.files import model_files
from tests.parity.tiny_models import write

OFFER = r'Engine\(architecture="llama"\), or --architecture llama'


def renamed(directory: Path, name: str, architecture: str = "OrcaForCausalLM") -> Path:
    model = write(name, directory / name)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": [architecture], "model_type": "orca"}
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_a_model_with_llamas_tensors_is_refused_with_the_offer_to_read_it_as_llama(tmp_path):
    model = renamed(tmp_path, "llama-biases")
    with pytest.raises(UnsupportedModelError, match=f"OrcaForCausalLM is not supported.*{OFFER}"):
        model_files(model).config()
    assert model_files(model, "llama").config().architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gpt2", "olmo2"])
def test_a_model_with_other_tensors_is_refused_without_it(tmp_path, name):
    model = renamed(tmp_path, name)
    with pytest.raises(UnsupportedModelError, match="is not supported") as caught:
        model_files(model).config()
    assert "architecture=" not in str(caught.value)


def test_a_model_that_is_described_is_not_read_as_another(tmp_path):
    model = write("qwen3", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="and Qwen3ForCausalLM is"):
        model_files(model, "llama").config()
    llama = write("llama", tmp_path / "llama")
    assert model_files(llama, "llama").config() == model_files(llama).config()


def test_a_setting_of_a_described_model_is_refused_without_an_offer(tmp_path):
    model = write("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UnsupportedModelError, match="hidden_act") as caught:
        model_files(model).config()
    assert "architecture=" not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": 16},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
        {"no_rope_layers": [1, 1, 0]},
        {"no_rope_layers": 3},
        {"logits_scaling": 8.0},
        {"scale_depth": 1.4},
        {"attn_logit_softcapping": 50.0},
        {"use_parallel_residual": True},
        {"alibi": True},
        {"position_embedding_type": "alibi"},
    ],
    ids=str,
)
def test_a_model_that_says_more_than_llama_does_is_refused_by_that_name(tmp_path, more):
    model = renamed(tmp_path, "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | more))
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(more))} = "):
        model_files(model, "llama").config()
    with pytest.raises(UnsupportedModelError, match="is not supported") as caught:
        model_files(model).config()
    assert "architecture=" not in str(caught.value)


def test_fields_that_change_nothing_are_none_of_these(tmp_path):
    model = renamed(tmp_path, "llama")
    config = json.loads((model / "config.json").read_text())
    config |= {"sliding_window": 16, "use_sliding_window": False, "residual_multiplier": 1.0}
    config |= {"use_qk_norm": False, "clip_qkv": None, "no_rope_layers": [1, 1, 1]}
    (model / "config.json").write_text(json.dumps(config))
    assert model_files(model, "llama").config().num_layers == 3


def test_another_value_is_refused():
    with pytest.raises(ConfigError, match=r"architecture must be .*'llama'.*'qwen3'"):
        Engine("pyhelp", architecture="qwen3")  # pyright: ignore[reportArgumentType]


@pytest.mark.asyncio
async def test_the_engine_computes_it_as_llama(tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    scenes: list[tuple[Path, dict[str, Any]]] = [
        (write("llama", tmp_path / "llama"), {}),
        (renamed(tmp_path / "other", "llama"), {"architecture": "llama"}),
    ]
    for model, options in scenes:
        async with Engine(str(model), num_pages=32, **options) as engine:
            answers.append((await engine.generate([5, 6, 7], params)).token_ids)
    assert answers[0] == answers[1]
