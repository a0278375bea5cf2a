"""The files of a new weight format's project that say what it is; see `_plugin_project`."""

from __future__ import annotations

__all__ = ["FORMAT", "README", "TESTS"]

FORMAT = '''\
"""Weights of 8-bit integers, with a scale for each output."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from aioserve import WeightFormat, WeightFormatSpec, WeightPart, WeightReader, hookimpl
from aioserve.architectures import Fields


class $name(WeightReader):
    """Weights are integers times the scale of their row."""

    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        return {
            "numbers": WeightPart(("I8",), (rows, columns)),
            "scales": WeightPart(("F32",), (rows, 1)),
        }

    def decode(
        self, parts: Mapping[str, np.ndarray], first: int, end: int, columns: int
    ) -> np.ndarray:
        return parts["numbers"].astype(np.float32) * parts["scales"]


def read(config: Fields) -> $name:
    """The reader of a checkpoint with this quantization_config."""
    if config.integer("bits", 8) != 8:
        config.unsupported("bits", "numbers have 8 bits")
    return $name()


def encode(weight: np.ndarray) -> Mapping[str, np.ndarray]:
    """A weight as files have it, for checks."""
    scales = np.abs(weight).max(axis=1, keepdims=True).astype(np.float32) / 127
    return {"numbers": np.rint(weight / scales).astype(np.int8), "scales": scales}


FORMAT = WeightFormat(read=read, example={"bits": 8}, encode=encode)


@hookimpl
def aioserve_weight_formats() -> list[WeightFormatSpec]:
    return [WeightFormatSpec("$module", FORMAT, "8-bit integers, a scale for each output", api=1)]
'''

TESTS = '''\
"""The format keeps its contract, and refuses what it doesn't know."""

from __future__ import annotations

import numpy as np
import pytest
from aioserve import UnsupportedModelError
from aioserve.architectures import Fields
from aioserve.testing import check_weight_format
from $module import FORMAT, encode, read


def test_it_keeps_the_contract() -> None:
    check_weight_format(FORMAT)


def test_numbers_are_off_by_half_a_step_at_most() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    parts = encode(weight)
    decoded = read(Fields({"bits": 8}, "config.json")).decode(parts, 0, 8, 64)
    assert np.all(np.abs(decoded - weight) <= 0.51 * parts["scales"])


def test_other_bits_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bits"):
        read(Fields({"bits": 3}, "config.json"))
'''

README = """\
# $distribution

A format of weights for aioserve: 8-bit integers, with a scale for
each output. They are decoded to floats while a model is loaded.

    pip install --editable '.[test]'
    aioserve plugins                    # it is listed
    aioserve plugins check $module
    pytest

A model directory is of this format if its config.json says

    "quantization_config": {"quant_method": "$module", "bits": 8}

and is served as any other: aioserve serve path/to/model
"""
