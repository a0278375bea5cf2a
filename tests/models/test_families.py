"""Configs of families: refused settings, defaults of absent fields, and configs of known models."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.models.architecture import MLP, Experts, Linear, parts_of
from aioserve.models.config import DecoderConfig
from tests.parity.tiny_models import CONFIGS


def parse(name: str, **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_dict({**CONFIGS[name], **changes}, source="some/config.json")


SCALES_QUERIES = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters = "),
        ("granite4", {"num_local_experts": 4}, "num_local_experts = 4"),
        ("granite4", {"layer_types": ["mamba"] * 3}, "layer_types = "),
        ("granite4", {"layer_types": [[], {}, "attention"]}, "layer_types = "),
        ("granite4", {"layer_types": None}, "layer_types = None"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
         "layer_types = "),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("neox", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("mistral", {"rope_parameters": SCALES_QUERIES},
         "rope_parameters.llama_4_scaling_beta = 0.1"),
        ("ministral3", {"rope_parameters": {**SCALES_QUERIES, "rope_type": "default"}},
         "rope_parameters.llama_4_scaling_beta = 0.1"),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "rope_scaling.rope_type = "),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_the_computation_is_refused_by_name(name, changes, field):
    with pytest.raises(UnsupportedModelError) as caught:
        parse(name, **changes)
    assert f"some/config.json: {field}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("granite4", {"layer_types": ["attention"]}, "layer_types must be a list with one entry"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list with a 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must be"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be"),
        ("glm4", {"partial_rotary_factor": 0.2}, "partial_rotary_factor must be such that"),
        ("neox", {"rotary_pct": 1.5}, "rotary_pct must be such that"),
        ("neox", {"num_attention_heads": 5}, "hidden_size must be a multiple of"),
        ("cohere2", {"sliding_window": None}, "sliding_window must be"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "rope_scaling.factor must"),
    ],
)
def test_a_malformed_setting_is_an_error_that_names_file_field_and_value(name, changes, field):
    with pytest.raises(ModelError) as caught:
        parse(name, **changes)
    assert f"some/config.json: {field}" in str(caught.value)


def test_absent_fields_take_the_defaults_of_their_family():
    bare = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 9,
        "num_attention_heads": 8, "max_position_embeddings": 32,
    }  # fmt: skip

    def read(architecture: str, **changes: Any) -> DecoderConfig:
        return DecoderConfig.from_dict({**bare, "architectures": [architecture], **changes})

    def ropes(config: DecoderConfig) -> list[float]:
        found = [layer.mixer.rope for layer in config.layers]
        return [0.0 if rope is None else rope.theta for rope in found]

    def windows(config: DecoderConfig) -> list[int]:
        return [layer.mixer.window for layer in config.layers]

    def rotated(config: DecoderConfig) -> tuple[int, bool]:
        rope = config.layers[0].mixer.rope
        assert rope is not None
        return rope.rotary_dim, rope.interleaved

    olmo3 = read("Olmo3ForCausalLM")
    assert (windows(olmo3), ropes(olmo3)) == ([4096, 4096, 4096, 0], [500_000.0] * 4)
    assert olmo3.final_norm.eps == 1e-5
    smollm = read("SmolLM3ForCausalLM")
    assert ropes(smollm) == [2_000_000.0] * 3 + [0.0]
    assert (windows(smollm), smollm.num_kv_heads, smollm.tie_word_embeddings) == ([0] * 4, 4, True)
    cohere = read("Cohere2ForCausalLM")
    assert (windows(cohere), ropes(cohere)) == ([4096, 4096, 4096, 0], [10_000.0] * 3 + [0.0])
    assert (cohere.logit_scale, cohere.tie_word_embeddings, rotated(cohere)) == (
        0.0625, True, (8, True),
    )  # fmt: skip
    glm = read("Glm4ForCausalLM")
    assert (glm.head_dim, glm.num_kv_heads, rotated(glm)) == (128, 2, (64, True))
    assert len(next(parts_of(glm.layers[0].mixer, Linear)).biases) == 3
    stablelm = read("StableLmForCausalLM", num_attention_heads=32, hidden_size=512)
    assert (stablelm.num_kv_heads, rotated(stablelm)) == (32, (4, False))
    nemotron = read("NemotronForCausalLM")
    assert (nemotron.final_norm.weight_offset, rotated(nemotron)) == (1.0, (4, False))
    neox = read("GPTNeoXForCausalLM")
    assert (neox.layers[0].parallel, rotated(neox)) == (True, (2, False))
    assert next(parts_of(neox.layers, MLP)).activation == "gelu"
    granite = read("GraniteForCausalLM")
    assert (granite.layers[0].mixer.scale, granite.logit_scale) == (1.0, 1.0)
    ministral = read("Ministral3ForCausalLM")
    rope = ministral.layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.query_beta, rope.attention_factor) == ("yarn", 0.1, 1.0)
    assert (ministral.head_dim, windows(ministral)) == (128, [0] * 4)
    assert windows(read("MinistralForCausalLM")) == [4096] * 4


def test_configs_of_models_that_are_llama_by_name_are_read():
    """Configs of Yi 1.5, Falcon 3 and DeepSeek Coder are read."""
    yi = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": False,
        "attention_bias": False, "pretraining_tp": 1, "vocab_size": 64000,
    }  # fmt: skip
    falcon = {**yi, "head_dim": 256, "num_attention_heads": 12, "rope_theta": 1000042,
              "hidden_size": 3072, "mlp_bias": False, "activation": "swiglu"}  # fmt: skip
    coder = {**yi, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
    assert DecoderConfig.from_dict(yi).num_kv_heads == 4
    assert DecoderConfig.from_dict(falcon).heads.query_size == 3072
    rope = DecoderConfig.from_dict(coder).layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_phi_4_and_phi_4_mini_are_read():
    phi4 = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120,
        "intermediate_size": 17920, "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "max_position_embeddings": 16384, "rms_norm_eps": 1e-05,
        "original_max_position_embeddings": 16384, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 100352,
        "attention_bias": False,
    }  # fmt: skip
    factors = {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
    mini = {
        **phi4, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": factors, "sliding_window": 262144, "tie_word_embeddings": True,
    }  # fmt: skip
    assert DecoderConfig.from_dict(phi4).num_kv_heads == 10
    rope = DecoderConfig.from_dict(mini).layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.rotary_dim, rope.original_max_positions) == ("longrope", 96, 4096)


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_of_mistrals_image_checkpoints_has_the_defaults_of_its_config_class(kind):
    said = {"architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"model_type": kind, "sliding_window": None}}  # fmt: skip
    config = DecoderConfig.from_dict(said)
    expected = {"mistral": (32_000, 32, 131_072), "ministral3": (131_072, 34, 262_144)}
    sizes = config.vocab_size, config.num_layers, config.max_position_embeddings
    assert sizes == expected[kind]
    assert {layer.mixer.window for layer in config.layers} == {0}  # null: there is none
    assert config.is_text_alone
    with pytest.raises(UnsupportedModelError, match=r"text_config\.model_type = 'pixtral'"):
        DecoderConfig.from_dict({**said, "text_config": {"model_type": "pixtral"}})


def test_null_heads_of_a_nested_text_are_as_many_as_those_of_queries():
    said = {"architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"num_attention_heads": 4, "num_key_value_heads": None}}  # fmt: skip
    assert DecoderConfig.from_dict(said).num_kv_heads == 4


@pytest.mark.parametrize("whole", [True, False])
def test_the_whole_checkpoint_says_whether_its_head_is_tied(whole):
    said = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": whole,
            "text_config": {"tie_word_embeddings": not whole}}  # fmt: skip
    assert DecoderConfig.from_dict(said).tie_word_embeddings is whole


def test_gpt_neox_20b_is_read():
    said = {
        "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu_fast", "hidden_size": 6144,
        "intermediate_size": 24576, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "vocab_size": 50432,
    }  # fmt: skip
    assert next(parts_of(DecoderConfig.from_dict(said).layers, MLP)).activation == "gelu_tanh"


def test_experts_are_counted_by_either_name() -> None:
    """Qwen3-MoE's number of experts has another name in transformers 5."""
    given = CONFIGS["qwen3-moe"]
    renamed = {name: value for name, value in given.items() if name != "num_experts"}
    renamed["num_local_experts"] = given["num_experts"]
    assert DecoderConfig.from_dict(renamed) == DecoderConfig.from_dict(given)
    with pytest.raises(ModelError, match="num_local_experts must be as many as num_experts 16"):
        DecoderConfig.from_dict({**given, "num_local_experts": 8})


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "at most num_local_experts 5, got 6"),
        ("mixtral", {"num_local_experts": 1025}, r"num_local_experts must be .*1024\], got 1025"),
        ("olmoe", {"num_experts": 1024, "num_hidden_layers": 65}, "at most 504 in each of 65"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("qwen2-moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers"),
        ("qwen2-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer"),
        ("qwen2-moe", {"layer_types": ["sliding_attention"] * 3}, "need use_sliding_window"),
        ("qwen3-moe", {"hidden_act": "gelu"}, "the activations are"),
    ],
)
def test_mixtures_that_can_t_be_are_refused_by_name(
    name: str, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_dict({**CONFIGS[name], **changes})


def test_layers_have_experts_where_the_config_says_so() -> None:
    def sparse(**changes: object) -> list[bool]:
        layers = DecoderConfig.from_dict({**CONFIGS["qwen3-moe"], **changes}).layers
        return [isinstance(layer.feed_forward, Experts) for layer in layers]

    assert sparse() == [True] * 3
    assert sparse(decoder_sparse_step=2) == [False, True, False]
    assert sparse(mlp_only_layers=[0, 2]) == [False, True, False]
    assert sparse(decoder_sparse_step=4) == [False] * 3
