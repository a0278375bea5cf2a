"""Ops with which a decoder computes one batch.

Layers call `LayerOps`. `TensorOps` runs each op at once on a backend. A backend that can record has
a class of its own, whose values stand for later results: it makes a `StepProgram`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from aioserve.ops.batch import Batch, Drawn, SampleRows
from aioserve.ops.checks import (
    Activation,
    AttentionKind,
    HeadNorms,
    LayerNorm,
    RMSNorm,
    Rotation,
)
from aioserve.ops.experts import Mixture
from aioserve.ops.kv_cache import KVCache
from aioserve.ops.linear import Linear, PerHeadLinear

__all__ = ["Embedding", "LayerOps", "LogitEdits", "RotarySource", "RowOps", "StepProgram"]

X = TypeVar("X")
"""A matrix with a row for each token of the batch, or for each row whose logits are wanted."""

Embedding = Tensor | Linear
"""A table `[vocab, H]`, plain or in the form of a linear layer."""


class RotarySource(Protocol):
    """Tables that grow as contexts get longer."""

    @property
    def rotation(self) -> Rotation: ...


class RowOps(ABC, Generic[X]):
    """Ops that need only rows and weights. Ops without a result change x.

    Results are rounded once, to the dtype of the first argument.
    """

    @abstractmethod
    def add(self, x: X, y: X) -> None:
        """x += y in place, both `[T, H]`."""

    @abstractmethod
    def scale(self, x: X, factor: float) -> None:
        """x *= factor in place, x `[T, H]`."""

    @abstractmethod
    def rms_norm(self, x: X, norm: RMSNorm, residual: X | None = None) -> X:
        """Norm of each row of x `[T, H]`.

        With a residual `[T, H]`, x is first added to it in place. The norm is then that of the sum
        as it was stored, rounded to the residual's dtype.
        """

    @abstractmethod
    def norm_columns(self, x: X, norm: RMSNorm, first: int) -> None:
        """Norm, in place, of as many columns of each row as there are weights, from `first` on: x
        `[T, N]`."""

    @abstractmethod
    def layer_norm(self, x: X, norm: LayerNorm, residual: X | None = None) -> X:
        """Norm of each row of x `[T, H]`; a residual works as in `rms_norm`."""

    @abstractmethod
    def gated(self, gate_up: X, *, gelu: bool) -> X:
        """`act(gate) * up` of `[T, 2 * I]` holding gate then up; returns `[T, I]`. With `gelu` the
        activation is gelu in its tanh approximation, else silu."""

    @abstractmethod
    def activated(self, x: X, kind: Activation) -> X:
        """Activation of each number of `[T, I]`."""

    @abstractmethod
    def sigmoid_scale(self, x: X, gate: X) -> None:
        """x *= sigmoid(gate) in place, x `[T, H]`, gate float32 `[T, 1]`."""

    @abstractmethod
    def soft_cap(self, logits: X, cap: float) -> None:
        """`cap * tanh(logits / cap)` in place, logits float32 `[S, V]`."""


class LayerOps(RowOps[X]):
    """Ops of one batch over its KV pages, which `aioserve.ops.Backend` documents."""

    @abstractmethod
    def embed(self, table: Embedding) -> X:
        """Rows of the batch's token ids, in memory of their own."""

    @abstractmethod
    def hidden_in(self, columns: int) -> X:
        """Rows `[T, columns]` that were given beside the batch, in memory of their own."""

    @abstractmethod
    def concat(self, x: X, y: X) -> X:
        """`[T, H + I]`: the columns of x `[T, H]`, then those of y `[T, I]`."""

    @abstractmethod
    def scatter_columns(self, x: X, columns: Tensor, size: int) -> X:
        """float32 `[S, size]` with x, float32 `[S, N]`, in `columns`, int64 `[N]`, all different;
        -inf in the others."""

    @abstractmethod
    def add_positions(self, x: X, table: Tensor) -> None:
        """Add the rows of the batch's positions: table `[positions, H]`."""

    @abstractmethod
    def linear(self, x: X, layer: Linear) -> X: ...

    @abstractmethod
    def experts(self, x: X, scores: X, mixture: Mixture) -> X:
        """Sum of the experts that the scores, float32 `[T, experts]`, choose for each row of x,
        `[T, hidden]`. Returns `[T, hidden]`."""

    @abstractmethod
    def rotary_kv_write(
        self, qkv: X, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None: ...

    @abstractmethod
    def per_head(self, x: X, layer: PerHeadLinear) -> X: ...

    @abstractmethod
    def latent_write(
        self, queries: X, latents: X, layer: int, rotary: RotarySource, norm: RMSNorm
    ) -> None: ...

    @abstractmethod
    def paged_attention(
        self, qkv: X, layer: int, kind: AttentionKind, *, logit_rows_only: bool
    ) -> X: ...

    @abstractmethod
    def logit_rows(self, x: X) -> X:
        """Rows whose logits are wanted, in memory of their own."""

    @abstractmethod
    def tap(self, x: X, column: int) -> None:
        """Copy x to the kept columns from `column` on. Everything kept has a row for each token, or
        everything has one for each row whose logits are wanted."""


class LogitEdits(Protocol):
    """Changes of a step's logits between the model and the draw. Other rows stay as the model's own
    ops left them."""

    @property
    def rows(self) -> Collection[int]:
        """Indices of the rows that `apply` changes, or reads."""
        ...

    def apply(self, logits: Tensor) -> None:
        """Change these rows of `logits`, float32 `[S, V]` contiguous, in place. The others may hold
        anything."""
        ...


class StepProgram(ABC):
    """All ops of a decoder, run by one call. The same bits as op by op."""

    @abstractmethod
    def logits(
        self,
        batch: Batch,
        kv: KVCache,
        states: Tensor | None = None,
        hidden_in: Tensor | None = None,
    ) -> Tensor:
        """Write the batch's keys and values into `kv`; return logits, float32 `[S, V]`.

        - states: `[T, columns]` or `[S, columns]` in the program's dtype, filled by
          `LayerOps.tap`. None if nothing is kept.
        - hidden_in: result of `LayerOps.hidden_in`, in the program's dtype. None if nothing is
          given.
        """

    @abstractmethod
    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: Tensor,
        edits: LogitEdits | None = None,
        states: Tensor | None = None,
        hidden_in: Tensor | None = None,
    ) -> Drawn:
        """Compute `logits`, change them by `edits`, and draw from them as `Backend.draw` does."""
