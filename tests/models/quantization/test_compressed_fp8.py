"""Checkpoints of compressed-tensors and of floats of 8 bits: each variant, and mixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.models.files import model_files
from aioserve.models.quantization.packing import E4M3, e8m0
from aioserve.models.quantization.scheme import matches
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.writers import Numbers, numbers_of, pack, write_quantized

Store = Callable[[str, np.ndarray], tuple[dict[str, torch.Tensor], np.ndarray]]


def test_every_float_of_eight_bits_is_what_torch_makes_of_it():
    every = torch.arange(256, dtype=torch.uint8)
    floats = every.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, floats, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3), np.signbit(floats))
    exponents = every.view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(e8m0(every.numpy()), exponents, equal_nan=True)


# -- integers


def weights_of(bits: int, group_size: int | None = None, **other: Any) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    said = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size}
    return said | {"symmetric": False, **other}


def config_of(format_: str, weights: dict[str, Any], **other: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **other,
    }


def integer_parts(numbers: Numbers, *, packed: bool, zeros: str = "packed") -> dict[str, Any]:
    """zeros: "packed" or "plain"."""
    middle = 2 ** (numbers.bits - 1)
    parts: dict[str, Any] = {"weight_scale": numbers.scales.astype(np.float16)}
    if packed:
        parts["weight_packed"] = pack(numbers.values.T, numbers.bits).T
        parts["weight_shape"] = np.array(numbers.values.shape, np.int64)
    else:
        parts["weight"] = (numbers.values - middle).astype(np.int8)
    if zeros == "packed" and packed:
        parts["weight_zero_point"] = pack(numbers.zeros, numbers.bits)
    else:
        parts["weight_zero_point"] = (numbers.zeros - middle).astype(np.int8)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def storing(bits: int, group_size: int, **how: Any) -> Store:
    rng = np.random.default_rng(bits)
    symmetric = how.pop("symmetric", False)
    act_order = how.pop("act_order", False)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        numbers = numbers_of(
            weight, bits, group_size, symmetric=symmetric, act_order=act_order, rng=rng
        )
        parts = integer_parts(numbers, **how)
        if symmetric:
            del parts["weight_zero_point"]
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(numbers.index.astype(np.int32))
        return parts, numbers.floats

    return store


@pytest.mark.parametrize("zeros", ["packed", "plain"])
@pytest.mark.parametrize("group_size", [16, 32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(tmp_path: Path, bits: int, group_size: int | None, zeros: str):
    store = storing(bits, group_size or -1, packed=True, zeros=zeros)
    said = config_of("pack-quantized", weights_of(bits, group_size))
    check_stands_for(*write_quantized(tmp_path, said, store))


@pytest.mark.parametrize("format_", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_as_they_are(tmp_path: Path, bits: int, format_: str):
    store = storing(bits, -1, packed=False)
    check_stands_for(*write_quantized(tmp_path, config_of(format_, weights_of(bits)), store))


def test_symmetric_integers_with_scales_of_activations_that_are_left_unread(tmp_path: Path):
    integers = storing(8, -1, packed=False, symmetric=True)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        parts, floats = integers(module, weight)
        return parts | {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1)}, floats

    said = config_of("int-quantized", weights_of(8, symmetric=True))
    check_stands_for(*write_quantized(tmp_path, said, store))


def test_one_scale_for_a_whole_weight(tmp_path: Path):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        numbers = numbers_of(weight, 8, -1, symmetric=True, rng=rng)
        numbers.scales[:] = numbers.scales[0, 0]
        parts = integer_parts(numbers, packed=False)
        parts["weight_scale"] = torch.from_numpy(numbers.scales[0, :1].copy())
        del parts["weight_zero_point"]
        return parts, numbers.floats

    said = config_of("int-quantized", weights_of(8, strategy="tensor", symmetric=True))
    check_stands_for(*write_quantized(tmp_path, said, store))


def test_groups_in_the_order_of_activations_from_old_files(tmp_path: Path):
    store = storing(4, 16, packed=True, act_order=True)
    said = config_of("pack-quantized", weights_of(4, 16, actorder="group"))
    check_stands_for(*write_quantized(tmp_path, said, store))


# -- floats of 8 bits


def float8(weight: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """The weight in E4M3, and what it stands for with these scales of each number."""
    narrow = torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)
    return narrow, narrow.float().numpy() * scales


def expanded(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(*shape):
        whole[row, column] = scales[row // block[0], column // block[1]]
    return whole


def storing_blocks(block: tuple[int, int], name: str, kind: str = "float") -> Store:
    rng = np.random.default_rng(3)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        shape = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        exponents = rng.integers(118, 123, shape).astype(np.uint8)
        scales = rng.uniform(0.001, 0.01, shape).astype(np.float32)
        stored = torch.from_numpy(scales)
        if kind != "float":
            scales = np.exp2(exponents.astype(np.float32) - 127)
            stored = torch.from_numpy(exponents)
            stored = stored.view(torch.float8_e8m0fnu) if kind == "e8m0" else stored
        narrow, floats = float8(weight, expanded(scales, weight.shape, block))
        return {"weight": narrow, name: stored}, floats

    return store


@pytest.mark.parametrize("kind", ["float", "e8m0", "u8"])
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (40, 24)])
def test_blocks_of_floats_that_do_not_divide_the_weight(
    tmp_path: Path, block: tuple[int, int], kind: str
):
    said = {"quant_method": "fp8", "weight_block_size": list(block)}
    store = storing_blocks(block, "weight_scale_inv", kind)
    check_stands_for(*write_quantized(tmp_path, said, store))


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed-tensors"])
@pytest.mark.parametrize("shape", ["scalar", "one", "channel", "column"])
def test_a_scale_of_the_weight_or_of_each_output(tmp_path: Path, shape: str, method: str):
    rng = np.random.default_rng(3)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        rows = len(weight) if shape in ("channel", "column") else 1
        scales = rng.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
        narrow, floats = float8(weight, np.broadcast_to(scales, weight.shape))
        sizes = {"scalar": (), "one": (1,), "channel": (rows, 1), "column": (rows,)}
        stored = torch.from_numpy(scales.reshape(sizes[shape]))
        return {"weight": narrow, "weight_scale": stored, "input_scale": torch.ones(())}, floats

    said: dict[str, Any] = {"quant_method": method, "activation_scheme": "static"}
    if method == "compressed-tensors":
        strategy = "channel" if shape in ("channel", "column") else "tensor"
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
        said = config_of("float-quantized", weights)
    check_stands_for(*write_quantized(tmp_path, said, store))


def test_blocks_of_compressed_tensors(tmp_path: Path):
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}
    store = storing_blocks((32, 16), "weight_scale")
    check_stands_for(*write_quantized(tmp_path, config_of("float-quantized", weights), store))


# -- which modules


def test_groups_of_modules_have_schemes_of_their_own_within_a_fused_layer(tmp_path: Path):
    """Queries and keys in 4 bits, values in 8, gates left plain, all else in floats of 8 bits."""
    four, eight = storing(4, 32, packed=True), storing(8, -1, packed=False)
    floats = storing_blocks((32, 16), "weight_scale")

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        if module.endswith("gate_proj"):
            return {"weight": torch.from_numpy(weight)}, weight
        chosen = {"v": eight, "q": four, "k": four}.get(module.rpartition(".")[2][0], floats)
        return chosen(module, weight)

    said = config_of("mixed-precision", weights_of(4, 32))
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}
    said["ignore"] = ["lm_head", r"re:.*gate_proj$"]
    said["config_groups"] = {
        "rest": {"targets": ["Linear"], "weights": block, "format": "float-quantized"},
        "attention": {
            "targets": [r"re:.*self_attn\.[qkv]_proj"],
            "weights": weights_of(4, 32),
            "format": "pack-quantized",
        },
        "values": {
            "targets": [f"model.layers.{i}.self_attn.v_proj" for i in range(2)],
            "weights": weights_of(8),
            "format": "int-quantized",
        },
    }
    check_stands_for(*write_quantized(tmp_path, said, store))


def test_scales_for_a_cache_of_fewer_bits_are_left_out(tmp_path: Path):
    eight = storing(8, -1, packed=False)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        parts, floats = eight(module, weight)
        if module.endswith("k_proj"):
            parts |= {"k_scale": torch.ones(1), "output_scale": torch.ones(1)}
        return parts, floats

    check_stands_for(*write_quantized(tmp_path, config_of("int-quantized", weights_of(8)), store))


def test_what_is_quantised_in_spite_of_being_ignored_or_of_no_group_is_refused(tmp_path: Path):
    store = storing(8, -1, packed=False)
    said = config_of("int-quantized", weights_of(8))
    ignoring = said | {"ignore": ["re:.*down_proj"]}
    model, _ = write_quantized(tmp_path / "ignored", ignoring, store)
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.down_proj: is among those that"):
        check_stands_for(model, model)
    group = said["config_groups"]["group_0"] | {"targets": ["re:.*self_attn"]}
    some = said | {"config_groups": {"group_0": group}}
    model, _ = write_quantized(tmp_path / "none", some, store)
    with pytest.raises(WeightsError, match=r"mlp\.\w+: is quantised, and no group of"):
        check_stands_for(model, model)


@pytest.mark.parametrize(
    ("pattern", "module", "found"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("head", "lm_head", False),
        ("re:.*q_proj", "model.layers.0.self_attn.q_proj", True),
        ("re:q_proj", "model.layers.0.self_attn.q_proj", False),
        ("model.layers.1.mlp", "model.layers.11.mlp", False),
    ],
)
def test_names_and_patterns(pattern: str, module: str, found: bool):
    assert matches(pattern, module) is found


def test_a_pattern_that_is_none_is_an_error():
    with pytest.raises(WeightsError, match=r"quantization_config: 're:\('"):
        matches("re:(", "lm_head")


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (config_of("nvfp4-pack-quantized", weights_of(4, 16)), "nvfp4-pack-quantized isn't read"),
        (config_of("marlin-24", weights_of(4, 128)), "marlin-24 isn't read"),
        (config_of("pack-quantized", weights_of(3, 32)), "num_bits"),
        (config_of("pack-quantized", weights_of(4, 48)), "group_size = 48"),
        (config_of("pack-quantized", FLOAT), "num_bits"),
        (config_of("float-quantized", weights_of(8)), "type"),
        (config_of("int-quantized", weights_of(8, strategy="tensor_group")), "strategy"),
        (
            config_of("int-quantized", weights_of(8), transform_config={"R1": {}}),
            "transform_config",
        ),
        (
            config_of("int-quantized", weights_of(8), sparsity_config={"format": "sparse-bitmask"}),
            "sparsity_config",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [1.5, 2]}, "weight_block_size"),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(
    tmp_path: Path, said: dict[str, Any], named: str
):
    model, _ = write_quantized(tmp_path, said, lambda module, weight: ({}, weight))
    with pytest.raises(UnsupportedModelError) as refusal:
        model_files(model).config()
    assert named in str(refusal.value)
