"""Fields of published model files that switch nothing on are accepted.

Other values of the same fields are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve.errors import ModelError
from aioserve.models.architecture import Experts, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.gguf.config import generation_of, read_config
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.gguf.tokenizer import GGUFVocabulary
from aioserve.models.rope import RopeConfig
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.gguf.vocabularies import byte_level
from tests.parity.tiny_models import CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "dense"}

LET_THROUGH: list[tuple[str, dict[str, Any]]] = [
    # -- rotary positions
    ("llama", {"rope_scaling": {}}),
    ("llama", {"rope_scaling": {"rope_type": "default", "attn_factor": 1.0}}),
    ("llama", {"rope_scaling": {"type": None, "factor": None, "finetuned": False}}),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": []}}),
    ("llama", {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 0}}),
    # -- windows, heads, caps
    ("llama", {"head_dim": 0}),
    ("llama", {"sliding_window": 0, "layer_types": []}),
    ("mistral-full", {"sliding_window": 0}),
    ("mistral-full", {"sliding_window": 0, "layer_types": ["full_attention"] * 3}),
    ("gemma3", {"attn_logit_softcapping": 0, "final_logit_softcapping": 0.0}),
    ("olmoe", {"clip_qkv": 0.0}),
    ("qwen2", {"use_mrope": None, "use_sliding_window": None, "mlp_only_layers": []}),
    # -- tokens, dtypes
    ("llama", {"pad_token_id": -1}),
    ("llama", {"pad_token_id": 10**6}),
    ("llama", {"torch_dtype": "auto"}),
    # -- quantisation
    ("llama", {"quantization_config": None}),
    ("llama", {"quantization_config": {}}),
    ("llama", {"quantization_config": {"quant_method": None, "bits": 0}}),
    ("llama", {"quantization_config": COMPRESSED | {"config_groups": {}}}),
    ("llama", {"quantization_config": COMPRESSED | {"config_groups": None}}),
    ("llama", {"quantization_config": COMPRESSED | {"config_groups": {}, "kv_cache_scheme": {
        "num_bits": 8, "type": "float"}}}),
    ("llama", {"quantization_config": COMPRESSED | {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": None}},
        "transform_config": {"config_groups": {}},
        "sparsity_config": {"format": "dense", "targets": []}}}),
    ("llama", {"quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False,
        "bnb_4bit_quant_type": "fp4"}}),
    ("llama", {"quantization_config": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}}),
]  # fmt: skip
"""Pairs of a model of `CONFIGS`, and further fields of its config.json."""

SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_scaling": {**YARN, "finetuned": True}}, {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": {**YARN, "extrapolation_factor": 1}}, {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": {**YARN, "mscale": 0, "attention_factor": None}},
     {"rope_scaling": YARN}),
    ("gemma2", {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0},
     {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("deepseek2-moe", {"n_shared_experts": 0}, {"n_shared_experts": None}),
    ("llama", {"eos_token_id": -1, "bos_token_id": -1},
     {"eos_token_id": None, "bos_token_id": None}),
    ("llama", {"eos_token_id": [2, -1]}, {"eos_token_id": 2}),
]  # fmt: skip
"""Models of `CONFIGS`, each with two sets of fields that mean the same."""

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": {"rope_type": "default", "attn_factor": 0.9}}, "attn_factor = 0.9"),
    ("llama", {"rope_scaling": {**YARN, "extrapolation_factor": 0.5}}, "extrapolation_factor"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("gemma3", {"attn_logit_softcapping": 1}, "attn_logit_softcapping = 1"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("llama", {"eos_token_id": -2}, "eos_token_id must be"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
    ("llama", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
     "quantization_config.quant_method = 'modelopt'"),
    ("llama", {"quantization_config": {"quant_method": "modelopt"}}, "= 'modelopt'"),
    ("llama", {"quantization_config": COMPRESSED | {
        "config_groups": {"group_0": {"weights": None, "input_activations": {"num_bits": 8}}}}},
     "config_groups.group_0.weights must be"),
    ("llama", {"quantization_config": COMPRESSED | {
        "config_groups": {}, "sparsity_config": {"format": "sparse-bitmask"}}}, "sparsity_config"),
    ("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128by128"}},
     "weight_block_size must be"),
]  # fmt: skip


def parse(name: str, changes: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_dict({**CONFIGS[name], **changes})


def rope_of(config: DecoderConfig) -> RopeConfig:
    rope = config.layers[0].mixer.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize(("name", "changes"), LET_THROUGH)
def test_what_asks_for_nothing_changes_nothing(name: str, changes: dict[str, Any]) -> None:
    assert parse(name, changes) == parse(name, {})


@pytest.mark.parametrize(("name", "one", "other"), SAME)
def test_two_ways_to_say_the_same_are_the_same(
    name: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert parse(name, one) == parse(name, other)


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED)
def test_what_asks_for_something_is_refused_by_name(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        parse(name, changes)
    assert says in str(caught.value)


def test_read_as_llama_zeros_are_nothing_and_factors_of_zero_are_not() -> None:
    config = {**CONFIGS["llama"], "architectures": ["OtherForCausalLM"], "model_type": "other"}

    def read(**changes: Any) -> DecoderConfig:
        return DecoderConfig.from_dict({**config, **changes}, read_as="llama")

    plain = read()
    assert plain == read(
        **dict.fromkeys(("clip_qkv", "attn_logit_softcapping", "scale_depth", "sliding_window"), 0)
    )
    assert plain == read(no_rope_layers=[], use_qk_norm=0, position_embedding_type="")
    for changes in ({"scale_emb": 0}, {"clip_qkv": 1}, {"sliding_window": 5}, {"alibi": True}):
        with pytest.raises(ModelError, match=next(iter(changes))):
            read(**changes)


def test_no_shared_experts_are_none() -> None:
    layers = parse("deepseek2-moe", {"n_shared_experts": 0}).layers
    experts = list(parts_of(layers, Experts))
    assert experts
    assert all(one.shared is None for one in experts)


def test_what_multiplies_a_yarn_rope_is_applied() -> None:
    """DeepSeek-R1-0528-Qwen3-8B cancels YaRN's own scale with it, in vLLM and llama.cpp."""
    own = rope_of(parse("qwen3", {"rope_scaling": YARN})).attention_factor
    scaled = {"rope_scaling": {**YARN, "attn_factor": 0.8782488562869419}}
    assert rope_of(parse("qwen3", scaled)).attention_factor == pytest.approx(1.0, abs=1e-6)
    named = {"rope_scaling": {**YARN, "attn_factor": 0.5, "attention_factor": 3.0}}
    assert (own, rope_of(parse("qwen3", named)).attention_factor) == (pytest.approx(1.13863), 3.0)


