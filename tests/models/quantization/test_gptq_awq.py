"""Checkpoints of GPTQ and AWQ: each variant decodes to the floats of its description."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioserve.errors import ModelError, UnsupportedModelError, WeightsError
from aioserve.models.fields import Fields
from aioserve.models.files import model_files
from aioserve.models.quantization.awq import Awq
from aioserve.models.quantization.gptq import Gptq
from aioserve.models.quantization.packing import unpacked
from aioserve.models.stored import IntegerForm, StoredLinear
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.writers import Numbers, numbers_of, pack, write_quantized


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    words=st.integers(1, 4),
    width=st.integers(1, 3),
    data=st.data(),
)
def test_packed_numbers_come_back(bits: int, words: int, width: int, data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    numbers = rng.integers(0, 2**bits, (words * 32, width))
    assert np.array_equal(unpacked(pack(numbers, bits), bits), numbers)


def test_every_byte_comes_back_in_every_place_of_a_word():
    for place in range(4):
        numbers = np.zeros((4, 256), np.int64)
        numbers[place] = np.arange(256)
        assert np.array_equal(unpacked(pack(numbers, 8), 8), numbers)
        for bits in (2, 4):
            parts = np.concatenate(
                [numbers >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
            )
            in_order = parts.reshape(8 // bits, 4, 256).transpose(1, 0, 2).reshape(-1, 256)
            assert np.array_equal(unpacked(pack(in_order, bits), bits), in_order)


def gptq_parts(numbers: Numbers, *, version: int, with_index: str = "absent") -> dict[str, Any]:
    """Make the parts of a GPTQ weight. `with_index` is "absent", "zeros" or "groups"."""
    stored = numbers.zeros if version == 2 else (numbers.zeros - 1) % 2**numbers.bits
    parts = {
        "qweight": pack(numbers.values.T, numbers.bits),
        "qzeros": pack(stored, numbers.bits).T,
        "scales": numbers.scales.T.astype(np.float16),
    }
    if with_index != "absent":
        index = numbers.index if with_index == "groups" else np.zeros_like(numbers.index)
        parts["g_idx"] = index.astype(np.int32)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def gptq_config(bits: int, group_size: int, **other: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, **other}


def write_gptq(
    directory: Path,
    bits: int,
    group_size: int,
    *,
    version: int = 1,
    index: str = "groups",
    symmetric: bool = False,
    act_order: bool = False,
    uneven: bool = False,
    **other: Any,
) -> tuple[Path, Path]:
    rng = np.random.default_rng(bits * 1000 + group_size)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(
            weight,
            bits,
            group_size,
            symmetric=symmetric,
            act_order=act_order,
            uneven=uneven,
            rng=rng,
        )
        return gptq_parts(numbers, version=version, with_index=index), numbers.floats

    other = {"checkpoint_format": f"gptq_v{version}" if version == 2 else "gptq"} | other
    said = gptq_config(bits, group_size, desc_act=act_order, sym=symmetric, **other)
    return write_quantized(directory, said, store)


def forms_of(model: Path) -> list[IntegerForm | None]:
    files = model_files(model)
    config = files.config()
    with files.weights(config) as stored:
        return [stored[tensor].integers for one in config.linears for tensor in one.weights]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_in_bits_groups_and_versions(tmp_path: Path, bits: int, group_size: int, version: int):
    model, floats = write_gptq(tmp_path, bits, group_size, version=version)
    check_stands_for(model, floats)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_in_the_order_of_activations(tmp_path: Path, bits: int):
    model, floats = write_gptq(tmp_path, bits, 16, act_order=True)
    check_stands_for(model, floats)
    assert all(form is not None and form.permuted for form in forms_of(model))


def test_gptq_in_groups_that_inputs_do_not_fill_becomes_floats(tmp_path: Path):
    model, floats = write_gptq(tmp_path, 4, 16, uneven=True)
    check_stands_for(model, floats)
    assert not any(forms_of(model))


@pytest.mark.parametrize("index", ["absent", "zeros"])
def test_no_index_and_one_of_zeros_mean_groups_in_order(tmp_path: Path, index: str):
    model, floats = write_gptq(tmp_path, 4, 32, index=index)
    check_stands_for(model, floats)


def write_by_rules(directory: Path, rules: dict[str, Any], of: Any) -> tuple[Path, Path]:
    """Write a model with 4 bits in groups of 32, unless `of(module)` has other settings.

    None leaves a module plain."""
    rng = np.random.default_rng(1)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        if (how := of(module)) is None:
            return {"weight": torch.from_numpy(weight)}, weight
        how = {"bits": 4, "group_size": 32, "symmetric": False} | how
        numbers = numbers_of(weight, how.pop("bits"), how.pop("group_size"), rng=rng, **how)
        return gptq_parts(numbers, version=1, with_index="groups"), numbers.floats

    return write_quantized(directory, gptq_config(4, 32, dynamic=rules), store)


def test_rules_of_gptq_say_bits_groups_and_symmetry_of_modules(tmp_path: Path):
    rules = {
        r"-:.*\.0\.mlp\.gate_proj$": {},
        r"+:.*\.0\.mlp\.": {"bits": 8, "group_size": 16},
        r".*\.(1|2)\.self_attn\.[qk]_proj": {"bits": 3, "sym": True, "desc_act": False, "mse": 0.1},
        r"+:^model\.layers\.1\.": {"bits": 2, "group_size": -1},
        r"+:.*": {"bits": 4},
    }

    def of(module: str) -> dict[str, Any] | None:
        if ".0." in module:
            if module.endswith("gate_proj"):
                return None
            return {"bits": 8, "group_size": 16} if "mlp" in module else {}
        if module.endswith(("q_proj", "k_proj")):
            return {"bits": 3, "symmetric": True}
        return {"bits": 2, "group_size": -1}

    check_stands_for(*write_by_rules(tmp_path, rules, of))


def test_the_output_layer_may_be_quantised_too(tmp_path: Path):
    model, floats = write_gptq(tmp_path, 4, 32, lm_head=True)
    tensors, plain = (load_file(path / "model.safetensors") for path in (model, floats))
    weight = tensors.pop("lm_head.weight").numpy()
    numbers = numbers_of(weight, 4, 32, rng=np.random.default_rng(9))
    parts = gptq_parts(numbers, version=1, with_index="groups")
    tensors |= {f"lm_head.{name}": part for name, part in parts.items()}
    plain["lm_head.weight"] = torch.from_numpy(numbers.floats)
    save_file(tensors, model / "model.safetensors")
    save_file(plain, floats / "model.safetensors")
    check_stands_for(model, floats)


def test_what_a_rule_says_is_plain_and_is_not_is_refused(tmp_path: Path):
    model, _ = write_by_rules(tmp_path, {r"-:.*\.1\.mlp\.up_proj": {}}, lambda module: {})
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj: is quantised, and .*dynamic"):
        check_stands_for(model, model)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["-:lm_head"], r"config\.json: quantization_config\.dynamic must be an object"),
        ({"+:(": {}}, r"config\.json: quantization_config: the expression '\('"),
        ({"+:a": 3}, r"dynamic\['\+:a'\] must be an object, got 3"),
        ({"a": {"sym": "no"}}, r"dynamic\['a'\]\.sym must be true or false, got 'no'"),
        ({f"-:a{i}*": {} for i in range(101)}, "at most 100 patterns with groups or"),
        ({f"-:a{i}": {} for i in range(10_001)}, "at most 10000 names in dynamic"),
    ],
)
def test_malformed_rules_are_named(tmp_path: Path, rules: Any, message: str):
    model, _ = write_by_rules(tmp_path, rules, lambda module: None)
    with pytest.raises(ModelError, match=message):
        model_files(model).config()


def test_thousands_of_rules_for_single_modules_are_read(tmp_path: Path):
    rules = {rf"-:model\.layers\.{i}\.mlp$": {} for i in range(2, 5000)}
    rules |= {r"+:^model\.layers\.1\.mlp\.up_proj$": {"bits": 8}}
    model, floats = write_by_rules(
        tmp_path, rules, lambda module: {"bits": 8} if module.endswith("1.mlp.up_proj") else {}
    )
    check_stands_for(model, floats)


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")]
)
def test_a_file_beside_config_json_says_what_it_does_not(tmp_path: Path, file: str, method: str):
    write = write_gptq if method == "gptq" else write_awq
    model, floats = write(tmp_path, 4, 32)
    config = json.loads((model / "config.json").read_text())
    said = config.pop("quantization_config")
    del said["quant_method"]
    if method == "awq":
        said = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (model / "config.json").write_text(json.dumps(config))
    (model / file).write_text(json.dumps(said))
    check_stands_for(model, floats)
    (model / file).write_text(json.dumps(said | {"group_size": 0, "q_group_size": 0}))
    with pytest.raises(UnsupportedModelError, match=rf"config\.json and {file}: .*group_size = 0"):
        model_files(model).config()


def test_a_file_beside_config_json_of_another_program_is_refused_by_name(tmp_path: Path):
    model, _ = write_gptq(tmp_path, 4, 32)
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json: .* = 'modelopt'"):
        model_files(model).config()


@pytest.mark.parametrize("labelled", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_files_of_either_version_and_label_are_read(
    tmp_path: Path, bits: int, version: int, labelled: str
):
    model, floats = write_gptq(
        tmp_path, bits, 32, version=version, symmetric=True, checkpoint_format=labelled
    )
    check_stands_for(model, floats)


def test_the_version_of_zero_points_is_in_the_name(tmp_path: Path):
    """Equal bits can be two models, and keys of cached KV contain the name."""
    names = set()
    for version in (1, 2):
        directory = tmp_path / str(version)
        directory.mkdir()
        model, _ = write_gptq(directory, 4, 32, version=version)
        files = model_files(model)
        config = files.config()
        with files.weights(config) as weights:
            names |= {weights[t].format.name for t in config.required if "q_proj" in t.name}
    assert len(names) == 2


def test_an_index_beyond_the_groups_is_refused(tmp_path: Path):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1, with_index="groups")
        parts["g_idx"][3] = 99
        return parts, numbers.floats

    model, _ = write_quantized(tmp_path, gptq_config(4, 32), store)
    with pytest.raises(WeightsError, match=r"_proj: g_idx must name groups from 0 to [12]"):
        check_stands_for(model, model)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("qweight", (3, 3), r"\.qweight has shape \[3, 3\], quantization_config asks for \["),
        ("scales", (1, 1), r"\.scales has shape \[1, 1\], quantization_config asks for \["),
        ("qzeros", None, r"the weights lack .*\.qzeros"),
        ("more", (2, 2), r"has no place for .*\.more"),
        ("bias", (64,), r"has no place for .*\.bias"),
    ],
)
def test_a_part_that_is_wrong_is_named(
    tmp_path: Path, part: str, shape: tuple[int, ...] | None, message: str
):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1)
        if shape is None:
            del parts[part]
        else:
            dtype = parts[part].dtype if part in parts else torch.float16
            parts[part] = torch.ones(shape, dtype=dtype)
        return parts, numbers.floats

    model, _ = write_quantized(tmp_path, gptq_config(4, 32), store)
    with pytest.raises(WeightsError, match=message):
        check_stands_for(model, model)


def test_biases_of_zeros_that_no_layer_has_are_left_out(tmp_path: Path):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1)
        return parts | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, numbers.floats

    model, floats = write_quantized(tmp_path, gptq_config(4, 32), store)
    check_stands_for(model, floats)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (gptq_config(5, 32), "quantization_config.bits = 5"),
        (gptq_config(4, 48), "quantization_config.group_size = 48"),
        (gptq_config(4, 0), "quantization_config.group_size = 0"),
        (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (gptq_config(4, 32, is_marlin_format=True), "quantization_config.is_marlin_format"),
        (gptq_config(4, 32, format="bitblas"), "quantization_config.format = 'bitblas'"),
        (gptq_config(4, 32, pack_dtype="int64"), "quantization_config.pack_dtype = 'int64'"),
        (
            gptq_config(4, 32, dynamic={"-:lm_head": {}, r"+:.*\.3\.": {"bits": 6}}),
            r"quantization_config.dynamic['+:.*\\.3\\.'].bits = 6",
        ),
        ({"quant_method": "awq", "backend": "llm-awq"}, "quantization_config.backend = 'llm-awq'"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits = 3"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version = 'gemv'"),
        ({"quant_method": "awq", "group_size": 20}, "quantization_config.group_size = 20"),
        ({"quant_method": "awq", "checkpoint_format": "gemv_fast"}, "checkpoint_format"),
        *(
            ({"quant_method": name}, f"quantization_config.quant_method = '{name}'")
            for name in (
                *(
                    "aqlm",
                    "auto-round",
                    "bitnet",
                    "eetq",
                    "exl2",
                    "exl3",
                    "higgs",
                    "hqq",
                    "modelopt",
                ),
                *("modelopt_fp4", "quanto", "quark", "quip", "spqr", "torchao", "vptq"),
            )
        ),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(
    tmp_path: Path, said: dict[str, Any], named: str
):
    model, _ = write_quantized(tmp_path, said, lambda module, weight: ({}, weight))
    with pytest.raises(UnsupportedModelError) as refusal:
        model_files(model).config()
    assert named in str(refusal.value)


def awq_words(numbers: np.ndarray) -> np.ndarray:
    """Pack eight numbers of the last axis into a word, in AWQ's order."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows, columns = numbers.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for row in range(rows):
        for word in range(columns // 8):
            for place, column in enumerate(order):
                words[row, word] |= np.uint32(int(numbers[row, word * 8 + column]) << (4 * place))
    return words.view(np.int32)


def storing_awq(bits: int, group_size: int, *, has_zeros: bool = True) -> Callable[..., Any]:
    rng = np.random.default_rng(5)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, bits, group_size, symmetric=not has_zeros, rng=rng)
        parts = {
            "qweight": awq_words(numbers.values.T),
            "scales": np.ascontiguousarray(numbers.scales.T.astype(np.float16)),
            "qzeros": awq_words(numbers.zeros.T),
        }
        return {name: torch.from_numpy(part) for name, part in parts.items()}, numbers.floats

    return store


def awq_config(bits: int, group_size: int, *, has_zeros: bool = True) -> dict[str, Any]:
    said = {"quant_method": "awq", "bits": bits, "group_size": group_size, "zero_point": has_zeros}
    return said | {"version": "gemm"}


def write_awq(
    directory: Path, bits: int, group_size: int, *, has_zeros: bool = True
) -> tuple[Path, Path]:
    store = storing_awq(bits, group_size, has_zeros=has_zeros)
    return write_quantized(directory, awq_config(bits, group_size, has_zeros=has_zeros), store)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_awq(tmp_path: Path, group_size: int, has_zeros: bool):
    check_stands_for(*write_awq(tmp_path, 4, group_size, has_zeros=has_zeros))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_lies_by_inputs_is_decoded_many_outputs_at_once(method: str):
    """Otherwise, each input's few bytes take a read, and a large model takes minutes."""
    said = {"bits": 4, "group_size": 128}
    fields = Fields(said, "config.json")
    format_ = Gptq.read(fields).weights if method == "gptq" else Awq.read(fields)
    blocks = list(StoredLinear(format_, {}, 4096, 14336, 128).blocks())
    assert blocks == [(first, first + 512) for first in range(0, 4096, 512)]
