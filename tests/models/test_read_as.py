"""Models of an architecture that nobody described, with Llama's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import ConfigError, Engine, SamplingParams, UnsupportedModelError
from aioserve.models.files import model_files
from tests.parity.tiny_models import write

OFFER = r'architecture="llama" \(--architecture llama\)'


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
