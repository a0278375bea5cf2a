"""Names of tensors in GGUF files of llama.cpp's converters, and in Hugging Face's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["checkpoint_name", "expert_names", "part_names", "stored_name"]

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)
_IN_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", re.ASCII)

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN_MOE = _LLAMA | {"ffn_gate_inp": "mlp.gate"}
_QWEN2_MOE = _QWEN_MOE | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = _LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"}
_GPT_OSS = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_DEEPSEEK = _QWEN_MOE | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _MIXTRAL,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen2moe": _QWEN2_MOE,
    "qwen3moe": _QWEN_MOE,
    "olmoe": _QWEN_MOE,
    "gpt-oss": _GPT_OSS,
    "deepseek2": _DEEPSEEK,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _PHI3,
    "gpt2": _GPT2,
}

_QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_STACKED: Mapping[str, Mapping[str, str]] = {
    "llama": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen2moe": _QWEN_EXPERTS,
    "qwen3moe": _QWEN_EXPERTS,
    "olmoe": _QWEN_EXPERTS,
    "gpt-oss": _QWEN_EXPERTS,
    "deepseek2": _QWEN_EXPERTS,
}
"""Tensors in which files stack all experts of a layer, with the name of each expert's tensor."""

_COMPOSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt-oss": {"gate_up_proj": ("gate_proj", "up_proj")},
    "deepseek2": {"kv_b_proj": ("k_b_proj", "v_b_proj")},
}
"""Tensors of directories that files may split, with the names of their parts."""


def part_names(family: str, name: str) -> tuple[str, ...]:
    """Return the parts into which files of `family` may split tensor `name`, or ().

    Parts are named as they would be in a directory."""
    module, _, kind = name.rpartition(".")
    at, _, last = module.rpartition(".")
    parts = _COMPOSED.get(family, {}).get(last, ())
    return tuple(f"{at}.{part}.{kind}" for part in parts)


def expert_names(family: str, name: str, experts: int) -> list[str] | None:
    """Return a directory's names of the experts stacked in a file's tensor `name`.

    None if it is not a stacked tensor."""
    layer = _LAYER.fullmatch(name)
    inside = None if layer is None else _STACKED.get(family, {}).get(layer[2])
    if layer is None or inside is None:
        return None
    return [f"model.layers.{layer[1]}.{inside.format(i)}.{layer[3]}" for i in range(experts)]


def checkpoint_name(family: str, name: str) -> str | None:
    """Return a directory's name of a file's tensor `name`; None if it has no name there.

    `family` is the file's `general.architecture`."""
    names = _NAMES[family]
    if (layer := _LAYER.fullmatch(name)) is not None:
        at = f"{'transformer.h' if family == 'gpt2' else 'model.layers'}.{layer[1]}"
        if (whole := names.get(f"{layer[2]}.{layer[3]}")) is not None:
            return f"{at}.{whole}"
        inside = names.get(layer[2])
        return None if inside is None else f"{at}.{inside}.{layer[3]}"
    if (outside := _OUTSIDE.fullmatch(name)) is not None:
        found = names.get(outside[1])
        return None if found is None else f"{found}.{outside[2]}"
    return None


def stored_name(family: str, name: str) -> str | None:
    """Return the name that a file of `family` has for a directory's tensor `name`, or None.

    This is the reverse of `checkpoint_name`."""
    module, _, kind = name.rpartition(".")
    layer = _IN_LAYER.fullmatch(module)
    inside = module if layer is None else layer[2]
    for stored, found in _NAMES[family].items():
        if found == inside:
            given = f"{stored}.{kind}" if layer is None else f"blk.{layer[1]}.{stored}.{kind}"
            return given if checkpoint_name(family, given) == name else None
    return None
