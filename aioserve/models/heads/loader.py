"""Loading of a head for the model that it drafts for."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from aioserve.errors import ModelError
from aioserve.models.architecture import Linear
from aioserve.models.block_parts import Weights
from aioserve.models.decoder import Decoder
from aioserve.models.heads.config import MedusaConfig, MTPConfig
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.heads.eagle3 import Eagle3Head
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.models.heads.mtp import MTPHead
from aioserve.models.heads.read import ReadHead
from aioserve.models.heads.tensors import HeadTensors
from aioserve.models.reading import TakenWeights
from aioserve.ops import Backend

__all__ = ["load_head", "make_head"]


def load_head(path: Path | str, target: Decoder) -> DecoderHead | MedusaHeads:
    """Load the head in the directory `path`, and compute it like `target`.

    It has the target's dtype, backend and longest context, and uses a step program if the target
    does. If the files have no embedding or no output layer, the target's is used.

    Raises:
        ModelNotFoundError: the directory does not exist.
        UnsupportedModelError: a kind of head or a setting that isn't implemented.
        WeightsError: a file or tensor is missing, broken or of the wrong shape.
        ModelError: a malformed file, or a head for a target with another hidden size, another
            vocabulary or more layers.
    """
    return make_head(ReadHead.of(path), target)


def make_head(
    read: ReadHead,
    target: Decoder,
    *,
    memory_bytes: int | None = None,
    backend: Backend | None = None,
) -> DecoderHead | MedusaHeads:
    """Read the weights of a head, and compute it like `target`.

    `backend` may be another one for the target's device; None: the target's. Raises the errors of
    `load_head`, and `ModelError` for weights beyond `memory_bytes`; None: no limit."""
    config = read.config
    read.check(target.config)
    needed = sum([math.prod(tensor.shape) for tensor in config.stored]) * target.dtype.itemsize
    if memory_bytes is not None and needed > memory_bytes:
        raise ModelError(
            f"{read.path}: the weights take {needed} bytes in {target.dtype}, and there are "
            f"{memory_bytes} bytes of memory"
        )
    with HeadTensors(read.path) as tensors, torch.no_grad():
        taken = TakenWeights(str(target.dtype).removeprefix("torch."), target.max_model_len)
        taken.arrays = tensors.arrays(config, taken.dtype)
        weights = Weights(taken, backend or target.backend)
        use_program = target.program is not None
        if isinstance(config, MedusaConfig):
            shared = [target.head] * len(config.blocks)
            own = config.outputs
            outputs = None if own is None else [weights.linear(o, torch.float32) for o in own]
            return MedusaHeads(config, weights, shared if outputs is None else outputs)
        if isinstance(config, MTPConfig):
            shared = target.embedding, target.head, target.max_model_len
            return MTPHead(config, weights, *shared, use_program=use_program)
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
            use_program=use_program,
        )
