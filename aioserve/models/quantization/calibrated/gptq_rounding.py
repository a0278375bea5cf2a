"""Rounding of weights input by input, where later inputs compensate for the errors of earlier ones.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022, section 3.3. For inputs X [tokens, in] of a layer and H = X.T X, it minimises
`|X (W - Q).T|`. Cholesky's factor U of the inverse of H tells how later inputs compensate for an
input's error. Inputs come in the order of falling H[i, i] ("act-order"). Scales of all groups are
chosen beforehand ("static groups"), so that files keep the inputs' own order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import WeightsError
from aioserve.models.stored import Floats

__all__ = ["ErrorFeedback"]

DAMPING = 0.01
"""Share of the mean of H[i, i] that is added to each H[i, i]."""
_BLOCK = 128
"""Number of inputs whose errors are passed on to all later inputs at once."""
_OUTPUTS = 256
"""Number of outputs that are rounded together, so that a block of them fits a core's cache."""


class ErrorFeedback:
    """Rounding for layers whose inputs have the second moments `moments`, float32 [in, in].

    Raises `WeightsError` if damping does not make the moments invertible.
    """

    def __init__(self, moments: Tensor) -> None:
        self.importance: Floats = moments.diagonal().cpu().numpy().copy()
        """Second moment of each input, float32 [in]."""
        self._order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        ordered = moments[self._order][:, self._order]
        self._upper = _factor(ordered)

    def nearest(self, weight: Floats, scales: Floats, group_size: int) -> np.ndarray:
        """Round a weight, float32 [out, in], to values within [-8, 7]: int8 [out, in].

        `scales` are float32 [out, groups]."""
        order, upper = self._order, self._upper
        left = torch.from_numpy(weight)[:, order].T.contiguous()  # [in, out]: loops go by rows
        each = torch.from_numpy(scales).T[order // group_size]
        values = torch.empty_like(left)
        count, outputs = left.shape
        for start in range(0, count, _BLOCK):
            end = min(start + _BLOCK, count)
            block, errors = slice(start, end), torch.empty_like(left[start:end])
            for first in range(0, outputs, _OUTPUTS):
                some = slice(first, first + _OUTPUTS)
                _round_block(
                    left[block, some].numpy(),
                    each[block, some].numpy(),
                    upper[block, block].numpy(),
                    values[block, some].numpy(),
                    errors[:, some].numpy(),
                )
            left[end:] -= upper[block, end:].T @ errors
        found = np.empty(weight.shape, np.int8)
        found[:, order.numpy()] = values.T.numpy().astype(np.int8)
        return found


def _round_block(
    left: Floats, scales: Floats, upper: Floats, values: Floats, errors: Floats
) -> None:
    """Round the weights `left` of a block of inputs, [in, out], to `values`.

    Each input's `errors` are passed on to the later inputs of the block. One thread does all of it:
    several threads would wait for each other after each of thousands of short operations. They take
    several times as long beside other work on the machine.
    """
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    spread = np.empty(left.shape, np.float32)
    for i, value in enumerate(values):
        np.divide(left[i], divisors[i], out=value)
        np.rint(value, out=value)
        np.maximum(value, -8, out=value)
        np.minimum(value, 7, out=value)
        error = np.divide(left[i] - value * scales[i], upper[i, i], out=errors[i])
        left[i + 1 :] -= np.multiply(upper[i, i + 1 :, None], error, out=spread[i + 1 :])


def _factor(moments: Tensor) -> Tensor:
    """Compute the upper triangle U with U.T @ U = inverse of the damped moments."""
    mean = float(moments.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    for _ in range(4):
        damped = moments.double()
        damped.diagonal().add_(damping)
        # With both axes flipped, the inverse of a lower factor is the upper factor of the inverse.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            unit = torch.eye(len(lower), dtype=lower.dtype)
            inverse = torch.linalg.solve_triangular(lower, unit, upper=False)
            return inverse.flip(0, 1).float()
        damping *= 10
    raise WeightsError("the second moments of its inputs can't be inverted")
