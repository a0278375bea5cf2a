"""Medusa heads (Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple
decoding heads", 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from aioserve.models.block_parts import Weights
from aioserve.models.heads.config import MedusaConfig
from aioserve.ops import Linear

__all__ = ["MedusaHeads"]


class MedusaHeads:
    """Loaded Medusa heads. Only one thread at a time may use them.

    They compute op by op, and keep no state between calls. `outputs` has the output layer of each
    head, `[vocab, hidden]`, with float32 results.
    """

    def __init__(self, config: MedusaConfig, weights: Weights, outputs: Sequence[Linear]) -> None:
        self.config: MedusaConfig = config
        self.dtype: torch.dtype = weights.dtype
        """Dtype of hidden states."""
        self._blocks = tuple(
            tuple(weights.linear(block) for block in blocks) for blocks in config.blocks
        )
        self._outputs = tuple(outputs)

    @property
    def kind(self) -> str:
        return self.config.kind

    @property
    def count(self) -> int:
        """Number of heads."""
        return len(self._blocks)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Compute logits of the first `count` heads, or of all: float32 `[count, S, vocab]`.

        `hidden` are the hidden states `[S, hidden]` that the target's output layer reads. Raises
        ValueError for another shape or dtype.
        """
        columns = self.config.hidden_size
        if hidden.dim() != 2 or hidden.shape[1] != columns or hidden.dtype is not self.dtype:
            raise ValueError(
                f"hidden must be {self.dtype} of shape [S, {columns}], got {hidden.dtype} "
                f"{list(hidden.shape)}"
            )
        found = []
        for blocks, output in zip(self._blocks[:count], self._outputs, strict=False):
            x = hidden
            for block in blocks:
                x = x + functional.silu(block(x))
            found.append(output(x))
        return torch.stack(found)
