"""Heads that guess tokens, as values: what each is made of, and the tensors of its files.

No tensors here. `reading` makes them of config.json.
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
"""Tensor with the distance of each of the head's tokens from the target's, int64 [draft vocab]."""
_OF_THE_TARGET = re.compile(r"^(embed_tokens|lm_head|verifier_lm_head)\.weight$")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Architecture):
    """One decoder that reads hidden states of the target beside embeddings (Li et al., "EAGLE-3",
    2025, section 3.1). Its first layer's projections take both, side by side.

    An embedding that the file lacks is the target's; so is a missing output layer.
    """

    fusion: Linear
    """Makes one hidden state of those that are read: [hidden, features * target_hidden_size]."""
    feature_norms: tuple[Norm, ...]
    """Norms of what `fusion` reads: none, one of all together, or one of each."""
    hidden_norm: Norm
    """Norm of hidden states before the first layer; its `mixer_norm` is that of embeddings."""
    norms_residual: bool
    """Whether the residual stream begins behind `hidden_norm`."""
    norms_output: bool
    """Whether the hidden state that the next guess reads is behind the final norm."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    """Which hidden states are read: what goes into these layers of the target, counted from 0;
    what leaves the last one has the number of layers. None: the file doesn't say."""
    num_features: int
    draft_vocab_size: int
    """Number of tokens that the head knows."""
    has_embedding: bool
    has_output: bool
    kind: ClassVar[str] = "eagle3"

    @property
    def stored(self) -> Iterator[Tensor]:
        """Every tensor of the file that holds floats."""
        own = (self.embedding,) if self.has_embedding else ()
        output = (self.head,) if self.has_output else ()
        parts = own, self.feature_norms, self.fusion, self.hidden_norm, self.layers
        return parts_of((*parts, self.final_norm, output), Tensor)

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """`feature_layers` for a target of so many layers: where the file doesn't say, the second,
        the middle and the last but two, as EAGLE's authors have them.

        Raises `ModelError` for a layer that the target lacks.
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
    """One decoder layer that reads the target's last hidden states beside embeddings, made one by a
    projection (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2; as one layer that
    reads its own output, Cai et al., "FastMTP", 2025). The final norm's output is what the next
    guess reads. Embedding and output layer are the target's.
    """

    token_norm: Norm
    """Norm of embeddings."""
    hidden_norm: Norm
    """Norm of hidden states."""
    projection: Linear
    """Makes one of both, the embedding first: [hidden, 2 * hidden]."""
    kind: ClassVar[str] = "mtp"

    @property
    def stored(self) -> Iterator[Tensor]:
        """Every tensor of the file."""
        parts = self.token_norm, self.hidden_norm, self.projection, self.layers, self.final_norm
        return parts_of(parts, Tensor)

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """What leaves the last of the target's layers."""
        return (num_layers,)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Heads that each guess one of the next tokens from one hidden state (Cai et al., "Medusa",
    2024, section 2.1): number k, from 0, guesses the token k + 2 positions on, since the target
    itself draws the next one. Block j of a head is x + silu(linear(x)).
    """

    hidden_size: int
    vocab_size: int | None
    """Number of tokens that the heads know; None: as many as the target."""
    blocks: tuple[tuple[Linear, ...], ...]
    """Blocks of each head, [hidden, hidden]."""
    outputs: tuple[Linear, ...] | None
    """Output layer of each head, [vocab, hidden]; None: all have the target's."""
    kind: ClassVar[str] = "medusa"

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """What leaves the last of the target's layers."""
        return (num_layers,)

    @property
    def stored(self) -> Iterator[Tensor]:
        """Every tensor of the file."""
        return parts_of((self.blocks, self.outputs), Tensor)

    def canonical(self, stored_name: str) -> str:
        """The name used here for a file's tensor."""
        return stored_name

    @property
    def ignored(self) -> re.Pattern[str]:
        """Tensors that the computation doesn't need: the target's, which some files repeat."""
        return _OF_THE_TARGET


HeadConfig = Eagle3Config | MTPConfig | MedusaConfig
