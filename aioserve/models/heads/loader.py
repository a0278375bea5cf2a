"""Loads a head beside the model that it guesses for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.json_file import read_json_object
from aioserve.models.architecture import Linear
from aioserve.models.block_parts import Weights
from aioserve.models.config import MAX_CONFIG_BYTES
from aioserve.models.decoder import Decoder
from aioserve.models.fields import Fields
from aioserve.models.heads.config import Eagle3Config, HeadConfig, MedusaConfig, MTPConfig
from aioserve.models.heads.eagle3 import Eagle3Head
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.models.heads.mtp import MTPHead
from aioserve.models.heads.reading import read_head_config
from aioserve.models.heads.tensors import HeadTensors
from aioserve.models.reading import TakenWeights

__all__ = ["load_head"]


def load_head(path: Path | str, target: Decoder) -> Eagle3Head | MTPHead | MedusaHeads:
    """Load the head in the directory `path`, to be computed as `target` is: in its dtype, on its
    backend, for contexts as long. An embedding or output layer that the files lack is the target's.

    Raises:
        ModelNotFoundError: no such directory.
        UnsupportedModelError: a kind of head or a setting that isn't implemented.
        WeightsError: no weights, or a file or tensor missing, broken or of the wrong shape.
        ModelError: a malformed file, or a head for another target: of another hidden size, another
            vocabulary or more layers.
    """
    path = Path(path)
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"{path}: no such directory")
    file = path / "config.json"
    if not os.path.lexists(file):
        raise ModelError(f"{path}: no config.json")
    values = Fields(read_json_object(file, MAX_CONFIG_BYTES), str(file))
    with HeadTensors(path) as tensors, torch.no_grad():
        config = read_head_config(values, tensors.shapes)
        _check_target(config, target, str(file))
        taken = TakenWeights(str(target.dtype).removeprefix("torch."), target.max_model_len)
        taken.arrays = tensors.arrays(config, taken.dtype)
        weights = Weights(taken, target.backend)
        if isinstance(config, MedusaConfig):
            shared = [target.head] * len(config.blocks)
            own = config.outputs
            outputs = None if own is None else [weights.linear(o, torch.float32) for o in own]
            return MedusaHeads(config, weights, shared if outputs is None else outputs)
        if isinstance(config, MTPConfig):
            return MTPHead(config, weights, target.embedding, target.head, target.max_model_len)
        draft_ids = tensors.draft_ids(config.draft_vocab_size, config.vocab_size)
        return Eagle3Head(
            config,
            weights,
            weights.vector(config.embedding) if config.has_embedding else target.embedding,
            weights.linear(Linear((config.head,)), torch.float32)
            if config.has_output
            else target.head,
            draft_ids,
            target.max_model_len,
        )


def _check_target(config: HeadConfig, target: Decoder, source: str) -> None:
    """Raise `ModelError` unless the head is one for such a target."""
    hidden = [config.hidden_size]
    if isinstance(config, Eagle3Config):
        config.layers_read(target.config.num_layers)
        own = config.has_embedding and config.has_output
        hidden = [config.target_hidden_size, *([] if own else hidden)]
    sizes = [("hidden size", size, target.config.hidden_size) for size in hidden]
    if config.vocab_size is not None:
        sizes.append(("number of tokens", config.vocab_size, target.config.vocab_size))
    for name, size, wanted in sizes:
        if size != wanted:
            raise ModelError(
                f"{source}: the head's {name} must be that of the target, {wanted}, got {size}"
            )
