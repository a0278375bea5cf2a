"""Models with random weights, written as Hugging Face directories: for tests and benchmarks.

They have any architecture that aioserve loads, without transformers. The weights are spread so that
nothing degenerates. Attention is far from uniform, norms and biases are not neutral, and greedy
answers differ between prompts. The answers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aioserve.models.architecture import Experts, LatentAttention, Linear, Norm, parts_of
from aioserve.models.checkpoint import SINGLE_FILE
from aioserve.models.config import DecoderConfig
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.testing.byte_tokenizer import byte_characters

__all__ = ["random_tensors", "write_random_model", "write_tokenizer"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_random_model(
    directory: Path | str,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    device: str = "cpu",
    known: KnownKinds = BUNDLED_KINDS,
) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; return the directory.

    config: as in config.json, `architectures` included. `dtype` (float32, bfloat16 or float16) is
    written into it. The tokenizer knows single bytes, and "?<id>" for each further id. `device` is
    torch's name of what draws the weights: another one draws others of the same seed. `known`: the
    families that `config` may name.
    Raises `ModelError` for a config that can't be loaded, ValueError for an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    written = {**config, "dtype": dtype}
    parsed = DecoderConfig.from_dict(written, known=known)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(path, parsed.vocab_size)
    tensors = _stacked(parsed, random_tensors(parsed, seed, _DTYPES[dtype], device))
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


def random_tensors(
    config: DecoderConfig, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors by name, drawn by `device`, on the CPU.

    It has no head if embeddings are tied.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape, mean, deviation in _distributions(config):
        values = torch.empty(shape, device=device).normal_(mean, deviation, generator=generator)
        tensors[name] = values.to(dtype).cpu()
    return tensors


def _stacked(config: DecoderConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as files have them: those of all experts of a layer are one."""
    written: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        for ending, each in config.stacked:
            head, _, tail = each.partition("{}")
            before, found, number = name.removesuffix(tail).rpartition("." + head)
            if name.endswith(tail) and found and number.isdecimal():
                parts.setdefault(f"{before}.{ending}", []).append(tensor)
                break
        else:
            written[name] = tensor
    return written | {name: torch.stack(each) for name, each in parts.items()}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json: byte-level, without merges; ids from 256 on read as "?<id>".

    With fewer than 256 ids it knows that many bytes, from 0 on, and drops all others.
    """
    vocab = {char: byte for byte, char in enumerate(byte_characters()) if byte < vocab_size}
    vocab.update({f"?{token_id}": token_id for token_id in range(256, vocab_size)})
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    text = json.dumps(tokenizer, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")


def _distributions(
    config: DecoderConfig,
) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Yield name, shape, mean and standard deviation of each tensor."""
    norm_mean = 1.0 - config.final_norm.weight_offset
    # Logits have a deviation of about 2.
    head = 2.0 * config.hidden_size**-0.5 / config.logit_scale
    embedding = 1.0 / config.embedding_scale
    if config.tie_word_embeddings:
        embedding = min(embedding, head)
    yield config.embedding.name, config.embedding.shape, 0.0, embedding
    if config.positions is not None:
        yield config.positions.name, config.positions.shape, 0.0, embedding
    for layer in config.layers:
        *sharpened, _ = parts_of(layer.mixer, Linear)
        for linear in parts_of(layer, Linear):
            gain = 1.5 if linear in sharpened else 1.0
            for weight in linear.weights:
                inputs = weight.shape[0 if linear.transposed else 1]
                yield weight.name, weight.shape, 0.0, gain * inputs**-0.5
            for bias in linear.biases:
                yield bias.name, bias.shape, 0.0, 0.2
        if layer.mixer.sinks is not None:
            yield layer.mixer.sinks.name, layer.mixer.sinks.shape, 1.0, 2.0
        if isinstance(layer.mixer, LatentAttention):
            expansion = layer.mixer.expansion
            yield expansion.name, expansion.shape, 0.0, 1.5 * expansion.columns**-0.5
        for experts in parts_of(layer.feed_forward, Experts):
            if experts.correction is not None:
                yield experts.correction.name, experts.correction.shape, 0.0, 0.2
        inner = list(parts_of(layer.mixer, Norm))
        for norm in parts_of(layer, Norm):
            mean = norm_mean + 0.5 if norm in inner else norm_mean
            yield norm.weight.name, norm.weight.shape, mean, 0.3
            if norm.bias is not None:
                yield norm.bias.name, norm.bias.shape, 0.0, 0.1
    final = config.final_norm
    if config.tie_word_embeddings:
        # Weights around 1 would make every token its own most likely successor.
        yield final.weight.name, final.weight.shape, norm_mean - 1.0, 1.0
    else:
        yield final.weight.name, final.weight.shape, norm_mean, 0.3
    if final.bias is not None:
        yield final.bias.name, final.bias.shape, 0.0, 0.1
    if not config.tie_word_embeddings:
        yield config.head.name, config.head.shape, 0.0, head
