"""Models by name have the shapes, and so the parameter counts, that their makers publish."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aioserve import assets
from aioserve.capacity.models import PRESETS, ModelShape, read_model
from aioserve.capacity.sizes import count_parameters
from aioserve.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from aioserve.models.config import DecoderConfig

PUBLISHED_BILLIONS = {
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671,
    "gpt-2": 0.124,
    "llama-3-1b": 1.24,
    "llama-3-3b": 3.21,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3-405b": 405.9,
    "mistral-7b": 7.25,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
}
"""Parameters in billions, as the model cards on the Hugging Face hub say."""

PUBLISHED_WITHOUT_EMBEDDINGS = {"qwen3-0.6b": 0.44, "qwen3-8b": 6.95, "qwen3-32b": 31.2}
"""Parameters without embeddings in billions, as the Qwen3 model cards say."""

GQA = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def stored_numbers(checkpoint: Path) -> int:
    """Numbers in a safetensors file, read from its header."""
    with checkpoint.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_a_presets_parameters_are_as_many_as_its_makers_say(name: str) -> None:
    total = count_parameters(read_model(name)).total
    assert total / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_WITHOUT_EMBEDDINGS)
def test_so_are_those_without_embeddings(name: str) -> None:
    count = count_parameters(read_model(name))
    billions = (count.matrices + count.vectors) / 1e9
    assert billions == pytest.approx(PUBLISHED_WITHOUT_EMBEDDINGS[name], rel=0.005)


def test_no_preset_goes_unchecked() -> None:
    assert set(PRESETS) == {*PUBLISHED_BILLIONS, *PUBLISHED_WITHOUT_EMBEDDINGS}


def test_the_count_is_what_a_checkpoint_holds() -> None:
    directory = assets.model_path("pyhelp")
    assert directory is not None
    total = count_parameters(read_model("pyhelp")).total
    assert total == stored_numbers(directory / "model.safetensors")


def test_every_part_is_counted_once() -> None:
    count = count_parameters(DecoderConfig.from_dict(GQA))
    assert count.embeddings == 500 * 96
    assert count.matrices == 3 * (96 * (96 + 2 * 32) + 96 * 96 + 3 * 96 * 160)
    assert count.vectors == 3 * (2 * 96 + 96 + 2 * 32) + 96  # norms, biases, the last norm
    assert count.total == count.embeddings + count.matrices + count.vectors


def test_an_untied_output_head_counts_too() -> None:
    tied = count_parameters(DecoderConfig.from_dict(GQA))
    untied = count_parameters(DecoderConfig.from_dict(GQA | {"tie_word_embeddings": False}))
    assert untied.total - tied.total == 500 * 96


def test_learned_positions_count_too() -> None:
    config = DecoderConfig.from_dict(
        {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "vocab_size": 50_257,
        }
    )
    assert count_parameters(config).total == 124_439_808  # of openai-community/gpt2


def test_a_model_is_read_from_its_config_or_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GQA))
    assert read_model(str(file)) == read_model(str(tmp_path)) == DecoderConfig.from_dict(GQA)
    elsewhere = tmp_path / "of-qwen.json"
    file.rename(elsewhere)
    assert read_model(str(elsewhere)).num_layers == 3


def test_a_name_that_is_nothing_is_told_the_presets() -> None:
    with pytest.raises(ModelNotFoundError, match=r"llama-9-8b.*presets are .*llama-3-8b"):
        read_model("llama-9-8b")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GQA | {"architectures": ["UnheardOfForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="UnheardOfForCausalLM"):
        read_model(str(file))


def test_a_config_that_is_no_config_is_refused_by_file_and_field(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GQA | {"num_hidden_layers": -3}))
    with pytest.raises(ModelError, match=r"config\.json: num_hidden_layers .*-3"):
        read_model(str(file))
    file.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        read_model(str(file))


def test_a_known_models_shape_is_that_of_its_weights() -> None:
    shape = ModelShape.of(read_model("llama-3-8b"))
    assert shape.layer_params + 2 * shape.head_params == 8_030_261_248
    assert shape.kv_bytes_per_token == 131_072
