"""Files config.json and generation_config.json: both spellings, defaults, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.models.config import DecoderConfig, GenerationDefaults
from aioserve.models.families import SUPPORTED_ARCHITECTURES
from aioserve.models.files import model_files
from aioserve.request import SamplingParams
from tests.parity.tiny_models import CONFIGS


def parse(name: str, **changes) -> DecoderConfig:
    return DecoderConfig.from_dict({**CONFIGS[name], **changes}, source="some/config.json")


def thetas(config: DecoderConfig) -> list[float]:
    ropes = [layer.mixer.rope for layer in config.layers]
    return [rope.theta for rope in ropes if rope is not None]


def test_reading_configs_and_resolving_names_imports_no_torch():
    code = (
        "import sys, aioserve.models.config, aioserve.models.resolve;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_architecture_is_refused_with_the_supported_ones():
    with pytest.raises(UnsupportedModelError) as caught:
        parse("llama", architectures=["MambaForCausalLM"])

    assert "some/config.json" in str(caught.value)
    assert "MambaForCausalLM" in str(caught.value)
    for name in SUPPORTED_ARCHITECTURES:
        assert name in str(caught.value)


def test_the_model_type_stands_in_for_absent_architectures():
    assert parse("qwen3", architectures=None).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method = None"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type = 'ntk'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            "rope_parameters.rope_type = 'proportional'",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "default", "mrope_section": [1]}},
            "rope_scaling.mrope_section = [1]",
        ),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters = ",
        ),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types = "),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types = "),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = "),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"activation_function": "silu"}, "activation_function = 'silu'"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
        ("llama", {"dtype": "int8"}, "dtype = 'int8'"),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(name, changes, field):
    with pytest.raises(UnsupportedModelError) as caught:
        parse(name, **changes)

    assert "some/config.json: " in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("llama", {"hidden_size": None}, "hidden_size must be"),
        ("llama", {"hidden_size": "48"},
         "hidden_size must be an integer in [1, 2147483647], got '48'"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads must be a divisor"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be"),
        ("llama", {"rope_theta": -1}, "rope_theta must be a number in [1e-12, 1e+15], got -1"),
        ("llama3", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.low_freq_factor must"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be a list with one"),
        ("phi3-longrope", {"partial_rotary_factor": 1.0}, "rope_scaling.short_factor must be"),
        ("gpt2", {"n_head": 5}, "n_embd must be a multiple of n_head 5"),
        ("qwen2-sliding", {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
         "sliding_window must be"),
    ],
)  # fmt: skip
def test_a_malformed_setting_is_an_error_that_names_file_field_and_value(name, changes, field):
    with pytest.raises(ModelError) as caught:
        parse(name, **changes)

    assert "some/config.json: " in str(caught.value)
    assert field in str(caught.value)


def test_windows_follow_each_familys_rules():
    def windows(name: str, **changes) -> list[int]:
        return [layer.mixer.window for layer in parse(name, **changes).layers]

    assert windows("mistral") == [13, 13, 13]
    assert windows("mistral", sliding_window=None) == [0, 0, 0]
    assert windows("qwen2") == [0, 0, 0]
    assert windows("qwen2-sliding") == [0, 9, 9]
    assert windows("gemma2") == [11, 0, 11]
    assert windows("gemma3") == [11, 11, 0]
    assert thetas(parse("gemma3")) == [500, 500, 20_000]


def test_absent_fields_take_the_defaults_of_their_family():
    bare = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 9,
        "num_attention_heads": 8, "max_position_embeddings": 32,
    }  # fmt: skip

    def read(architecture: str, **changes) -> DecoderConfig:
        return DecoderConfig.from_dict({**bare, "architectures": [architecture], **changes})

    llama, mistral = read("LlamaForCausalLM"), read("MistralForCausalLM")
    gemma2, gemma3 = read("Gemma2ForCausalLM"), read("Gemma3ForCausalLM")
    assert (llama.num_kv_heads, llama.head_dim, thetas(llama)) == (8, 8, [10_000])
    assert (mistral.num_kv_heads, mistral.layers[0].mixer.window) == (8, 4096)
    assert read("Qwen3ForCausalLM").head_dim == 128
    assert read("Phi3ForCausalLM").final_norm.eps == 1e-5
    assert (llama.tie_word_embeddings, gemma2.tie_word_embeddings) == (False, True)
    assert soft_caps(gemma2) == (50.0, 30.0)
    assert soft_caps(gemma3) == (0.0, 0.0)
    seven = read("Gemma3ForCausalLM", num_hidden_layers=7)
    assert thetas(seven) == [10_000] * 5 + [1_000_000, 10_000]
    assert gemma3.layers[0].mixer.scale == 256**-0.5


def test_a_null_soft_cap_means_none():
    config = parse("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)

    assert soft_caps(config) == (0.0, 0.0)


def soft_caps(config: DecoderConfig) -> tuple[float, float]:
    return config.layers[0].mixer.soft_cap, config.final_soft_cap


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_has_one_place(name):
    names = [tensor.name for tensor in parse(name).required]
    assert len(names) == len(set(names)) > 3 * 5


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "eos_token_id": 2}))
    assert model_files(tmp_path).config().eos_token_ids == (2,)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 9]}')
    assert model_files(tmp_path).config().eos_token_ids == (5, 7, 9, 2)

    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')
    assert model_files(tmp_path).config().eos_token_ids == (2,)


def test_sampling_defaults_are_read_and_what_cant_be_applied_is_listed():
    generation = {
        "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
        "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.05, "min_new_tokens": 3,
        "max_new_tokens": 99, "no_repeat_ngram_size": 4, "num_beams": 1, "epsilon_cutoff": 0.0,
        "transformers_version": "4.37.0",
    }  # fmt: skip

    config = DecoderConfig.from_dict(CONFIGS["qwen2"], generation=generation)

    assert config.generation == GenerationDefaults(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.05,
        typical_p=0.9,
        repetition_penalty=1.05,
        min_tokens=3,
        max_tokens=99,
        unsupported=("no_repeat_ngram_size=4",),
    )
    assert config.generation.sampling_params() == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, typical_p=0.9,
        repetition_penalty=1.05, min_tokens=3, max_tokens=99,
    )  # fmt: skip
    assert parse("qwen2").generation == GenerationDefaults()


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_is_no_json_object_is_an_error_naming_it(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(ModelError, match=r"config\.json"):
        model_files(tmp_path).config()


def test_a_directory_without_config_is_an_error_naming_it(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        model_files(tmp_path).config()


@pytest.mark.parametrize(
    ("architecture", "fields", "kind"),
    [
        ("DbrxForCausalLM", {}, "a mixture of experts"),
        ("UnheardOfForCausalLM", {"num_local_experts": 8}, "a mixture of experts"),
        ("BertForMaskedLM", {}, "an encoder; embeddings"),
        ("T5ForConditionalGeneration", {}, "an encoder with a decoder"),
        ("MambaForCausalLM", {}, "a model with a recurrent state"),
        ("FalconH1ForCausalLM", {}, "a model with a recurrent state"),
        ("UnheardOfForCausalLM", {"mamba_d_state": 16}, "a model with a recurrent state"),
        ("Gemma3nForCausalLM", {}, "a model with embeddings in each layer"),
        ("LlavaForConditionalGeneration", {}, "a model that sees or hears"),
        ("UnheardOfForCausalLM", {"vision_config": {"a": 1}}, "a model that sees or hears"),
    ],
)
def test_what_an_architecture_is_that_is_not_served_is_told(architecture, fields, kind):
    with pytest.raises(UnsupportedModelError, match=f"is not supported: it is {kind}"):
        parse("llama", architectures=[architecture], **fields)
    with pytest.raises(UnsupportedModelError, match="is not supported; supported are "):
        parse("llama", architectures=["UnheardOfForCausalLM"], num_local_experts=0)
