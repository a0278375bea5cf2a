"""Experts in every format that stores each expert's linear layers, and routers that stay floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aioserve.errors import ConfigError, ModelError
from aioserve.formats.weights import NATIVE
from aioserve.models.architecture import Experts, Tensor, parts_of
from aioserve.models.files import model_files
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.models.reading import WeightReading
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.blockwise import (
    load_in,
    storing_eight_bits,
    storing_four_bits,
)
from tests.models.quantization.checking import check_computes, check_stands_for
from tests.models.quantization.compressed import config_of, storing, storing_blocks, weights_of
from tests.models.quantization.dequantized import write_dequantized
from tests.models.quantization.test_gptq_awq import (
    awq_config,
    gptq_config,
    gptq_parts,
    storing_awq,
)
from tests.models.quantization.writers import CONFIG, numbers_of, write_quantized

MIXTURE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
"""Mixture in which each token has all experts, so that rounded scores change no choice."""


def gptq(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
    numbers = numbers_of(weight, 4, 32, act_order=True, rng=np.random.default_rng(4))
    return gptq_parts(numbers, version=1, with_index="groups"), numbers.floats


FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "gptq": (gptq_config(4, 32, desc_act=True, checkpoint_format="gptq"), gptq),
    "awq": (
        awq_config(4, 32) | {"modules_to_not_convert": ["gate", "shared_expert_gate"]},
        storing_awq(4, 32),
    ),
    "fp8": (
        {
            "quant_method": "fp8",
            "weight_block_size": [32, 16],
            "modules_to_not_convert": [
                *(f"model.layers.{i}.mlp.gate" for i in range(2)),
                *(f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)),
            ],
        },
        storing_blocks((32, 16), "weight_scale_inv"),
    ),
    "bitsandbytes, 8 bits": (load_in(8), storing_eight_bits),
    "bitsandbytes, nf4": (load_in(4), storing_four_bits("nf4", 64)),
    "compressed-tensors": (
        config_of(
            "pack-quantized", weights_of(4, 32), ignore=["lm_head", r"re:.*mlp.(\w+_)?gate$"]
        ),
        storing(4, 32, packed=True),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_a_checkpoint_stand_for_its_floats(tmp_path: Path, name: str) -> None:
    said, store = FORMATS[name]
    check_stands_for(*write_quantized(tmp_path, said, store, config=MIXTURE))


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_experts_are_quantised_while_they_are_loaded(tmp_path: Path, method: str) -> None:
    model = write_random_model(tmp_path / "model", MIXTURE, dtype="bfloat16")
    floats = write_dequantized(model, tmp_path / "floats", method)
    check_computes(model, floats, method)


def test_routers_are_never_rounded(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", MIXTURE, dtype="bfloat16")
    files = model_files(model)
    with WeightReading(files, formats=NATIVE, quantization="int4") as reading:
        routers = [
            tensor
            for one in parts_of(reading.read().config.layers, Experts)
            for tensor in (*parts_of(one.router, Tensor), *parts_of(one.shared_gate, Tensor))
        ]
        assert len(routers) == 4
        for tensor in routers:
            assert reading._stored[tensor].format.name == "bfloat16"

    copy = tmp_path / "copy"
    write_quantized_copy(model, copy, method_named("w8a8", None))
    before, after = (load_file(one / "model.safetensors") for one in (model, copy))
    for tensor in routers:
        assert torch.equal(before[tensor.name], after[tensor.name])
    ignored = json.loads((copy / "config.json").read_text())["quantization_config"]["ignore"]
    assert {tensor.name.removesuffix(".weight") for tensor in routers} <= {*ignored}


def test_a_text_calibrates_no_experts(tmp_path: Path) -> None:
    from aioserve.models.quantization.calibrated.methods import calibrated_method

    model = write_random_model(tmp_path / "model", MIXTURE, dtype="float32")
    windows = [np.arange(5, 15)]
    for name in ("gptq", "awq"):
        with pytest.raises(ConfigError, match="its experts see some of the tokens each"):
            write_quantized_copy(model, tmp_path / name, calibrated_method(name, 32, windows))


def test_experts_that_are_too_large_are_told_what_fits(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", MIXTURE, dtype="bfloat16")

    def taken(method: str | None) -> int:
        with WeightReading(model_files(model), formats=NATIVE, quantization=method) as reading:
            return reading.expected_memory.held_bytes

    plain, int8, int4 = (taken(method) for method in (None, "int8", "int4"))
    assert int4 < int8 < plain

    def refused(memory_bytes: int) -> str:
        with pytest.raises(ModelError) as error:
            WeightReading(model_files(model), formats=NATIVE, memory_bytes=memory_bytes)
        return str(error.value)

    assert refused(int8).endswith(
        f"the weights take {plain} bytes in bfloat16, and there are {int8} bytes of memory: with "
        f"quantization='int8' they take {int8}, which fits"
    )
    assert f"with quantization='int4' they take {int4}, which fits" in refused(int4)
    assert f"with quantization='int4' they take {int4}, which doesn't fit either" in (
        refused(int4 - 1)
    )
