"""Ops with which a decoder computes one batch.

`LayerOps` is what layers call. `TensorOps` runs each op at once on a backend. A backend that can
record has a class of its own, with values that stand for later results: it makes a `StepProgram`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from aioserve.ops.batch import Batch, Drawn, SampleRows
from aioserve.ops.checks import HeadNorms, Rotation
from aioserve.ops.edits import LogitEdits
from aioserve.ops.kv_cache import KVCache
from aioserve.ops.linear import Linear

__all__ = ["Embedding", "LayerOps", "RotarySource", "StepProgram"]

X = TypeVar("X")
"""A matrix with a row for each token of the batch, or for each row whose logits are wanted."""

Embedding = Tensor | Linear
"""A table `[vocab, H]`, plain or as a linear layer keeps it."""


class RotarySource(Protocol):
    """Tables that grow as contexts get longer."""

    @property
    def rotation(self) -> Rotation: ...


class LayerOps(ABC, Generic[X]):
    """Ops that `aioserve.ops.Backend` documents. Ops without a result change x."""

    @abstractmethod
    def embed(self, table: Embedding) -> X:
        """The rows of the batch's token ids, in memory of their own."""

    @abstractmethod
    def add_positions(self, x: X, table: Tensor) -> None:
        """Add the rows of the batch's positions: table `[positions, H]`."""

    @abstractmethod
    def scale(self, x: X, factor: float) -> None: ...

    @abstractmethod
    def linear(self, x: X, layer: Linear) -> X: ...

    @abstractmethod
    def rms_norm(self, x: X, weight: Tensor, eps: float, weight_offset: float) -> X: ...

    @abstractmethod
    def add_rms_norm(
        self, x: X, residual: X, weight: Tensor, eps: float, weight_offset: float
    ) -> X: ...

    @abstractmethod
    def layer_norm(self, x: X, weight: Tensor, bias: Tensor | None, eps: float) -> X: ...

    @abstractmethod
    def add_layer_norm(
        self, x: X, residual: X, weight: Tensor, bias: Tensor | None, eps: float
    ) -> X: ...

    @abstractmethod
    def rotary_kv_write(
        self, qkv: X, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None: ...

    @abstractmethod
    def paged_attention(
        self,
        qkv: X,
        layer: int,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        logit_rows_only: bool,
    ) -> X: ...

    @abstractmethod
    def silu_mul(self, gate_up: X) -> X: ...

    @abstractmethod
    def gelu_tanh_mul(self, gate_up: X) -> X: ...

    @abstractmethod
    def gelu_tanh(self, x: X) -> X: ...

    @abstractmethod
    def logit_rows(self, x: X) -> X:
        """The rows whose logits are wanted, in memory of their own."""

    @abstractmethod
    def soft_cap(self, logits: X, cap: float) -> None: ...


class StepProgram(ABC):
    """All ops of a decoder, run by one call. The same bits as op by op."""

    @abstractmethod
    def logits(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv`; return logits, float32 `[S, V]`."""

    @abstractmethod
    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: Tensor,
        edits: LogitEdits | None = None,
    ) -> Drawn:
        """Compute `logits`, change them by `edits`, and draw from them as `Backend.draw` does."""
