"""Checkpoints of compressed-tensors and of floats of 8 bits: each variant, and mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioserve.errors import ModelError, UnsupportedModelError, WeightsError
from aioserve.models.files import model_files
from aioserve.models.quantization.packing import E4M3, e8m0
from aioserve.models.quantization.scheme import matches
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.compressed import (
    config_of,
    float8,
    integer_parts,
    storing,
    storing_blocks,
    weights_of,
    write_mixture,
)
from tests.models.quantization.writers import numbers_of, write_quantized


def test_every_float_of_eight_bits_is_what_torch_makes_of_it():
    every = torch.arange(256, dtype=torch.uint8)
    floats = every.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, floats, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3), np.signbit(floats))
    exponents = every.view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(e8m0(every.numpy()), exponents, equal_nan=True)


# -- integers


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


def test_scales_of_each_output_where_one_was_said(tmp_path: Path):
    said = config_of("int-quantized", weights_of(8, strategy="tensor"))
    check_stands_for(*write_quantized(tmp_path, said, storing(8, -1, packed=False)))


def test_groups_in_the_order_of_activations_from_old_files(tmp_path: Path):
    store = storing(4, 16, packed=True, act_order=True)
    said = config_of("pack-quantized", weights_of(4, 16, actorder="group"))
    check_stands_for(*write_quantized(tmp_path, said, store))


@pytest.mark.parametrize(("index", "is_read"), [(-1, True), ([-1, 0], False), ([0, 99], False)])
def test_an_index_names_groups_or_is_all_minus_one(
    tmp_path: Path, index: int | list[int], is_read: bool
):
    integers = storing(4, 16, packed=True)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        parts, floats = integers(module, weight)
        said = np.resize(index, weight.shape[1]).astype(np.int32)
        return {**parts, "weight_g_idx": torch.from_numpy(said)}, floats

    model, floats = write_quantized(tmp_path, config_of("pack-quantized", weights_of(4, 16)), store)
    if is_read:
        check_stands_for(model, floats)
        return
    with pytest.raises(WeightsError, match=r"weight_g_idx must name groups from 0 to \d"):
        check_stands_for(model, floats)


def test_a_group_may_be_far_larger_than_a_row(tmp_path: Path):
    said = config_of("pack-quantized", weights_of(4, 2**30))
    check_stands_for(*write_quantized(tmp_path, said, storing(4, -1, packed=True)))


# -- floats of 8 bits


@pytest.mark.parametrize("kind", ["float", "e8m0", "u8"])
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (40, 24), (10**12, 24)])
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


# -- floats with exponents as scales


def microscaled(bits: int, **other: Any) -> dict[str, Any]:
    said = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    return said | {"symmetric": True, **other}


def test_mxfp4(tmp_path: Path):
    rng = np.random.default_rng(4)
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        rows, columns = weight.shape
        codes = rng.integers(0, 16, (rows, columns))
        exponents = rng.integers(115, 124, (rows, columns // 32))
        floats = np.empty((rows, columns), np.float32)
        packed = np.zeros((rows, columns // 2), np.uint8)
        for row, column in np.ndindex(rows, columns):
            code = int(codes[row, column])
            sign = -1 if code >= 8 else 1
            scale = 2.0 ** (int(exponents[row, column // 32]) - 127)
            floats[row, column] = sign * magnitudes[code % 8] * scale
            packed[row, column // 2] |= code << (4 if column % 2 else 0)
        parts = {
            "weight_packed": torch.from_numpy(packed),
            "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
        }
        return parts, floats

    said = config_of("mxfp4-pack-quantized", microscaled(4))
    check_stands_for(*write_quantized(tmp_path, said, store))


def test_mxfp8(tmp_path: Path):
    store = storing_blocks((1, 32), "weight_scale", "u8")
    said = config_of("mxfp8-quantized", microscaled(8))
    check_stands_for(*write_quantized(tmp_path, said, store))


# -- which modules


def test_groups_of_modules_have_schemes_of_their_own_within_a_fused_layer(tmp_path: Path):
    check_stands_for(*write_mixture(tmp_path))


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


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (["re:("], r"config\.json: quantization_config: the expression '\('"),
        (["re:a*"] * 101, r"at most 100 patterns with groups or repetitions in ignore"),
        (["a"] * 10_001, r"at most 10000 names in ignore and targets"),
    ],
)
def test_patterns_are_few_and_known(tmp_path: Path, ignored: list[str], message: str):
    said = config_of("int-quantized", weights_of(8), ignore=ignored)
    model, _ = write_quantized(tmp_path, said, storing(8, -1, packed=False))
    with pytest.raises(ModelError, match=message):
        model_files(model).config()


def test_a_pattern_that_python_matches_for_ever_ends(tmp_path: Path):
    said = config_of("int-quantized", weights_of(8), ignore=["re:(.+)+!", "re:" + ".*" * 10 + "!"])
    check_stands_for(*write_quantized(tmp_path, said, storing(8, -1, packed=False)))


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (config_of("nvfp4-pack-quantized", weights_of(4, 16)), "nvfp4-pack-quantized isn't read"),
        (config_of("marlin-24", weights_of(4, 128)), "marlin-24 isn't read"),
        (config_of("mxfp4-pack-quantized", microscaled(4, group_size=64)), "num_bits"),
        (config_of("mxfp4-pack-quantized", microscaled(4, symmetric=False)), "num_bits"),
        (config_of("mxfp8-quantized", microscaled(4)), "num_bits"),
        (config_of("mxfp6-pack-quantized", microscaled(6)), "mxfp6-pack-quantized isn't read"),
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


@pytest.mark.parametrize(
    ("said", "rounds"),
    [
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, True),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, True),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, False),
        (None, False),
    ],
)
def test_a_config_says_whether_activations_become_floats_of_8_bits(
    tmp_path: Path, said: dict[str, Any] | None, rounds: bool
):
    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        scales = np.ones((1, 1), np.float32)
        narrow, floats = float8(weight, np.broadcast_to(scales, weight.shape))
        return {"weight": narrow, "weight_scale": torch.ones(())}, floats

    if said is None or "quant_method" not in said:
        weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        config = config_of("float-quantized", weights)
        config["config_groups"]["group_0"]["input_activations"] = said
        said = config
    model, _ = write_quantized(tmp_path, said, store)
    files = model_files(model)
    config = files.config()
    with files.weights(config) as stored:
        (linear, *_) = config.linears
        codes = stored[linear.weights[0]].codes
        assert codes is not None
        assert codes.float_activations is rounds
        assert stored[linear.weights[0]].format.name.endswith("-a8") is rounds
