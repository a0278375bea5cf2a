"""Memory that a draft model or a head takes beside the model that it drafts for."""

from __future__ import annotations

import math

from aioserve.capacity.capacity import BITS, DraftMemory, precisions, weight_bytes
from aioserve.capacity.models import read_sizes
from aioserve.capacity.sizes import ModelSizes
from aioserve.capacity.weights import read_weights
from aioserve.errors import ConfigError
from aioserve.models.heads.config import MedusaConfig
from aioserve.models.heads.read import ReadHead
from aioserve.models.heads.tensors import HeadTensors
from aioserve.paging.format import COUNTED_KV_FORMATS, KVEntry

__all__ = ["memory_of_head", "memory_of_model"]


def memory_of_model(name: str, target: ModelSizes) -> DraftMemory:
    """Return the memory of the draft model `name`, for a model of these sizes.

    The name is as in `read_sizes`, and the data type that of its files or else of its config.json.
    Raises like `read_sizes` and `read_weights`, and `ConfigError` for a model with another number
    of tokens.
    """
    sizes = read_sizes(name)
    if sizes.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft has a vocabulary of {sizes.vocab_size} tokens, and the model that it is to "
            f"draft for one of {target.vocab_size}",
            argument="draft",
            value=name,
        )
    weights = read_weights(name)
    dtype, kv_dtype = precisions(sizes)
    held = weight_bytes(sizes.parameters, dtype) if weights is None else weights.on_gpu.held_bytes
    return DraftMemory(
        draft=name,
        kind="model",
        weight_bytes=held,
        kv_bytes_per_token=sizes.num_layers * sizes.entry(COUNTED_KV_FORMATS[kv_dtype]).num_bytes,
        num_kv_heads=sizes.num_kv_heads,
        state_bytes_per_token=0,
    )


def memory_of_head(directory: str, target: ModelSizes) -> DraftMemory:
    """Return the memory of the head in a directory, for a model of these sizes.

    It is computed in the data type of the model. Raises `ModelError` for a directory that is no
    head. So does a head of another model, or one with other tensors than its config.json says, as
    in an engine.
    """
    read = ReadHead.of(directory)
    read.check(target)
    config = read.config
    with HeadTensors(read.path) as tensors:
        tensors.check(config)
    # If weights are rounded, activations have 16 bits.
    dtype, kv_dtype = precisions(target)
    item_bytes = max(16, BITS[dtype]) // 8
    values = sum([math.prod(tensor.shape) for tensor in config.stored])
    states, kv, heads = len(read.layers_read(target)), 0, 0
    if not isinstance(config, MedusaConfig):
        heads = config.heads.kv
        entry = KVEntry(COUNTED_KV_FORMATS[kv_dtype], heads, config.heads.dim)
        kv = config.num_layers * entry.num_bytes
    return DraftMemory(
        draft=directory,
        kind=config.kind,
        weight_bytes=values * item_bytes,
        kv_bytes_per_token=kv,
        num_kv_heads=heads,
        state_bytes_per_token=states * target.hidden_size * item_bytes,
    )
