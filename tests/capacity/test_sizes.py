"""Models that the engine refuses are counted from their config.json, as their makers count them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.models import PRESETS, ModelShape, read_model, read_sizes
from aioserve.capacity.sizes import ModelSizes
from aioserve.errors import ConfigError, ModelError, UnsupportedModelError
from aioserve.models.config import DecoderConfig

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
UNKNOWN = MIXTRAL | {"architectures": ["UnheardOfForCausalLM"]}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
QWEN15_A27 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
REFUSED = {**DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"]}
"""It attends to chosen tokens alone."""


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_values"),
    [
        (MIXTRAL, 46.7, 12.9, 2 * 32 * 8 * 128),
        (QWEN3_30B, 30.5, 3.3, 2 * 48 * 4 * 128),
        (QWEN15_A27, 14.3, 2.7, 2 * 24 * 16 * 128),
        (DEEPSEEK_V3, 671, 37.6, 61 * 576),  # with the embedding, which makers leave out of 37
        (REFUSED, 671, 37.6, 61 * 576),
    ],
    ids=["mixtral", "qwen3-30b-a3b", "qwen1.5-moe", "deepseek-v3", "refused"],
)
def test_a_mixture_has_as_many_parameters_as_its_makers_say(
    tmp_path, config, billions, active, kv_values
):
    sizes = read_sizes(written(tmp_path, config))
    assert sizes.parameters.total / 1e9 == pytest.approx(billions, rel=0.005)
    assert sizes.num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert sizes.kv_values_per_token == kv_values
    assert ("is not supported" in sizes.refused) is (config is REFUSED)
    found = capacity_of("m", sizes)
    assert found.refused == sizes.refused
    assert found.num_active_parameters == sizes.num_active_parameters
    assert found.kv_bytes_per_token == kv_values * 2


@pytest.mark.parametrize("config", [DEEPSEEK_V3, REFUSED])
def test_gpus_share_the_heads_of_latent_attention_and_each_keeps_its_latents(tmp_path, config):
    sizes = read_sizes(written(tmp_path, config))
    one, eight = (capacity_of("m", sizes, num_gpus=count) for count in (1, 8))
    assert eight.kv_bytes_per_token_per_gpu == one.kv_bytes_per_token_per_gpu == 61 * 576 * 2
    assert eight.weight_bytes_per_gpu < one.weight_bytes_per_gpu / 7.9
    assert eight.fewest_gpus == 16  # of 80 GiB
    with pytest.raises(ConfigError, match=r"must divide the model's 128 query heads \(1, 2, 4"):
        capacity_of("m", sizes, num_gpus=3)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_30B, QWEN15_A27])
def test_a_mixture_that_is_served_has_the_sizes_that_its_fields_say(config):
    whole = ModelSizes.of(DecoderConfig.from_dict(config))
    counted = ModelSizes.of_refused(config, "config.json", UnsupportedModelError("no"))
    assert counted.parameters.embeddings == whole.parameters.embeddings
    assert counted.parameters.matrices <= whole.parameters.matrices
    assert whole.parameters.matrices <= counted.parameters.matrices * 1.0001  # of shared gates
    assert whole.num_active_parameters == pytest.approx(counted.num_active_parameters, rel=1e-3)


def test_the_cost_of_a_mixture_has_its_active_weights_and_many_tokens_read_all():
    config = DecoderConfig.from_dict(QWEN3_30B)
    shape, sizes = ModelShape.of(config), ModelSizes.of(config)
    table = QWEN3_30B["vocab_size"] * QWEN3_30B["hidden_size"]
    assert shape.layer_params + 2 * table == sizes.num_active_parameters
    assert shape.weight_bytes(1) == 2 * (shape.layer_params + table)
    assert shape.weight_bytes(10**6) == 2 * (sizes.parameters.total - table)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 3}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "mxfp4"}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
    ],
)
def test_a_quantised_checkpoint_has_the_shape_of_its_model(tmp_path, said, dtype):
    plain = PRESETS["qwen3-4b"]
    sizes = read_sizes(written(tmp_path, plain | {"quantization_config": said}))
    whole = ModelSizes.of(read_model("qwen3-4b"))
    assert sizes.dtype == dtype
    assert sizes.parameters.matrices == whole.parameters.matrices
    assert sizes.parameters.embeddings == whole.parameters.embeddings
    assert sizes.kv_values_per_token == whole.kv_values_per_token
    assert sizes.num_kv_heads == whole.num_kv_heads
    assert "quantization_config" not in sizes.refused


@given(st.sampled_from(sorted(PRESETS.keys() - {"gpt-2"})))  # whose fields have other names
def test_what_is_counted_from_fields_is_what_is_counted_from_tensors(name):
    whole = ModelSizes.of(DecoderConfig.from_dict(PRESETS[name]))
    counted = ModelSizes.of_refused(PRESETS[name], "config.json", UnsupportedModelError("no"))
    assert counted.parameters.matrices == whole.parameters.matrices
    assert counted.parameters.embeddings == whole.parameters.embeddings
    assert counted.parameters.vectors <= whole.parameters.vectors
    for field in ("num_kv_heads", "kv_values_per_token", "max_position_embeddings", "dtype"):
        assert getattr(counted, field) == getattr(whole, field)
    idle = whole.parameters.total - whole.num_active_parameters
    assert counted.parameters.total - counted.num_active_parameters == idle


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"layer_types": ["linear_attention"] * 32},
        {"quantization_config": {"quant_method": "of my own"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 5}},
    ],
)
def test_what_it_cannot_count_is_refused_as_before(tmp_path, change):
    folder = written(tmp_path, MIXTRAL | change)
    with pytest.raises(UnsupportedModelError) as refusal:
        read_model(folder)
    with pytest.raises(UnsupportedModelError) as same:
        read_sizes(folder)
    assert str(same.value) == str(refusal.value)


@pytest.mark.parametrize("value", [None, 0, "many", 2**40, -1, True])
@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_field_that_is_missing_or_absurd_is_named(tmp_path, field, value):
    with pytest.raises(ModelError, match=rf"Its sizes aren't known: .*{field} must be") as failure:
        read_sizes(written(tmp_path, UNKNOWN | {field: value}))
    assert "UnheardOfForCausalLM" in str(failure.value)


def test_a_model_that_sees_is_counted_by_its_text_decoder(tmp_path):
    text = {name: value for name, value in MIXTRAL.items() if name != "architectures"}
    config = {"architectures": ["SomeVLForConditionalGeneration"], "text_config": text}
    assert read_sizes(written(tmp_path, config)).parameters.total / 1e9 == pytest.approx(
        46.7, rel=0.005
    )
