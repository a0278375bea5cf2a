"""Methods that scale a layer's inputs against its weight before they round.

`x @ W.T = (x / s) @ (W * s).T`. The source of x divides it: the norm before a layer, the values
before the output projection, the up projection before the down projection. The copy therefore has
the architecture of the model. The method decides the purpose of s:

- SmoothQuant (Xiao et al., 2022, section 4): activations are rounded to 8 bits as well, and s makes
  their outliers smaller. At norms, s = max|x| ** alpha / max|W| ** (1 - alpha).
- AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023, section 3.2): weights are
  rounded to 4 bits, and s enlarges weights of large inputs. With s = mean|x| ** alpha, alpha is the
  one of a grid that leaves the least error in the layer's outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.architecture import parts_of
from aioserve.models.decoding import rounded
from aioserve.models.quantization.calibrated.layer_inputs import Windows, show_inputs
from aioserve.models.quantization.method import (
    Method,
    OpenModel,
    RoundingMethod,
    Scaling,
    Shapes,
    WriteParts,
    scales_of,
)
from aioserve.models.quantization.word_storing import AwqStoring
from aioserve.models.stored import PLAIN, Floats
from aioserve.ops import Linear

__all__ = ["ActivationAware", "ScaleChoice", "Scaled", "Shared", "SmoothQuant"]

_GRID = 20
"""Number of alphas that AWQ tries, from 0 upwards."""
_SAMPLE = 1024
"""Most tokens by which AWQ compares alphas."""
_LEAST = np.float32(1e-4)
"""Lower bound of numbers before their powers are taken, for inputs that are always zero."""


Shared = Callable[[Floats], Floats]
"""Function that makes numbers [in] equal for inputs that must have the same scale."""


class ScaleChoice(ABC):
    """Choice of the factors for a layer's inputs."""

    everywhere: bool
    """True if inputs that don't come from a norm are scaled, too."""

    @abstractmethod
    def scales(self, x: Tensor, weight: Floats, precision: str, shared: Shared) -> Floats:
        """Choose factors, float32 [in], for a weight [out, in] with inputs x `[tokens, in]`.

        `precision` is that of the weight's scales, F32 or BF16. Sizes of inputs must go through
        `shared` before they are used.
        """


class SmoothQuant(ScaleChoice):
    everywhere = False

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def scales(self, x: Tensor, weight: Floats, precision: str, shared: Shared) -> Floats:
        inputs = np.maximum(shared(_numpy(x.abs().amax(0))), _LEAST)
        weights = np.maximum(np.abs(weight).max(axis=0), _LEAST)
        return np.maximum(inputs**self._alpha / weights ** (1 - self._alpha), _LEAST)


