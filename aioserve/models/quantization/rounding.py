"""Rounding of floats to integers with a scale for each group of inputs.

Rounding is symmetric: values lie around zero, and groups have no minimums. In 4 bits, minimums
would lower the error further, but take as much memory as the scales.
"""

from __future__ import annotations

import numpy as np

from aioserve.errors import WeightsError
from aioserve.models.decoding import rounded
from aioserve.models.stored import Floats, IntegerForm
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["FORMS", "nearest_integers", "quotients", "round_to_integers"]

FORMS = {
    "int8": IntegerForm(bits=8, group_size=128, has_minimums=False, scales="bfloat16"),
    "int4": IntegerForm(bits=4, group_size=32, has_minimums=False, scales="bfloat16"),
}

_INT4_LARGEST = (8.0, 8.5, 7.5, 7.0)
"""Candidates for the magnitude to which the largest weight of a group is scaled.

Values end at -8: 8.0 keeps that weight exact, and 8.5 cuts it off. The candidate with the least
squared error is taken, or the first of equal ones."""


def round_to_integers(
    weight: Floats, form: IntegerForm, importance: Floats | None = None
) -> WeightIntegers:
    """Round a weight, float32 [out, in], to 4 or 8 bits. A group of zeros has the scale 0.

    With 4 bits, `importance`, float32 [in], weighs the squared error of each input. Raises
    `WeightsError` for NaN and infinity.
    """
    if not np.isfinite(weight).all():
        raise WeightsError("NaN and infinity can't be quantised")
    rows, columns = weight.shape
    missing = -columns % form.group_size
    padded = np.pad(weight, ((0, 0), (0, missing))) if missing else weight
    groups = np.ascontiguousarray(padded).reshape(rows, -1, form.group_size)
    if form.bits == 8:
        values, scales = _int8(groups)
    else:
        counts = np.ones(columns, np.float32) if importance is None else importance
        values, scales = _int4(groups, np.pad(counts, (0, missing)).reshape(-1, form.group_size))
    return WeightIntegers(
        values=values.astype(np.int8).reshape(rows, -1)[:, :columns],
        scales=scales[:, :, 0],
        zeros=None,
        minimums=None,
        group_size=form.group_size,
        bits=form.bits,
    )


def nearest_integers(weight: Floats, scales: Floats, form: IntegerForm) -> np.ndarray:
    """Round a weight, float32 [out, in], with given scales: int8 [out, in].

    `scales`, float32 [out, groups], are those of `round_to_integers`, rounded to a file's dtype."""
    each = np.repeat(scales, form.group_size, axis=1)[:, : weight.shape[1]]
    least, largest = (-127, 127) if form.bits == 8 else (-8, 7)
    return np.clip(np.rint(quotients(weight, each)), least, largest).astype(np.int8)


def _int8(groups: Floats) -> tuple[Floats, Floats]:
    scales = _short(np.abs(groups).max(axis=2, keepdims=True) / np.float32(127))
    return np.clip(np.rint(quotients(groups, scales)), -127, 127), scales


def _int4(groups: Floats, importance: Floats) -> tuple[Floats, Floats]:
    at = np.abs(groups).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(groups, at, axis=2)
    shares = quotients(groups, largest)
    best_error = np.full_like(largest, np.inf)
    best_scales = np.zeros_like(largest)
    for becomes in map(np.float32, _INT4_LARGEST):
        values = np.clip(np.rint(shares * -becomes), -8, 7)
        errors = np.square(values / -becomes - shares) * importance
        error = errors.sum(axis=2, keepdims=True)
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best_scales, largest / -becomes, where=better)
    best_scales = _short(best_scales)
    return np.clip(np.rint(quotients(groups, best_scales)), -8, 7), best_scales


def quotients(groups: Floats, by: Floats) -> Floats:
    """Divide `groups` by `by`, with zero where the divisor is zero."""
    return np.divide(groups, by, out=np.zeros_like(groups), where=by != 0)


def _short(scales: Floats) -> Floats:
    """Round scales to bfloat16, which kernels read faster, and which has the range of float32."""
    upper = rounded(scales, "bfloat16").view(np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32)
