"""Contract of every backend: what a device can do for a model; and layers' ops done on one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aioserve.formats.routing import Routing
from aioserve.formats.weights import PLAIN_FLOATS, ComputedFormats
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows, row_error
from aioserve.ops.checks import (
    Activation,
    AttentionKind,
    HeadNorms,
    KVLayer,
    LayerNorm,
    RMSNorm,
    Rotation,
    check_columns,
    check_merge,
    check_norm,
    check_rows,
    check_tensor,
)
from aioserve.ops.experts import ExpertGate, Mixture
from aioserve.ops.kept_tokens import kept_tokens, scaled
from aioserve.ops.kv_cache import KVCache, KVShape, lazy_memory
from aioserve.ops.layer_ops import Embedding, LayerOps, RotarySource, RowOps, StepProgram
from aioserve.ops.linear import HeldWeight, Linear, PerHeadLinear, TorchPerHead

__all__ = [
    "AttentionKind",
    "Backend",
    "HeadNorms",
    "KVLayer",
    "LayerNorm",
    "RMSNorm",
    "Rotation",
    "TensorOps",
]


class Backend(RowOps[Tensor]):
    """Operations of one device. Made once per model, used by one thread at a time.

    A step: `copy_pages`, `prepare`, then the ops of every layer, then `draw`. T, B and S are the
    tokens, sequences and sampled rows of a batch. Hq and Hk are the query and KV heads, D is the
    size of a head. Ops take and return tensors on `device`. An argument that doesn't fit raises a
    TypeError or ValueError that names it.
    """

    name: str
    device: torch.device

    # -- memory

    def place(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the device's memory; itself if it is there already."""
        return tensor.to(self.device)

    formats: ComputedFormats = PLAIN_FLOATS
    """Formats of weights that it computes without conversion."""

    @abstractmethod
    def linear(
        self,
        weight: HeldWeight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Make the layer `x @ weight.T + bias`. The weight is [N, K] and the bias [N], on the CPU,
        of one of `Linear.dtypes`. A weight packed for `formats` includes its bias.

        Neither is needed afterwards. `out_dtype` is the dtype of results: the weight's, or float32.
        Raises TypeError for a weight in a form that isn't among `formats`.
        """

    def mixture(
        self,
        routing: Routing,
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> Mixture:
        """Make a mixture of experts from linear layers of this backend."""
        return Mixture(routing, ups, downs, gate=gate, correction=correction)

    def per_head(self, weight: Tensor, passed: int = 0) -> PerHeadLinear:
        """Make the product of each head with a weight of its own: weight `[H, N, K]` on the CPU, of
        any strides. Its dtype is one of those of linear layers. It isn't needed afterwards."""
        return TorchPerHead(weight, passed, self.device)

    @abstractmethod
    def allocate_kv(self, shape: KVShape) -> KVCache:
        """Allocate KV pages that hold arbitrary bits.

        Raises ValueError for a size below 1, naming it.
        """

    def allocate_host_kv(self, shape: KVShape) -> KVCache:
        """Allocate KV pages of the host. `copy_pages` copies between them and the device's."""
        return self.allocate_kv(shape)

    def allocate_pages(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, on_host: bool = False
    ) -> Tensor:
        """Allocate memory that holds arbitrary bits, for data beside KV pages. With `on_host` it is
        the host's, to copy to and from the device."""
        return lazy_memory(shape, dtype)

    def allocate_slots(self, num_slots: int) -> Tensor:
        """int64 `[num_slots]`: the token that each slot sampled last, kept between steps."""
        return torch.zeros(num_slots, dtype=torch.int64, device=self.device)

    # -- a step

    @abstractmethod
    def prepare(self, host: HostBatch, kv: KVCache, last_tokens: Tensor) -> Batch:
        """Prepare a step over `kv` for the ops, once for all layers.

        Pending tokens are read from `last_tokens`. Raises ValueError if the arrays contradict each
        other or name a page or a slot that `kv` doesn't have.
        """

    @abstractmethod
    def copy_pages(self, caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
        """Copy keys and values of all layers from page to page, one copy after the other.

        Args:
            caches: equal except for their number of pages.
            copies: `[N, 5]`, rows of (source cache, source page, target cache, target page, number
                of tokens). A cache is an index of `caches`. Tokens are copied from the start of the
                page, and the rest of the target page stays.
        """

    @abstractmethod
    def draw(self, logits: Tensor, rows: SampleRows, last_tokens: Tensor) -> Drawn:
        """Draw a token from each row of `logits`, float32 `[S, V]`, and leave it in its slot.

        `aioserve.sampling` defines the draw. A row with a NaN or +inf, or with only -inf, is
        reported and disturbs no other; its slot gets a 0. Doesn't change `logits`.
        """

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Return the probability with which `draw` takes each token: float32 `[S, V]`. It is 0 for
        tokens that are left out, and in all of a row that `draw` reports. Doesn't change `logits`,
        float32 `[S, V]`.

        In torch, row by row. If rounding to float32 decides if a token is kept, a backend's own
        `draw` may decide otherwise, unless it overrides this as well.
        """
        rows.check_logits(logits)
        found = torch.zeros_like(logits)
        for i, temperature in enumerate(rows["temperature"].tolist()):
            row = logits[i].double()
            if row_error(float(row.max())) is not None:
                continue
            if temperature == 0:
                found[i, row.argmax()] = 1
                continue
            scores = scaled(row, temperature)
            kept = kept_tokens(scores, rows, i)
            if kept is None:
                found[i] = scores.softmax(0)
            else:
                found[i, kept] = scores[kept].softmax(0).float()
        return found

    def record(
        self,
        forward: Callable[[LayerOps[Any]], Any],
        shape: KVShape,
        dtype: torch.dtype,
    ) -> StepProgram | None:
        """Record a program of what `forward` computes from its ops, which is logits.

        `shape` is that of the KV pages, for any number of them, and `dtype` that of activations.
        None: this backend only computes op by op.
        """
        return None

    # -- layers

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> Tensor:
        check_norm(x, norm, residual, self.device)
        if residual is not None:
            x = residual.add_(x)
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def add_rows(self, x: Tensor, table: Tensor, ids: Tensor) -> None:
        """x += table[ids] in place: x `[T, H]`, table `[N, H]`, ids int32 `[T]`.

        Raises IndexError for an id that is no row.
        """
        check_tensor("x", x, x.dtype, (len(ids), table.shape[1]), self.device)
        x.add_(functional.embedding(ids, table))

    def add(self, x: Tensor, y: Tensor) -> None:
        check_tensor("y", y, x.dtype, x.shape, self.device)
        x.add_(y)

    def norm_columns(self, x: Tensor, norm: RMSNorm, first: int) -> None:
        columns = check_columns(x, norm, first, self.device)
        columns.copy_(self.rms_norm(columns, norm))

    def scale(self, x: Tensor, factor: float) -> None:
        check_tensor("x", x, x.dtype, x.shape, self.device)
        x.mul_(factor)

    @abstractmethod
    def rotary_kv_write(
        self, qkv: Tensor, at: KVLayer, rotation: Rotation | None, norms: HeadNorms | None
    ) -> None:
        """Normalise and rotate queries in place; write normalised, rotated keys and values to `at`.

        Rotary embedding after Su et al., "RoFormer", 2021, in the half-split order of GPT-NeoX, or
        interleaved. A rotation of fewer than D dimensions turns the first ones of each head.

        No value in the pages is NaN or infinite, since attention multiplies unseen ones by a weight
        of 0. A head's value with a NaN or infinity is written as 0, and its key as NaN.

        Args:
            qkv: `[T, (Hq + 2 * Hk) * D]`: the heads of queries, keys and values, one after the
                other. Only the queries change.
            rotation: None for a model without rotary embedding.
            norms: of each query and key head, before the rotation.
        """

    @abstractmethod
    def latent_write(
        self, queries: Tensor, latents: Tensor, at: KVLayer, rotation: Rotation, norm: RMSNorm
    ) -> None:
        """Rotate the end of each query head in place. Write normalised latents, and the rotated key
        that all heads share, to the latent pages `at`.

        R is the pages' `latent_rank` and D their `head_dim`. The last D - R numbers are rotated, as
        by `rotary_kv_write`, and the first R of latents are normalised.

        Latents of a token with a NaN or an infinity are written as 0, and its rotated key as NaN.

        Args:
            queries: `[T, Hq * D]`. Only the rotated part changes.
            latents: `[T, D]`, as projected.
            norm: of the latents, weight `[R]`.
        """

    @abstractmethod
    def paged_attention(
        self,
        qkv: Tensor,
        at: KVLayer,
        kind: AttentionKind,
        *,
        logit_rows_only: bool = False,
        log_sum_exp: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every query token to the cached keys and values of its sequence.

        Query head h reads KV head `h // (Hq // Hk)`. In latent pages with rank R, all heads read
        one row per token. The whole row is the key, and its first R numbers are the value.

        Args:
            qkv: as `rotary_kv_write` left it; its queries are read. This step's keys and values are
                in `at` already. For latent pages: only queries, as `latent_write` left them.
            logit_rows_only: attend only from the batch's `logit_rows`.
            log_sum_exp: float32 `[T, Hq]`, with `logit_rows_only` `[S, Hq]`, contiguous. Filled
                with the natural logarithm of the sum that weights were divided by, the sink
                included. It is -inf for a row that sees nothing. Read by `merge_attention`.

        Returns:
            `[T, Hq * D]`, contiguous; for latent pages `[T, Hq * R]`; with `logit_rows_only` S
            rows.
        """

    def merge_attention(
        self, out: Tensor, log_sum_exp: Tensor, part: Tensor, part_log_sum_exp: Tensor
    ) -> None:
        """Merge attention from the same queries over other keys into `out` and `log_sum_exp`.

        The result is attention over all these keys. Only one part may include sinks. A row whose
        log-sum-exp is -inf saw no key, and its content is never read. If neither part saw a key,
        the result is 0.

        Args:
            out, part: `[T, Hq * D]`, contiguous, of one dtype.
            log_sum_exp, part_log_sum_exp: float32 `[T, Hq]`, contiguous.
        """
        head_dim = check_merge(out, log_sum_exp, part, part_log_sum_exp, self.device)
        total = torch.logaddexp(log_sum_exp, part_log_sum_exp)
        heads = out.unflatten(1, (-1, head_dim))
        merged = torch.zeros(heads.shape, device=out.device)
        for rows, sums in ((heads, log_sum_exp), (part.view_as(heads), part_log_sum_exp)):
            seen = (sums != float("-inf"))[..., None]
            share = (sums - total).exp()[..., None]
            merged += torch.where(seen, rows * share, 0.0)
        heads.copy_(merged)
        log_sum_exp.copy_(total)

    def activated(self, x: Tensor, kind: Activation) -> Tensor:
        check_rows("x", x, self.device, "[T, I]")
        if kind == "relu_squared":
            return functional.relu(x).square_()
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> None:
        check_tensor("x", x, x.dtype, x.shape, self.device)
        check_tensor("gate", gate, torch.float32, (len(x), 1), self.device)
        x.copy_(x.float() * gate.sigmoid())

    def soft_cap(self, logits: Tensor, cap: float) -> None:
        check_tensor("logits", logits, torch.float32, logits.shape, self.device)
        logits.div_(cap).tanh_().mul_(cap)


class TensorOps(LayerOps[Tensor]):
    """Ops of one batch over `kv`, each done at once on a backend: the plain path."""

    __slots__ = ("_backend", "_batch", "_given", "_kv", "_states")

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        kv: KVCache,
        states: Tensor | None = None,
        hidden_in: Tensor | None = None,
    ) -> None:
        """`states` and `hidden_in` are those of `StepProgram.logits`."""
        self._backend = backend
        self._batch = batch
        self._kv = kv
        self._states = states
        self._hidden_in = hidden_in

    def embed(self, table: Embedding) -> Tensor:
        if isinstance(table, Linear):
            return table.rows(self._batch.token_ids)
        return functional.embedding(self._batch.token_ids, table)

    def hidden_in(self, columns: int) -> Tensor:
        if self._hidden_in is None or self._hidden_in.shape[1] != columns:
            raise ValueError(f"hidden_in must be rows of {columns} columns")
        return self._hidden_in.clone()

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=1)

    def scatter_columns(self, x: Tensor, columns: Tensor, size: int) -> Tensor:
        scattered = x.new_full((len(x), size), -torch.inf)
        scattered[:, columns] = x
        return scattered

    def add_positions(self, x: Tensor, table: Tensor) -> None:
        self._backend.add_rows(x, table, self._batch.positions)

    def add(self, x: Tensor, y: Tensor) -> None:
        self._backend.add(x, y)

    def norm_columns(self, x: Tensor, norm: RMSNorm, first: int) -> None:
        self._backend.norm_columns(x, norm, first)

    def scale(self, x: Tensor, factor: float) -> None:
        self._backend.scale(x, factor)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        return layer(x)

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> Tensor:
        return self._backend.rms_norm(x, norm, residual)

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> Tensor:
        return self._backend.layer_norm(x, norm, residual)

    def experts(self, x: Tensor, scores: Tensor, mixture: Mixture) -> Tensor:
        return mixture(x, mixture.route(scores))

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> None:
        self._backend.sigmoid_scale(x, gate)

    def rotary_kv_write(
        self, qkv: Tensor, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None:
        rotation = None if rotary is None else rotary.rotation
        at = KVLayer(self._batch, self._kv, layer)
        self._backend.rotary_kv_write(qkv, at, rotation, norms)

    def per_head(self, x: Tensor, layer: PerHeadLinear) -> Tensor:
        return layer(x)

    def latent_write(
        self, queries: Tensor, latents: Tensor, layer: int, rotary: RotarySource, norm: RMSNorm
    ) -> None:
        at = KVLayer(self._batch, self._kv, layer)
        self._backend.latent_write(queries, latents, at, rotary.rotation, norm)

    def paged_attention(
        self, qkv: Tensor, layer: int, kind: AttentionKind, *, logit_rows_only: bool
    ) -> Tensor:
        at = KVLayer(self._batch, self._kv, layer)
        return self._backend.paged_attention(qkv, at, kind, logit_rows_only=logit_rows_only)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return self._backend.gated(gate_up, gelu=gelu)

    def activated(self, x: Tensor, kind: Activation) -> Tensor:
        return self._backend.activated(x, kind)

    def logit_rows(self, x: Tensor) -> Tensor:
        return x[self._batch.logit_rows]

    def tap(self, x: Tensor, column: int) -> None:
        if self._states is None:
            raise ValueError("states must be a tensor, as hidden states of the batch are kept")
        self._states[:, column : column + x.shape[1]] = x

    def soft_cap(self, logits: Tensor, cap: float) -> None:
        self._backend.soft_cap(logits, cap)
