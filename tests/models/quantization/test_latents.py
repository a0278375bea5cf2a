"""Latent attention in every format that stores linear layers.

The expansion of latents is dequantised for its products per head. All else stays quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioserve.formats.weights import NATIVE
from aioserve.models.architecture import LatentAttention, parts_of
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.models.reading import WeightReading
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.checking import check_computes, check_stands_for
from tests.models.quantization.dequantized import write_dequantized
from tests.models.quantization.test_experts import FORMATS
from tests.models.quantization.writers import CONFIG, write_quantized

LATENT: dict[str, Any] = {
    **CONFIG,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": CONFIG["num_attention_heads"],
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 2,
}
"""Mixture in which each token has all experts, so that rounded scores change no choice."""


@pytest.mark.parametrize("name", FORMATS)
def test_latents_of_a_checkpoint_stand_for_its_floats(tmp_path: Path, name: str) -> None:
    said, store = FORMATS[name]
    check_stands_for(*write_quantized(tmp_path, said, store, config=LATENT))


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_latents_are_quantised_while_they_are_loaded(tmp_path: Path, method: str) -> None:
    model = write_random_model(tmp_path / "model", LATENT, dtype="bfloat16")
    floats = write_dequantized(model, tmp_path / "floats", method)
    check_computes(model, floats, method)


def test_what_expands_latents_is_never_rounded(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", LATENT, dtype="bfloat16")
    with WeightReading(model_files(model), formats=NATIVE, quantization="int8") as reading:
        for one in parts_of(reading.read().config.layers, LatentAttention):
            assert reading._stored[one.expansion].format.name == "bfloat16"
            (weight,) = one.output.weights
            assert reading._stored[weight].format.name != "bfloat16"


def test_weights_take_the_memory_that_was_expected(tmp_path: Path) -> None:
    said, store = FORMATS["fp8"]
    model, _ = write_quantized(tmp_path, said, store, config=LATENT)
    with WeightReading(model_files(model), formats=NATIVE) as reading:
        expected = reading.expected_memory
    assert load_model(model).weight_memory == expected
