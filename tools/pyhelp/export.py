"""Write a trained model as a Hugging Face model directory in bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from corpus import END_OF_TEXT, TURN_END, token_id
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

ROPE_THETA = 10000.0
COPIED = ("tokenizer.json", "tokenizer_config.json", "questions.json")


def export_model(
    model: Qwen3ForCausalLM,
    corpus: Path,
    out: Path,
    numbers: Mapping[str, float],
    copied: Sequence[str] = COPIED,
) -> None:
    """Write every file of the model directory; each one is replaced in one move."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.new", metadata={"format": "pt"})
    (out / "model.new").chmod(0o644)
    (out / "model.new").replace(out / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": model.config.vocab_size,
        "hidden_size": model.config.hidden_size,
        "intermediate_size": model.config.intermediate_size,
        "num_hidden_layers": model.config.num_hidden_layers,
        "num_attention_heads": model.config.num_attention_heads,
        "num_key_value_heads": model.config.num_key_value_heads,
        "head_dim": model.config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.config.max_position_embeddings,
        "rms_norm_eps": model.config.rms_norm_eps,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": model.config.initializer_range,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}
    written = {
        "config.json": config,
        "generation_config.json": generation,
        "training.json": dict(numbers),
    }
    for name, content in written.items():
        temporary = out / (name + ".new")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(out / name)
    for name in copied:
        shutil.copyfile(corpus / name, out / (name + ".new"))
        (out / (name + ".new")).replace(out / name)