@pytest.mark.parametrize("size", ["128x64", "128 x 64", [128, 64], [128.0, 64.0]])
def test_sizes_of_blocks_are_read_as_texts_too(size: Any) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}}
    compressed = parse("llama", {"quantization_config": COMPRESSED | {"config_groups": groups}})
    said = {"quant_method": "fp8", "weight_block_size": size}
    plain: Any = parse("llama", {"quantization_config": said}).quantization
    scheme: Any = compressed.quantization
    assert (plain.block, scheme.groups[0][1].block) == ((128, 64), (128, 64))


def test_one_scale_of_each_output_is_what_a_group_size_of_minus_one_says() -> None:
    weights = {"num_bits": 8, "type": "int", "group_size": -1}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}}
    said = COMPRESSED | {"config_groups": groups}
    scheme: Any = parse("llama", {"quantization_config": said}).quantization
    assert scheme.groups[0][1].group_size == 0


def test_sampling_that_asks_for_nothing_is_the_default() -> None:
    said = {"do_sample": True, "top_k": -1, "min_p": 0.0, "num_beams": 1, "epsilon_cutoff": 0,
            "no_repeat_ngram_size": 0, "temperature": None, "eos_token_id": -1}  # fmt: skip
    plain = DecoderConfig.from_dict(CONFIGS["llama"], generation={"do_sample": True})
    found = DecoderConfig.from_dict(CONFIGS["llama"], generation=said)
    assert found.generation.sampling_params() == plain.generation.sampling_params()
    assert (found.eos_token_ids, found.generation.unsupported) == (plain.eos_token_ids, ())
    assert generation_of({}, "x.gguf") == generation_of({"general.name": "x"}, "x.gguf")


