"""Rounds weights one input after the other, and takes each one's error off those that follow.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022, section 3.3. With inputs X [tokens, in] of a layer and H = X.T X, the error that counts is
`|X (W - Q).T|`; Cholesky's factor U of the inverse of H says how much of an input's error the
inputs behind it can make up for. Inputs come by falling H[i, i] ("act-order"), with the scales
of all groups chosen beforehand ("static groups"), so that files keep the inputs' own order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import WeightsError
from aioserve.models.stored import Floats

__all__ = ["ErrorFeedback"]

DAMPING = 0.01
"""Share of the mean of H[i, i] that is added to each of them."""
_BLOCK = 128
"""Inputs whose errors are taken off all behind them at once."""
_OUTPUTS = 256
"""Outputs of a block that are rounded together: with its inputs they fit a core's cache."""


class ErrorFeedback:
    """For the layers that have these second moments of their inputs: float32 [in, in].

    Raises `WeightsError` for moments of which no damping makes a matrix that can be inverted.
    """

    def __init__(self, moments: Tensor) -> None:
        self.importance: Floats = moments.diagonal().cpu().numpy().copy()
        """Second moment of each input, float32 [in]."""
        self._order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        ordered = moments[self._order][:, self._order]
        self._upper = _factor(ordered)

    def nearest(self, weight: Floats, scales: Floats, group_size: int) -> np.ndarray:
        """The values, int8 [out, in] within [-8, 7], that stand for the weight float32 [out, in]
        with these scales, float32 [out, groups]."""
        order, upper = self._order, self._upper
        left = torch.from_numpy(weight)[:, order].T.contiguous()  # [in, out]: rows are walked
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
    """Round the weights `left` of a block of inputs, [in, out], to `values`, and take the `errors`
    of each input off those behind it.

    On one thread: these are thousands of short operations, and threads that wait for each other
    after every one take several times as long where something else runs on the machine.
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
    """The upper triangle U with U.T @ U = inverse of the damped moments."""
    mean = float(moments.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    for _ in range(4):
        damped = moments.double()
        damped.diagonal().add_(damping)
        # Turned by half a turn, the inverse of a lower factor is the upper factor of the inverse.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            unit = torch.eye(len(lower), dtype=lower.dtype)
            inverse = torch.linalg.solve_triangular(lower, unit, upper=False)
            return inverse.flip(0, 1).float()
        damping *= 10
    raise WeightsError("the second moments of its inputs can't be inverted")
