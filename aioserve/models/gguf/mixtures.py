"""Mixtures of experts in the metadata of llama.cpp's converters. No torch here."""

from __future__ import annotations

from typing import Any

import numpy as np

from aioserve.models.families.common import MOST_LAYERS
from aioserve.models.fields import Fields
from aioserve.models.gguf.file import short_decimal
from aioserve.models.gguf.shared import (
    FileModel,
    each_layer,
    scaled_rope,
    sizes,
    whole_heads,
    window_of,
)

__all__ = ["deepseek2", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Supported values of `expert_gating_func`."""


def mixtral(model: FileModel, config: dict[str, Any]) -> dict[str, Any]:
    """Read a Mixtral, which files call a Llama. `config` is that of the Llama."""
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": window_of(model.keys),
        **_experts(model, "num_local_experts"),
        **_norms(model, always=True),
    }


def qwen2_moe(model: FileModel) -> dict[str, Any]:
    return whole_heads(model, sizes(model)) | {
        **_experts(model, "num_experts"),
        "moe_intermediate_size": model.keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.keys.integer("expert_shared_feed_forward_length"),
        "qkv_bias": model.has_bias("attn_q"),
        **_norms(model),
    }


def qwen3_moe(model: FileModel) -> dict[str, Any]:
    return whole_heads(model, sizes(model)) | {
        **_experts(model, "num_experts"),
        "moe_intermediate_size": model.keys.integer("expert_feed_forward_length"),
        "attention_bias": model.has_bias("attn_q"),
        **_norms(model, always=True),  # files seldom have the key; llama.cpp always normalises
    }


def olmoe(model: FileModel) -> dict[str, Any]:
    return whole_heads(model, sizes(model)) | {
        **_experts(model, "num_experts"),
        "attention_bias": model.has_bias("attn_q"),
        **_norms(model),
    }


def gpt_oss(model: FileModel) -> dict[str, Any]:
    keys, config = model.keys, whole_heads(model, sizes(model))
    if keys.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        keys.unsupported("rope.freq_base_swa", "all layers of this architecture have one base")
    pattern = keys.integer("attention.sliding_window_pattern", 2)
    layers = range(config["num_hidden_layers"])
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # Files lack this setting. The model was trained without truncation, which llama.cpp does.
        scaling["truncate"] = False
    return config | {
        "rope_scaling": scaling,
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers
        ],
        "attention_bias": model.has_bias("attn_q"),
        **_experts(model, "num_local_experts", _SOFTMAX_OF_CHOSEN),
        **_norms(model, always=True),
    }


def deepseek2(model: FileModel) -> dict[str, Any]:
    """Read a DeepSeek V2, or a V3 if a sigmoid scores the experts."""
    keys = model.keys
    rank, rotated = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    key, value = _latent_heads(keys, rank, rotated)
    layers = keys.integer("block_count", most=MOST_LAYERS)
    heads = each_layer(keys, "attention.head_count")
    # It is 1 in files that describe the cache: one latent for the keys and values of all heads.
    cached = each_layer(keys, "attention.head_count_kv", heads)
    if cached not in (1, heads):
        keys.invalid("attention.head_count_kv", f"1, or the number of heads, {heads}")
    dense = keys.integer("leading_dense_block_count", 0, least=0)
    config = {
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": each_layer(keys, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "attention_bias": model.has_bias("attn_kv_a_mqa"),
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0, least=0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": 0,
        **_latent_rope(model),
    }
    return config | _routed(model) if dense < layers else config


def _experts(model: FileModel, field: str, scores: int | None = _SOFTMAX) -> dict[str, Any]:
    """Read the counts of experts.

    `scores` is the only `expert_gating_func` that is accepted; None: the caller checks it."""
    if scores is not None and model.keys.integer("expert_gating_func", scores) != scores:
        model.keys.unsupported("expert_gating_func", f"of this architecture it is {scores}")
    return {
        field: model.keys.integer("expert_count"),
        "num_experts_per_tok": model.keys.integer("expert_used_count"),
    }


def _norms(model: FileModel, *, always: bool = False) -> dict[str, Any]:
    """Read `norm_topk_prob`: true if the weights of the chosen experts are scaled to a sum of 1.

    `always`: the architecture does so, and a file with false is refused."""
    said = model.keys.flag("expert_weights_norm", always)
    if always and not said:
        model.keys.unsupported("expert_weights_norm", "this architecture makes weights 1 in sum")
    return {"norm_topk_prob": said}


def _latent_heads(keys: Fields, rank: int, rotated: int) -> tuple[int, int]:
    """Read the dimensions of a head's key and of its value.

    In some files, the usual keys describe the cache, and those with "_mla" describe heads."""
    key, value = "attention.key_length", "attention.value_length"
    if keys.has(f"{key}_mla"):
        for name, cached in ((key, rank + rotated), (value, rank)):
            if keys.integer(name, cached) != cached:
                keys.invalid(name, f"{cached}, which are cached of a token")
        key, value = f"{key}_mla", f"{value}_mla"
    found = keys.integer(key)
    if found <= rotated:
        keys.invalid(key, f"above rope.dimension_count {rotated}")
    return found, keys.integer(value)


def _latent_rope(model: FileModel) -> dict[str, Any]:
    keys, found = model.keys, scaled_rope(model)
    if not found or found["rope_scaling"]["rope_type"] != "yarn":
        return found
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        keys.unsupported("rope.scaling.attn_factor", "yarn_log_multiplier scales this architecture")
    # The key is a tenth of mscale_all_dim, and mscale is equal to that.
    scale = short_decimal(np.float32(10 * keys.number("rope.scaling.yarn_log_multiplier")))
    found["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _routed(model: FileModel) -> dict[str, Any]:
    """Read the routing of experts. Its default is a softmax over one group."""
    keys = model.keys
    scores = keys.integer("expert_gating_func", _SOFTMAX)
    if scores not in (_SOFTMAX, _SIGMOID):
        keys.unsupported("expert_gating_func", "known are 1, a softmax, and 2, a sigmoid")
    normalized = keys.flag("expert_weights_norm", False)
    groups = keys.integer("expert_group_count", 1)
    top_groups = keys.integer("expert_group_used_count", groups)
    config = {
        **_experts(model, "n_routed_experts", None),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", least=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }
    if scores == _SIGMOID:
        return config | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "norm_topk_prob": normalized,
            "n_group": groups,
            "topk_group": top_groups,
        }
    if normalized:
        keys.unsupported("expert_weights_norm", "weights of a softmax are as it has them")
    if groups == 1:
        return config
    limited = {"n_group": groups, "topk_group": top_groups}
    return config | limited | {"topk_method": "group_limited_greedy"}