# -- GGUF files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GGUFFile]]:
    found = {}
    for name in ("llama", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gpt-oss", "deepseek2-moe"):
        path: Path = tmp_path_factory.mktemp(name)
        directory = write_random_model(path, CONFIGS[name], dtype="float32")
        found[name] = GGUFFile(convert(directory, path / "x.gguf"))
    yield found
    for file in found.values():
        file.close()


def read(file: GGUFFile, changes: dict[str, Any]) -> dict[str, Any]:
    family = file.metadata["general.architecture"]
    said = {f"{family}.{key}": value for key, value in changes.items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return read_config({**file.metadata, **said}, shapes, lambda _: [], "x.gguf")


ZEROS = {
    "attention.sliding_window": 0, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0,
    "nextn_predict_layers": 0, "pooling_type": 0, "use_parallel_residual": False,
    "rope.dimension_sections": np.zeros(4, np.int32), "attention.key_length_swa": 0,
    "interleave_moe_layer_step": 0, "rope.scaling.finetuned": True, "expert_weights_scale": 0.0,
    "rope.scaling.factor": 0.0, "rope.scale_linear": 0.0, "some_text": "", "some_list": [],
}  # fmt: skip

IN_FILES: list[tuple[str, dict[str, Any]]] = [
    ("llama", ZEROS | {"expert_count": 0, "expert_used_count": 0, "expert_feed_forward_length": 0}),
    ("qwen3", ZEROS),
    ("qwen3", {"attention.sliding_window": 1 << 20, "logit_scale": 1.0, "residual_scale": 1.0}),
    ("qwen3", {"rope.scaling.type": "none", "rope.scaling.attn_factor": 1.0}),
    ("qwen3-moe", ZEROS | {"expert_shared_feed_forward_length": 0, "expert_shared_count": 0,
                           "expert_group_count": 0, "expert_group_used_count": 0}),
    ("qwen3-moe", {"expert_weights_norm": True, "expert_gating_func": 1,
                   "expert_weights_scale": 1.0}),
    ("mixtral", {"expert_weights_norm": True, "expert_gating_func": 1}),
    ("gpt-oss", {"expert_gating_func": 3, "expert_weights_norm": True}),
]  # fmt: skip
"""Pairs of a model of `CONFIGS`, and further keys that its file may have."""

REFUSED_IN_FILES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-moe", {"expert_shared_feed_forward_length": 512}),
    ("qwen3-moe", {"expert_weights_norm": False}),
    ("qwen3-moe", {"expert_gating_func": 2}),
    ("mixtral", {"expert_weights_norm": False}),
    ("gpt-oss", {"expert_gating_func": 1}),
    ("qwen3", {"attention.sliding_window": 4}),
    ("qwen3", {"logit_scale": 0.5}),
    ("qwen3", {"rope.scaling.attn_factor": 0.9}),
    ("llama", {"attention.clamp_kqv": 8.0}),
    ("llama", {"rope.dimension_sections": np.array([0, 1], np.int32)}),
    ("llama", {"use_parallel_residual": True}),
    ("llama", {"attention.causal": False}),
]


@pytest.mark.parametrize(("name", "changes"), IN_FILES)
def test_keys_of_files_that_ask_for_nothing_change_nothing(
    files: dict[str, GGUFFile], name: str, changes: dict[str, Any]
) -> None:
    assert read(files[name], changes) == read(files[name], {})


@pytest.mark.parametrize(("name", "changes"), REFUSED_IN_FILES)
def test_keys_of_files_that_ask_for_something_are_refused_by_name(
    files: dict[str, GGUFFile], name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelError) as caught:
        read(files[name], changes)
    assert next(iter(changes)) in str(caught.value)


def test_zeros_of_latent_mixtures_are_their_defaults(files: dict[str, GGUFFile]) -> None:
    plain = {
        "expert_gating_func": 1,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_scale": 1.0,
        "rope.scaling.attn_factor": 1.0,
    }
    file = files["deepseek2-moe"]
    assert read(file, dict.fromkeys(plain, 0)) == read(file, plain)


def test_zero_soft_caps_of_a_file_are_none(files: dict[str, GGUFFile]) -> None:
    zeros = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    config = read(files["gemma2"], zeros)
    assert [config[name] for name in zeros] == [None, None]


def test_a_file_scales_its_yarn_rope_as_a_config_does(files: dict[str, GGUFFile]) -> None:
    said = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    factor = {"rope.scaling.attn_factor": 0.8782488562869419}
    config = read(files["qwen3"], said | factor)
    assert config["rope_scaling"] == {**YARN, "attn_factor": 0.8782488562869419}
    rope = rope_of(DecoderConfig.from_dict(config))
    assert rope.attention_factor == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("wrong", [-1, 2**32 - 1, 10**6])
def test_ids_that_no_template_reads_may_be_of_no_token(wrong: int) -> None:
    said = {"padding_token_id": wrong, "unknown_token_id": wrong}
    vocabulary = GGUFVocabulary(byte_level("gpt-2", **said), "x.gguf")
    assert vocabulary.special_tokens.keys() == {"bos_token", "eos_token"}
    vocabulary.tokenizer_json()
    template = {"tokenizer.chat_template": "{{ pad_token }}"}
    read = GGUFVocabulary(byte_level("gpt-2", **said) | template, "x.gguf")
    if wrong == 10**6:
        with pytest.raises(ModelError, match="padding_token_id"):
            read.special_tokens  # noqa: B018
    else:
        assert "pad_token" not in read.special_tokens


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id"])
def test_ids_of_minus_one_are_none(key: str) -> None:
    for number in (-1, 2**32 - 1):
        metadata = byte_level("gpt-2", add_bos_token=False) | {f"tokenizer.ggml.{key}": number}
        found = GGUFVocabulary(metadata, "x.gguf")
        assert found.bos_token_id is None or key != "bos_token_id"
        found.tokenizer_json()
