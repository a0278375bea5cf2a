"""Directories of heads with random weights, for a tiny random target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.parity.tiny_models import VOCAB_SIZE

HIDDEN, LAYERS = 48, 3
"""Sizes of the target, the "llama" of `tests.parity.tiny_models`."""
Tensors = dict[str, torch.Tensor]


def layer_config(**changed: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 3000.0,
        "attention_bias": False,
        "mlp_bias": False,
    } | changed


def eagle3_config(layer: Mapping[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """Make a config in the form of `speculators`."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(**layer or {}),
        "draft_vocab_size": VOCAB_SIZE,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    } | changed


def eagle3_tensors(
    config: Mapping[str, Any],
    *,
    embedding: bool = False,
    output: bool = False,
    fusion_bias: bool = False,
    seed: int = 0,
) -> Tensors:
    """Make random weights for a config, optionally with its own embedding and output layer."""
    layer = config["transformer_layer_config"]
    hidden, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    query, kv = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    draft_vocab = config["draft_vocab_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    features = len(config["eagle_aux_hidden_state_layer_ids"] or "123")
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": weight(hidden, features * target_hidden), "norm.weight": norm(hidden)}
    for i in range(layer["num_hidden_layers"]):
        at, columns = f"layers.{i}", hidden if i else 2 * hidden
        tensors |= {
            f"{at}.input_layernorm.weight": norm(hidden),
            f"{at}.post_attention_layernorm.weight": norm(hidden),
            f"{at}.self_attn.q_proj.weight": weight(query, columns),
            f"{at}.self_attn.k_proj.weight": weight(kv, columns),
            f"{at}.self_attn.v_proj.weight": weight(kv, columns),
            f"{at}.self_attn.o_proj.weight": weight(hidden, query),
            f"{at}.mlp.gate_proj.weight": weight(inner, hidden),
            f"{at}.mlp.up_proj.weight": weight(inner, hidden),
            f"{at}.mlp.down_proj.weight": weight(hidden, inner),
        }
        if layer["model_type"] == "qwen3":
            tensors[f"{at}.self_attn.q_norm.weight"] = norm(dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = norm(dim)
        if layer["attention_bias"]:
            for name, size in (("q", query), ("k", kv), ("v", kv), ("o", hidden)):
                tensors[f"{at}.self_attn.{name}_proj.bias"] = weight(size)
    tensors["layers.0.hidden_norm.weight"] = norm(hidden)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(features * target_hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(target_hidden) for i in range(features)}
    if fusion_bias:
        tensors["fc.bias"] = weight(hidden)
    if embedding:
        tensors["embed_tokens.weight"] = weight(VOCAB_SIZE, hidden)
    if output or draft_vocab != VOCAB_SIZE:
        tensors["lm_head.weight"] = weight(draft_vocab, hidden)
    if draft_vocab != VOCAB_SIZE:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def write_head(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory
