"""Descriptions of heads that draft tokens: their parts, and the tensors of their files.

Values only. They are made from config.json in `reading`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from aioserve.errors import ModelError
from aioserve.isolation import shown
from aioserve.models.architecture import Architecture, Linear, Norm, Tensor, parts_of

__all__ = ["DRAFT_IDS", "Eagle3Config", "HeadConfig", "MTPConfig", "MedusaConfig"]

DRAFT_IDS: str = "d2t"
"""Tensor with the target's token id minus the head's, for each of the head's tokens.

It is int64 [draft vocab]."""
_OF_THE_TARGET = re.compile(r"^(embed_tokens|lm_head|verifier_lm_head)\.weight$")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Architecture):
    """Decoder that reads hidden states of the target together with embeddings.

    Li et al., "EAGLE-3", 2025, section 3.1. The projections of its first layer take both, side by
    side. If the files have no embedding or no output layer, the target's is used.
    """

    fusion: Linear
    """Projection of the features to one hidden state: [hidden, features * target_hidden_size]."""
    feature_norms: tuple[Norm, ...]
    """Norms of the input of `fusion`: none, one over all features, or one of each feature."""
    hidden_norm: Norm
    """Norm of hidden states before the first layer, whose `mixer_norm` is that of embeddings."""
    norms_residual: bool
    """True if the residual stream begins after `hidden_norm`."""
    norms_output: bool
    """True if the next draft step reads hidden states after the final norm."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    """Layers of the target whose inputs are the features, counted from 0; None: not in the file.

    The number of layers stands for the output of the last one."""
    num_features: int
    draft_vocab_size: int
    """Number of tokens that the head can draft."""
    has_embedding: bool
    has_output: bool
    kind: ClassVar[str] = "eagle3"

    @property
    def stored(self) -> Iterator[Tensor]:
        """Tensors of floats in the files."""
        own = (self.embedding,) if self.has_embedding else ()
        output = (self.head,) if self.has_output else ()
        parts = own, self.feature_norms, self.fusion, self.hidden_norm, self.layers
        return parts_of((*parts, self.final_norm, output), Tensor)

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """Return `feature_layers`, or the default of EAGLE's authors, for a target's `num_layers`.

        The default is layer 2, the middle layer, and the third layer from the end. Raises
        `ModelError` for a layer that the target lacks.
        """
        found, why = self.feature_layers, ""
        if found is None:
            found = (2, num_layers // 2, num_layers - 3)
            why = ", which heads read whose config.json doesn't say"
        if min(found) < 0 or max(found) > num_layers:
            raise ModelError(
                f"eagle_aux_hidden_state_layer_ids must be in [0, {num_layers}] for a target of "
                f"{num_layers} layers, got {shown(list(found))}{why}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class MTPConfig(Architecture):
    """Decoder layer that reads embeddings and the target's last hidden states.

    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2. A projection joins both inputs.
    Further draft steps read the output of the final norm (Cai et al., "FastMTP", 2025). Embedding
    and output layer are the target's.
    """

    token_norm: Norm
    """Norm of embeddings."""
    hidden_norm: Norm
    """Norm of hidden states."""
    projection: Linear
    """Projection of both inputs to one, the embedding first: [hidden, 2 * hidden]."""
    kind: ClassVar[str] = "mtp"

    @property
    def stored(self) -> Iterator[Tensor]:
        """Tensors of the files."""
        parts = self.token_norm, self.hidden_norm, self.projection, self.layers, self.final_norm
        return parts_of(parts, Tensor)

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers, which stands for the output of the target's last layer."""
        return (num_layers,)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Heads that each draft one of the next tokens from the same hidden state.

    Cai et al., "Medusa", 2024, section 2.1. Head k, counted from 0, drafts the token k + 2
    positions ahead, since the target itself draws the next one. A block computes
    x + silu(linear(x)).
    """

    hidden_size: int
    vocab_size: int | None
    """Number of tokens that the heads can draft; None: as many as the target has."""
    blocks: tuple[tuple[Linear, ...], ...]
    """Blocks of each head, [hidden, hidden]."""
    outputs: tuple[Linear, ...] | None
    """Output layer of each head, [vocab, hidden]; None: all use the target's."""
    kind: ClassVar[str] = "medusa"

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers, which stands for the output of the target's last layer."""
        return (num_layers,)

    @property
    def stored(self) -> Iterator[Tensor]:
        """Tensors of the files."""
        return parts_of((self.blocks, self.outputs), Tensor)

    def canonical(self, stored_name: str) -> str:
        """Return the name used here for a file's tensor."""
        return stored_name

    @property
    def ignored(self) -> re.Pattern[str]:
        """Names of tensors to ignore: those of the target, which some files repeat."""
        return _OF_THE_TARGET


HeadConfig = Eagle3Config | MTPConfig | MedusaConfig
