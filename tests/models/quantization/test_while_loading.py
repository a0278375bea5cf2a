"""Quantising while loading: the rounding, the choice of weights, and no other change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioserve.errors import ConfigError, ModelError, WeightsError
from aioserve.models import weight_memory
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.models.quantization.rounding import FORMS, round_to_integers
from aioserve.models.quantization.while_loading import QuantizedWhileLoading, RoundedFloats8
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.stored import Plain, StoredLinear
from aioserve.ops import backend_named
from tests.models.quantization.checking import check_computes, logits_of
from tests.models.quantization.dequantized import write_dequantized
from tests.parity.tiny_models import ARCHITECTURES, write

methods = pytest.mark.parametrize("method", ["int8", "int4"])
all_methods = pytest.mark.parametrize("method", ["int8", "int4", "fp8"])


@st.composite
def weights(draw: st.DrawFn) -> np.ndarray:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = rng.standard_normal((rows, columns), np.float32)
    weight[:, rng.integers(columns)] *= draw(st.sampled_from([0, 1, 100]))
    weight[rng.integers(rows)] *= draw(st.sampled_from([0, 1, 1e-42, 1e30]))
    return weight


@methods
@given(weight=weights(), data=st.data())
def test_rounding_is_as_good_as_its_scales_and_of_each_row_by_itself(
    method: str, weight: np.ndarray, data: st.DataObject
):
    form = FORMS[method]
    rounded = round_to_integers(weight, form)
    assert (rounded.bits, rounded.group_size) == (form.bits, form.group_size)
    given_back = rounded.dequantized()
    assert np.isfinite(given_back).all()
    steps = np.repeat(np.abs(rounded.scales), form.group_size, 1)[:, : weight.shape[1]]
    steps = steps.astype(np.float64)
    errors = np.abs(given_back.astype(np.float64) - weight)
    inside = np.abs(weight) <= steps * (127 if method == "int8" else 7)
    tiny = np.finfo(np.float32).tiny
    assert (errors <= steps * 0.5001 + tiny)[inside].all()
    assert (errors <= steps * 1.5001 + tiny).all(), "of 4 bits both ends may be cut off"
    row = data.draw(st.integers(0, len(weight) - 1))
    alone = round_to_integers(weight[row : row + 1], form)
    assert np.array_equal(alone.dequantized(), given_back[row : row + 1])


def test_four_bits_take_the_scale_with_the_least_error():
    weight = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    groups = weight.reshape(500, 2, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[:, :, None], 2)
    plain = largest / -8
    naive = np.clip(np.rint(groups / plain), -8, 7) * plain
    ours = round_to_integers(weight, FORMS["int4"]).dequantized().reshape(groups.shape)
    error = np.square(ours - groups).sum(2)
    assert (error <= np.square(naive - groups).sum(2) * 1.05).all(), "but for scales of 8 bits"
    assert error.sum() < 0.95 * np.square(naive - groups).sum()


@methods
@given(weight=weights())
def test_scales_are_numbers_of_bfloat16(method: str, weight: np.ndarray):
    scales = round_to_integers(weight, FORMS[method]).scales
    assert FORMS[method].scales == "bfloat16"
    assert not (scales.view(np.uint32) & 0xFFFF).any()


@methods
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(method: str, bad: float):
    weight = np.ones((2, 40), np.float32)
    weight[1, 3] = bad
    with pytest.raises(WeightsError, match="NaN and infinity can't be quantised"):
        round_to_integers(weight, FORMS[method])


@all_methods
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_tensor_that_holds_nan_is_named(tmp_path: Path, name: str, method: str):
    write("phi3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name}: NaN and infinity can't be quantised"):
        load_model(tmp_path, quantization=method)


@given(weight=weights().filter(lambda weight: np.abs(weight).max() < 1e15))
def test_floats_of_eight_bits_are_what_torch_makes_of_them_with_the_largest_as_the_largest(
    tmp_path_factory: pytest.TempPathFactory, weight: np.ndarray
):
    path = tmp_path_factory.mktemp("fp8") / "x.safetensors"
    save_file({"x": torch.from_numpy(weight)}, path)
    file = SafetensorsFile(path)
    try:
        plain = Plain("float32")
        stored = StoredLinear(plain, {"weight": file.tensors["x"]}, *weight.shape)
        rounded = replace(stored, format=RoundedFloats8(plain)).floats()
    finally:
        file.close()
    scales = torch.from_numpy(np.abs(weight).max(axis=1, keepdims=True) / np.float32(448))
    shares = (torch.from_numpy(weight) / scales).where(scales > 0, 0)
    meant = shares.to(torch.float8_e4m3fn).float() * scales
    assert np.array_equal(rounded, meant.numpy())


@all_methods
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("neox", r"gpt_neox\..*query_key_value"), ("gpt-oss", r"model\..*experts\.0\.gate_up_proj")],
)
def test_weights_that_are_stored_in_turns_are_refused_by_name(
    name: str, tensor: str, method: str, tmp_path: Path
):
    model = write(name, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"in turns, as {tensor}\.weight"):
        load_model(model, quantization=method)


@all_methods
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt-oss"])
def test_the_model_is_the_float_model_of_its_dequantised_weights(
    name: str, method: str, tmp_path: Path
):
    model = write(name, tmp_path / "model")
    floats = write_dequantized(model, tmp_path / "floats", method)
    check_computes(model, floats, method)
    assert not torch.equal(logits_of(floats), logits_of(model))


@all_methods
def test_a_large_tied_embedding_is_kept_once_and_computes_the_same(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = write("qwen3", tmp_path / "model")
    kept_twice = logits_of(model, quantization=method)
    monkeypatch.setattr(weight_memory, "TWO_COPIES_BYTES", 0)
    assert torch.equal(logits_of(model, quantization=method), kept_twice)


@all_methods
def test_layers_and_head_are_quantised_and_all_else_stays(method: str, tmp_path: Path):
    for name, of_embedding in (("phi3", "float32"), ("qwen3", "int8-g128")):
        files = model_files(write(name, tmp_path / name))
        config = files.config()
        with QuantizedWhileLoading(files.weights(config), config, method) as stored:
            formats = {tensor.name: stored[tensor].format.name for tensor in config.required}
            layers = {weight.name for part in config.linears for weight in part.weights}
            wanted = {"int8": "int8-g128", "int4": "int4-g32", "fp8": "fp8-e4m3"}[method]
            assert {formats.pop(weight) for weight in layers} == {wanted}
            assert formats.pop(config.embedding.name) == of_embedding
            assert set(formats.values()) == {"float32"}
            if config.head in stored:
                assert stored[config.head].format.name == "int8-g128"


def test_what_there_is_is_counted_by_format(tmp_path: Path):
    write("phi3", tmp_path)
    reference = backend_named("reference")
    plain = load_model(tmp_path, dtype="bfloat16", backend=reference).weight_memory
    rounded = load_model(tmp_path, quantization="int4", dtype="bfloat16", backend=reference)
    held = rounded.weight_memory.by_format()
    assert set(held) == {"float32", "int4-g32", "int8-g128"}
    assert plain.by_format() == {"float32": sum(held.values())}, "the reference holds floats"
    native = load_model(tmp_path, quantization="int4", dtype="bfloat16").weight_memory.by_format()
    assert native.keys() == held.keys()
    # Inputs are padded to groups of 32 and of 128: 48 and 80 become 64 and 96, or 128.
    assert 0.35 < native["int4-g32"] / held["int4-g32"] < 0.5
    assert native["int8-g128"] > held["int8-g128"]


@pytest.mark.parametrize("name", ["phi3", "qwen3"])
def test_the_bytes_that_are_needed_are_those_of_what_is_held(name: str, tmp_path: Path):
    write(name, tmp_path)
    needed = load_model(tmp_path, quantization="int4").weight_memory.held_bytes
    load_model(tmp_path, quantization="int4", memory_bytes=needed)
    with pytest.raises(ModelError, match=f"the weights take {needed} bytes in float32"):
        load_model(tmp_path, quantization="int4", memory_bytes=needed - 1)


def test_progress_reaches_the_total(tmp_path: Path):
    calls: list[tuple[int, int]] = []
    write("qwen3", tmp_path)
    load_model(tmp_path, quantization="int4", progress=lambda *counts: calls.append(counts))
    assert calls == sorted(set(calls))
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) > 5


def test_a_method_that_is_not_there_is_refused():
    from aioserve import EngineConfig

    assert EngineConfig(quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match="quantization must be"):
        EngineConfig(quantization="int5")  # type: ignore[arg-type]
