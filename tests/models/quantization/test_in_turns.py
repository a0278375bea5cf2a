"""Quantised weights whose files have rows of queries, keys and values head by head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.quantization.blockwise import load_in, storing_eight_bits, storing_four_bits
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.compressed import config_of, storing, storing_blocks, weights_of
from tests.models.quantization.test_gptq_awq import (
    awq_config,
    gptq_config,
    gptq_parts,
    storing_awq,
)
from tests.models.quantization.writers import numbers_of, write_quantized
from tests.parity.tiny_models import CONFIGS

Store = Callable[[str, np.ndarray], tuple[dict[str, torch.Tensor], np.ndarray]]


def in_gptq(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    numbers = numbers_of(weight, 4, 16, symmetric=False, rng=np.random.default_rng(1))
    return gptq_parts(numbers, version=1), numbers.floats


WRITTEN: dict[str, tuple[dict[str, Any], Store]] = {
    "gptq": (gptq_config(4, 16), in_gptq),
    "awq": (awq_config(4, 16), storing_awq(4, 16)),
    "nf4": (load_in(4), storing_four_bits("nf4", 64)),
    "rows": (load_in(8), storing_eight_bits),
    "groups": (config_of("pack-quantized", weights_of(4, 16)), storing(4, 16, packed=True)),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        storing_blocks((16, 16), "weight_scale_inv"),
    ),
}


@pytest.mark.parametrize("name", ["neox", "neox-sequential"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_rows_in_turns_are_those_of_the_floats(tmp_path: Path, kind: str, name: str):
    said, store = WRITTEN[kind]
    check_stands_for(*write_quantized(tmp_path, said, store, config=CONFIGS[name]))
