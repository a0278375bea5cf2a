"""Checks that formats of weights keep their contract, on random weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from aioserve.errors import AioserveError
from aioserve.isolation import shown
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.declared import (
    WeightFormat,
    check_weight_format_value,
    scheme_of,
)
from aioserve.models.quantization.scheme import Parts
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.stored import Floats

__all__ = ["check_weight_format"]

SHAPES = ((64, 128), (96, 64), (5, 32))
LEAST_LIKENESS = 0.9
"""Least correlation of decoded weights with those that were encoded."""


def check_weight_format(written: WeightFormat, *, seed: int = 0) -> None:
    """Raise `AssertionError` unless a format of weights

    - has fields that can be used, an `example`, and `encode`;
    - reads the example, and asks for the parts that `encode` gives;
    - decodes float32 of the right shape, the same numbers in whatever ranges of rows;
    - decodes what is like the random weights, drawn by `seed`, that were encoded.

    Needs safetensors.
    """
    try:
        check_weight_format_value(written)
        if not written.example or written.encode is None:
            raise ValueError("must have an example and encode, to be checked")
    except ValueError as error:
        raise AssertionError(f"the format {error}") from error
    noise = np.random.default_rng(seed)
    for shape in SHAPES:
        weight = noise.standard_normal(shape, np.float32) * np.float32(0.1)
        try:
            _check_weight(written, weight)
        except AioserveError as error:
            raise AssertionError(f"a weight {list(shape)} can't be read: {error}") from error


def _check_weight(written: WeightFormat, weight: Floats) -> None:
    from safetensors.numpy import save_file

    encode = written.encode
    if encode is None:
        raise AssertionError("the format must have encode, to be checked")
    try:
        arrays = dict(encode(weight.copy()))
    except Exception as error:
        raise AssertionError(f"encode raised {shown(error)}") from error
    scheme = scheme_of("checked", written, "checked")(Fields(written.example, "the example"))
    rows, columns = weight.shape
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        save_file({f"layer.{name}": array for name, array in arrays.items()}, path)
        file = SafetensorsFile(path)
        try:
            parts = {name.removeprefix("layer."): part for name, part in file.tensors.items()}
            stored = scheme.linear(Tensor("layer.weight", (rows, columns)), Parts("layer", parts))
            whole = stored.floats()
            for first, end in ((0, 1), (1, rows), (rows - 1, rows), (rows // 3, rows // 2 + 1)):
                for found in (stored.floats(first, end), stored.sliced(first, end).floats()):
                    if not np.array_equal(found, whole[first:end]):
                        raise AssertionError(
                            f"rows {first} to {end} of a weight {[rows, columns]} are decoded to "
                            "other numbers than within all rows"
                        )
        finally:
            file.close()
    likeness = float(np.corrcoef(whole.ravel(), weight.ravel())[0, 1])
    if not likeness >= LEAST_LIKENESS:
        raise AssertionError(
            f"decoded weights must be like those that were encoded, with a correlation of at least "
            f"{LEAST_LIKENESS}, got {likeness:.3g}"
        )