class ActivationAware(ScaleChoice):
    everywhere = True

    def __init__(self, storing: AwqStoring) -> None:
        self._storing = storing

    def scales(self, x: Tensor, weight: Floats, precision: str, shared: Shared) -> Floats:
        sizes = np.maximum(shared(_numpy(x.abs().float().mean(0))), _LEAST)
        some = _numpy(x[:: -(-len(x) // _SAMPLE)])
        best, least_error = np.ones_like(sizes), np.inf
        for step in range(_GRID):
            scales = sizes ** np.float32(step / _GRID)
            scales /= np.sqrt(scales.max() * scales.min())
            read_back = self._storing.once_rounded(weight * scales, precision) / scales
            error = float(np.square(some @ (read_back - weight).T, dtype=np.float32).sum())
            if error < least_error:
                best, least_error = scales, error
        return best


class Scaled(Method):
    """Method `inner`, on weights that are scaled as `choice` decides with windows of text."""

    def __init__(self, inner: RoundingMethod, choice: ScaleChoice, windows: Windows) -> None:
        self.name: str = inner.name
        self._inner = inner
        self._choice = choice
        self._windows = windows

    def config(self, ignored: list[str]) -> dict[str, Any]:
        return self._inner.config(ignored)

    def check(self, module: str, rows: int, columns: int) -> None:
        self._inner.check(module, rows, columns)

    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        return self._inner.parts(rows, columns, scales)

    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[architecture.Tensor, Floats]:
        folding = _Folding(model)
        places = folding.places(everywhere=self._choice.everywhere)

        def visit(described: architecture.Linear, layer: Linear, x: Tensor) -> Linear:
            if (place := places.get(described)) is not None:
                weight = np.concatenate([model.weights[one].floats() for one in described.weights])
                precision = scales_of(model.weights[described.weights[0]])
                scales = self._choice.scales(x, weight, precision, place.shared)
                place.fold(described, scales)
            return layer

        show_inputs(model.path, self._windows, visit)
        return self._inner.encode_scaled(model, write, folding.scaling)


class _Place(NamedTuple):
    """Source of a layer's inputs."""

    fold: Callable[[architecture.Linear, Floats], None]
    """Multiply the layer's columns by factors, and divide the source of its inputs by them."""
    shared: Shared = np.asarray


class _Folding:
    """Scaling of a model, while it is being computed."""

    def __init__(self, model: OpenModel) -> None:
        self._model = model
        self._columns: dict[architecture.Tensor, Floats] = {}
        self._rows: dict[architecture.Tensor, Floats] = {}
        self._vectors: dict[architecture.Tensor, Floats] = {}

    @property
    def scaling(self) -> Scaling:
        return Scaling(self._columns, self._rows, self._vectors)

    def places(self, *, everywhere: bool) -> dict[architecture.Linear, _Place]:
        """Find the layers whose inputs can be scaled: after norms only, or `everywhere`."""
        found: dict[architecture.Linear, _Place] = {}
        for layer in self._model.config.layers:
            mlp = next(parts_of(layer.feed_forward, architecture.MLP))
            # The norm before latents feeds several layers, so that none of them is scaled.
            attention = layer.mixer if isinstance(layer.mixer, architecture.Attention) else None
            qkv = None if attention is None else attention.qkv
            shared = layer.parallel and layer.feed_forward_norm is None
            for norm, described in (
                (layer.mixer_norm, qkv),
                (layer.feed_forward_norm, mlp.up),
            ):
                if norm is not None and described is not None and not shared:
                    found[described] = _Place(partial(self._at_norm, norm))
            if everywhere and attention is not None:
                found[attention.output] = _Place(
                    partial(self._at_values, attention), partial(_alike, attention.heads)
                )
            if everywhere and mlp.gated:
                found[mlp.down] = _Place(partial(self._at_up, mlp.up))
        return found

    def _at_norm(
        self, norm: architecture.Norm, described: architecture.Linear, scales: Floats
    ) -> None:
        weight, offset = self._vector(norm.weight), np.float32(norm.weight_offset)
        dtype = self._dtype(norm.weight)
        new = _as_stored((weight + offset) / scales - offset, dtype)
        before, after = weight + offset, new + offset
        if norm.centered:  # a LayerNorm multiplies by the rounded sum
            before, after = _as_stored(before, dtype), _as_stored(after, dtype)
        # The layer's weight compensates for the rounding of the norm.
        can = (before != 0) & (after != 0) & np.isfinite(new)
        quotients = before / np.where(can, after, 1)
        exact = np.where(can, quotients, 1).astype(np.float32)
        self._vectors[norm.weight] = np.where(can, new, weight)
        if norm.bias is not None:
            self._vectors[norm.bias] = self._vector(norm.bias) / exact
        self._multiply_columns(described, exact)

    def _at_values(
        self, attention: architecture.Attention, described: architecture.Linear, scales: Floats
    ) -> None:
        heads = attention.heads
        values = scales.reshape(heads.kv, -1, heads.dim)[:, 0].reshape(-1)
        above = np.ones(heads.query_size + heads.kv_size, np.float32)
        self._divide_rows(attention.qkv, np.concatenate([above, values]))
        self._multiply_columns(described, scales)

    def _at_up(
        self, up: architecture.Linear, described: architecture.Linear, scales: Floats
    ) -> None:
        self._divide_rows(up, np.concatenate([np.ones_like(scales), scales]))
        self._multiply_columns(described, scales)

    def _multiply_columns(self, described: architecture.Linear, scales: Floats) -> None:
        self._columns |= dict.fromkeys(described.weights, scales)

    def _divide_rows(self, described: architecture.Linear, scales: Floats) -> None:
        for tensor, own in _split(described.weights, scales):
            if (own != 1).any():
                self._rows[tensor] = own
        for tensor, own in _split(described.biases, scales):
            if (own != 1).any():
                self._vectors[tensor] = self._vector(tensor) / own

    def _vector(self, tensor: architecture.Tensor) -> Floats:
        return self._model.weights[tensor].floats()[:, 0]

    def _dtype(self, tensor: architecture.Tensor) -> str:
        return PLAIN[self._model.weights[tensor].parts["weight"].dtype]


def _split(
    tensors: Sequence[architecture.Tensor], stacked: Floats
) -> Iterator[tuple[architecture.Tensor, Floats]]:
    """Split numbers, one for each row of stacked tensors, into those of each tensor."""
    top = 0
    for tensor in tensors:
        yield tensor, stacked[top : top + tensor.rows]
        top += tensor.rows


def _alike(heads: architecture.Heads, of_inputs: Floats) -> Floats:
    """Replace numbers by their means over the query heads that read the same values."""
    groups = of_inputs.reshape(heads.kv, -1, heads.dim)
    means = groups.mean(axis=1, keepdims=True)
    return np.broadcast_to(means, groups.shape).reshape(-1)


def _as_stored(values: Floats, dtype: str) -> Floats:
    """Round numbers to a file's dtype, in float32."""
    array = rounded(np.ascontiguousarray(values, np.float32), dtype)
    if dtype != "bfloat16":
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _numpy(x: Tensor) -> Floats:
    return x.float().cpu().numpy()
