"""Tiny random models of every architecture, for tests that need a real one.

`write(name, directory)` makes a Hugging Face directory with weights and tokenizer. Shapes are
chosen so that mistakes show: windows are shorter than the contexts of tests, and tests cross the
original context of scaled ropes. Head counts are odd, and soft caps bend the scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aioserve.testing.random_model import write_random_model

VOCAB_SIZE = 288
MAX_POSITIONS = 256
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 8.0,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 6.0],
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**_BASE, "architectures": [architecture], "model_type": model_type, **fields}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("LlamaForCausalLM", "llama", hidden_act="silu", tie_word_embeddings=True),
    "llama-biases": _config(
        "LlamaForCausalLM", "llama", attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama3": _config("LlamaForCausalLM", "llama", rope_scaling=_LLAMA3_ROPE),
    "llama-yarn": _config("LlamaForCausalLM", "llama", head_dim=16, rope_scaling=_YARN),
    "mistral": _config("MistralForCausalLM", "mistral", sliding_window=13),
    "mistral-full": _config("MistralForCausalLM", "mistral", sliding_window=None, head_dim=16),
    "qwen2": _config(
        "Qwen2ForCausalLM", "qwen2", use_sliding_window=False, sliding_window=9, max_window_layers=1
    ),
    "qwen2-sliding": _config(
        "Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen3-sliding": _config(
        "Qwen3ForCausalLM",
        "qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "mixtral": _config("MixtralForCausalLM", "mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral-sliding": _config(
        "MixtralForCausalLM",
        "mixtral",
        num_local_experts=4,
        num_experts_per_tok=1,
        sliding_window=13,
    ),
    "qwen2-moe": _config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        decoder_sparse_step=2,
    ),
    "qwen2-moe-normalized": _config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=36,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=3,
    ),
    "qwen3-moe": _config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "olmoe": _config(
        "OlmoeForCausalLM",
        "olmoe",
        num_experts=8,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
    ),
    "gemma2": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=11,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=11,
        sliding_window_pattern=3,
        rope_theta=20_000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        tie_word_embeddings=True,
    ),
    "phi3": _config("Phi3ForCausalLM", "phi3", sliding_window=17),
    "phi3-longrope": _config(
        "Phi3ForCausalLM",
        "phi3",
        partial_rotary_factor=0.75,
        rope_scaling=_LONGROPE,
        original_max_position_embeddings=64,
    ),
    "deepseek2": _config(
        "DeepseekV2ForCausalLM", "deepseek_v2", **_LATENT, q_lora_rank=None, first_k_dense_replace=3
    ),
    "deepseek3": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_LATENT,
        q_lora_rank=20,
        first_k_dense_replace=3,
        attention_bias=True,
        rope_scaling={**_YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
    ),
    "deepseek2-moe": _config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **_LATENT,
        q_lora_rank=20,
        first_k_dense_replace=1,
        n_routed_experts=12,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
    ),
    "deepseek3-moe": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_LATENT,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=12,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        n_group=4,
        topk_group=2,
        num_nextn_predict_layers=0,
    ),
    "deepseek3-halves": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **{**_LATENT, "kv_lora_rank": 19},
        q_lora_rank=20,
        first_k_dense_replace=3,
        rope_interleave=False,
    ),
    "olmo2": _config("Olmo2ForCausalLM", "olmo2", attention_bias=True, tie_word_embeddings=True),
    "olmo3": _config(
        "Olmo3ForCausalLM",
        "olmo3",
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {**_YARN, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "granite": _config(
        "GraniteForCausalLM",
        "granite",
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=1.7,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "granite4": _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["attention"] * 3,
        shared_intermediate_size=72,
        position_embedding_type="rope",
        mamba_n_heads=6,
        embedding_multiplier=12.0,
        attention_multiplier=0.3,
        residual_multiplier=0.25,
        logits_scaling=3.0,
    ),
    "smollm3": _config(
        "SmolLM3ForCausalLM",
        "smollm3",
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "glm": _config(
        "GlmForCausalLM", "glm", head_dim=16, attention_bias=False, partial_rotary_factor=0.25
    ),
    "glm4": _config("Glm4ForCausalLM", "glm4", head_dim=16, tie_word_embeddings=True),
    "ministral": _config(
        "MinistralForCausalLM",
        "ministral",
        head_dim=16,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ministral3": _config(
        "Ministral3ForCausalLM",
        "ministral3",
        head_dim=16,
        rope_parameters={
            **_YARN,
            "rope_theta": 5000.0,
            "llama_4_scaling_beta": 0.6,
            "max_position_embeddings": MAX_POSITIONS,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ),
    "cohere": _config(
        "CohereForCausalLM",
        "cohere",
        layer_norm_eps=1e-4,
        logit_scale=0.5,
        tie_word_embeddings=True,
    ),
    "cohere2": _config(
        "Cohere2ForCausalLM",
        "cohere2",
        layer_norm_eps=1e-4,
        logit_scale=0.25,
        attention_bias=True,
        sliding_window=9,
        sliding_window_pattern=2,
    ),
    "stablelm": _config(
        "StableLmForCausalLM", "stablelm", layer_norm_eps=1e-4, partial_rotary_factor=0.5
    ),
    "stablelm-parallel": _config(
        "StableLmForCausalLM",
        "stablelm",
        use_parallel_residual=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
    ),
    "nemotron": _config(
        "NemotronForCausalLM",
        "nemotron",
        hidden_act="relu2",
        head_dim=16,
        norm_eps=1e-4,
        attention_bias=True,
        mlp_bias=True,
    ),
    "neox": _config(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        layer_norm_eps=1e-4,
        hidden_act="gelu",
        rotary_pct=0.5,
        rotary_emb_base=3000.0,
        use_parallel_residual=True,
    ),
    "neox-sequential": _config(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        hidden_act="gelu_new",
        attention_bias=False,
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=True,
    ),
    "gpt-oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=16,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={**_YARN, "truncate": False},
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=0.7,
        swiglu_alpha=1.3,
    ),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": MAX_POSITIONS,
        "activation_function": "gelu_new",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}
"""Contents of config.json by name, in the spelling of transformers 4."""

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo3", "cohere2",
    "nemotron", "gpt-oss", "gpt2",
)  # fmt: skip
"""One name for each arrangement of norms, attention and MLP."""


def write(name: str, directory: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write the model `name` of `CONFIGS`; return the directory."""
    return write_random_model(directory, CONFIGS[name], seed=seed, dtype=dtype)
