"""Conversion of tiny models in Hugging Face's layout to GGUF, like llama.cpp's converter.

Names of tensors come from the gguf package, which also writes the file. The converter's changes of
tensors and settings are written here again, from its description. It reorders rows of Llama's
queries and keys, adds 1 to Gemma's norms, and transposes GPT-2's matrices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from tests.models.gguf.vocabularies import write_byte_level
from tests.models.gguf.writing import quantized

_EXPERT = re.compile(r"experts\.(\d+)\.")

Array = npt.NDArray[np.float32]

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
}


def convert(
    directory: Path,
    file: Path,
    *,
    weights: str = "F32",
    formats: Mapping[str, str] | None = None,
    pre: str = "gpt-2",
    splits_latents: bool = True,
) -> Path:
    """Write the model in `directory` as `file`.

    - weights: format of matrices, whose rows must be whole blocks. Vectors are F32.
    - formats: other formats of matrices, by a part of their names in the file.
    - splits_latents: True writes the expansion of latents in two tensors, as since May 2025.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    tensors = {k: v.float().numpy() for k, v in load_file(directory / "model.safetensors").items()}
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type("model")
    (_gpt2_settings if "n_embd" in config else _settings)(writer, config)
    if "kv_lora_rank" in config:
        _latent_settings(writer, config, splits_latents)
    _tokenizer(writer, directory, config, pre)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(architecture, layers)
    tensors = in_parts(config, stacked(tensors), splits_latents)
    for name, tensor in (*tensors.items(), *_rope_tensors(config).items()):
        stored = name if name.startswith("rope") else names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        stored += ".weight" if stored.endswith("sinks") else ""
        tensor = converted(architecture, name, tensor, config)
        given = [value for part, value in (formats or {}).items() if part in stored]
        is_vector = tensor.ndim == 1 or stored.endswith(".bias")
        form = "F32" if is_vector else given[0] if given else weights
        kind = gguf.GGMLQuantizationType[form]
        rows = quantized(tensor.reshape(-1, tensor.shape[-1]), form)
        rows = rows.reshape(*tensor.shape[:-1], -1)
        if form in ("F32", "F16"):
            rows = rows.view(np.float32 if form == "F32" else np.float16).reshape(tensor.shape)
        writer.add_tensor(stored, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Stack the tensors of all experts of a layer into one."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if (expert := _EXPERT.search(name)) is None:
            found[name] = tensor
        else:
            found.setdefault(_EXPERT.sub("experts.", name), {})[int(expert[1])] = tensor
    return {
        name: np.stack([one[i] for i in range(len(one))]) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def in_parts(
    config: dict[str, Any], tensors: Mapping[str, Array], splits_latents: bool
) -> dict[str, Array]:
    """Split the tensors that files have in parts."""
    found: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        if "kv_b_proj" in name and splits_latents:
            sizes = config["qk_nope_head_dim"], config["v_head_dim"]
            heads = tensor.reshape(-1, sum(sizes), tensor.shape[-1])
            keys, values = heads[:, : sizes[0]], heads[:, sizes[0] :]
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
        elif config["architectures"][0] == "GptOssForCausalLM" and ".experts." in name:
            for part, rows in _of_gpt_oss(name, tensor):
                found[part] = np.ascontiguousarray(rows)
        else:
            found[name] = tensor
    return found


def _of_gpt_oss(name: str, tensor: Array) -> list[tuple[str, Array]]:
    """Return the parts of GPT-OSS's experts in files: outputs are rows, gate and up separate."""
    kind = "bias" if name.endswith("_bias") else "weight"
    at = name.removesuffix("_bias")
    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if "gate_up_proj" not in at:
        return [(f"{at}.{kind}", rows)]
    gate, up = (at.replace("gate_up", part) for part in ("gate", "up"))
    return [(f"{gate}.{kind}", rows[:, ::2]), (f"{up}.{kind}", rows[:, 1::2])]


def with_bytes_vocabulary(model: Path, directory: Path) -> Path:
    """Copy the model with a byte-level vocabulary, which GGUF files can have."""
    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    (directory / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    write_byte_level(directory)
    return directory


def _settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if experts := next((config[name] for name in names if name in config), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    is_gpt_oss = config["model_type"] == "gpt_oss"
    if inner := config.get("intermediate_size" if is_gpt_oss else "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(inner)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "kv_lora_rank" not in config:
        writer.add_head_count_kv(config.get("num_key_value_heads", heads))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1)))
    if config.get("sliding_window") and config["model_type"] not in ("qwen2", "qwen3"):
        writer.add_sliding_window(config["sliding_window"])
    if "sliding_window_pattern" in config:
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if "final_logit_softcapping" in config:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "original_max_position_embeddings" in config:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])


def _latent_settings(writer: gguf.GGUFWriter, config: dict[str, Any], splits: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_head_count_kv(1 if splits else config["num_attention_heads"])
    writer.add_key_length(rank + rotated if splits else key)
    writer.add_value_length(rank if splits else value)
    if splits:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    is_sigmoid = config["model_type"] == "deepseek_v3"
    writer.add_expert_shared_count(config.get("n_shared_experts", 1))
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", 2.5 if is_sigmoid else 1.0))
    if is_sigmoid:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
    if "n_group" in config:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _gpt2_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))


def _tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any], pre: str) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))

    if model["merges"]:  # the package writes no empty list
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    if (template := directory / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text())
    ends = config["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])


def _rope_tensors(config: dict[str, Any]) -> dict[str, Array]:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(scaling[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * np.pi / frequencies
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(lengths > original / low, factor, between)
    divisors = np.where(lengths < original / high, 1.0, divisors)
    return {"rope_freqs.weight": divisors.astype(np.float32)}


def converted(
    architecture: gguf.MODEL_ARCH, name: str, tensor: Array, config: dict[str, Any]
) -> Array:
    if architecture == gguf.MODEL_ARCH.LLAMA and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3):
        return tensor + np.float32(1) if name.endswith("norm.weight") else tensor
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    turned = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")
    if architecture == gguf.MODEL_ARCH.GPT2 and name.endswith(turned):
        return np.ascontiguousarray(tensor.T)
    return tensor
