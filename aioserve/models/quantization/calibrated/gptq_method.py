"""Method GPTQ: weights are rounded by `gptq_rounding` while the model computes a text.

Each layer is rounded for the inputs that it gets from the rounded layers before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import WeightsError
from aioserve.models import architecture
from aioserve.models.quantization.calibrated.gptq_rounding import ErrorFeedback
from aioserve.models.quantization.calibrated.layer_inputs import (
    Windows,
    second_moments,
    show_inputs,
)
from aioserve.models.quantization.method import OpenModel, WriteParts, scales_of
from aioserve.models.quantization.rounding import round_to_integers
from aioserve.models.quantization.word_storing import GptqStoring, short_scales
from aioserve.models.stored import Floats, IntegerForm, StoredLinear
from aioserve.models.weight_integers import WeightIntegers
from aioserve.ops import Linear
from aioserve.ops.reference import ReferenceBackend

__all__ = ["Gptq"]


class Gptq(GptqStoring):
    """GPTQ with the second moments of inputs for windows of text."""

    def __init__(self, group_size: int, windows: Windows) -> None:
        super().__init__(group_size)
        self._windows = windows

    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[architecture.Tensor, Floats]:
        backend = ReferenceBackend()

        def visit(described: architecture.Linear, layer: Linear, x: Tensor) -> Linear:
            feedback = ErrorFeedback(second_moments(x))
            weights: list[Floats] = []
            for tensor in described.weights:
                integers = self._rounded(model.weights[tensor], feedback)
                write(tensor, 0, tensor.rows, self.stored(integers.values, integers.scales))
                weights.append(integers.dequantized())
            biases = [model.weights[tensor].floats()[:, 0] for tensor in described.biases]
            return backend.linear(
                torch.from_numpy(np.concatenate(weights)).to(layer.dtype),
                torch.from_numpy(np.concatenate(biases)).to(layer.dtype) if biases else None,
            )

        show_inputs(model.path, self._windows, visit)
        return {}

    def _rounded(self, stored: StoredLinear, feedback: ErrorFeedback) -> WeightIntegers:
        form = IntegerForm(4, self.group_size, False)
        weight = stored.floats()
        try:
            nearest = round_to_integers(weight, form, feedback.importance)
            scales = short_scales(nearest.scales, scales_of(stored))
        except WeightsError as error:
            raise WeightsError(f"{stored.name}: {error}") from error
        values = feedback.nearest(weight, scales, self.group_size)
        return WeightIntegers(values, scales, None, None, self.group_size, 4)
