"""GPT-OSS and DeepSeek in GGUF, whose files split some tensors of directories in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioserve import Engine, SamplingParams
from aioserve.errors import ModelError, UnsupportedModelError, WeightsError
from aioserve.formats.weights import CUDA, NATIVE, ComputedFormats
from aioserve.models.architecture import Experts, LatentAttention, Tensor, parts_of
from aioserve.models.files import model_files
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.reading import WeightReading
from aioserve.models.stored import Floats
from aioserve.models.weight_integers import E2M1_TWICE
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert, in_parts, stacked, with_bytes_vocabulary
from tests.models.gguf.test_model import logits_of
from tests.models.gguf.writing import BY_NAME, Stored, quantized, reference, write_gguf
from tests.models.quantization import test_mxfp4_experts
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

WIDE: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        **CONFIGS["gpt-oss"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    "deepseek2-moe": {
        **CONFIGS["deepseek2-moe"],
        "hidden_size": 64,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
    },
}
"""Models whose rows are whole blocks of 32."""
LATENT = ("deepseek2", "deepseek2-moe", "deepseek3", "deepseek3-moe")


def dequantized(directory: Path, out: Path, formats: dict[str, str], default: str) -> Path:
    """Write the float model whose weights are those of a file in these formats.

    `formats` has formats by a part of a tensor's name before it is converted."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {k: v.numpy() for k, v in load_file(directory / "model.safetensors").items()}
    rounded: dict[str, Floats] = {}
    for name, tensor in in_parts(config, stacked(tensors), splits_latents=True).items():
        rounded[name] = tensor
        if tensor.ndim > 1 and not name.endswith(".bias"):
            form = next((form for part, form in formats.items() if part in name), default)
            rows = quantized(tensor.reshape(-1, tensor.shape[-1]), form)
            rounded[name] = reference(rows, BY_NAME[form]).reshape(tensor.shape)
    out.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (out / file).write_bytes((directory / file).read_bytes())
    whole = {name: torch.from_numpy(one) for name, one in _joined(tensors, rounded).items()}
    save_file(whole, out / "model.safetensors")
    return out


def _joined(tensors: dict[str, Floats], parts: dict[str, Floats]) -> dict[str, Floats]:
    """Join parts to the tensors of a directory: the reverse of `in_parts`."""
    found: dict[str, Floats] = {}
    for name, tensor in tensors.items():
        key = name.replace("correction_bias", "correction.bias")
        head, number, tail = _expert(name)
        if key in parts:
            one = parts[key]
        elif number is not None:
            one = parts[f"{head}.experts.{tail}"][number]
        elif "kv_b_proj" in name:
            keys, values = (parts[name.replace("kv_b", part)] for part in ("k_b", "v_b"))
            one = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
        else:
            kind = "bias" if name.endswith("_bias") else "weight"
            at = name.removesuffix("_bias")
            if "gate_up" in at:
                halves = [parts[f"{at.replace('gate_up', part)}.{kind}"] for part in ("gate", "up")]
                one = np.stack(halves, axis=2).reshape(len(tensor), -1, *halves[0].shape[2:])
            else:
                one = parts[f"{at}.{kind}"]
            one = one if kind == "bias" else one.swapaxes(1, 2)
        found[name] = np.ascontiguousarray(one).reshape(tensor.shape)
    return found


def _expert(name: str) -> tuple[str, int | None, str]:
    head, found, rest = name.partition(".experts.")
    number, _, tail = rest.partition(".")
    return (head, int(number), tail) if found and number.isdecimal() else (name, None, "")


@pytest.mark.parametrize("format", ["MXFP4", "Q8_0", "Q4_1", "F16"])
@pytest.mark.parametrize("name", WIDE)
def test_blocks_compute_as_the_floats_that_they_stand_for(
    tmp_path: Path, name: str, format: str
) -> None:
    directory = write_random_model(tmp_path / "hf", WIDE[name], dtype="float32")
    expected = logits_of(dequantized(directory, tmp_path / "floats", {}, format), "reference")
    file = convert(directory, tmp_path / "x.gguf", weights=format)
    assert torch.equal(logits_of(file, "reference"), expected)


@pytest.mark.parametrize(
    ("name", "formats", "parts"),
    [
        (
            "gpt-oss",
            {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_1"},
            {"experts.gate_proj": "Q4_0", "experts.up_proj": "Q5_1"},
        ),
        (
            "deepseek2-moe",
            {"attn_k_b": "Q8_0", "attn_v_b": "Q4_0"},
            {"k_b_proj": "Q8_0", "v_b_proj": "Q4_0"},
        ),
    ],
)
def test_both_parts_may_have_formats_of_their_own(
    tmp_path: Path, name: str, formats: dict[str, str], parts: dict[str, str]
) -> None:
    directory = write_random_model(tmp_path / "hf", WIDE[name], dtype="float32")
    floats = dequantized(directory, tmp_path / "floats", parts, "F16")
    file = convert(directory, tmp_path / "x.gguf", weights="F16", formats=formats)
    assert torch.equal(logits_of(file, "reference"), logits_of(floats, "reference"))


def test_experts_in_mxfp4_keep_their_four_bits(tmp_path: Path) -> None:
    directory = write_random_model(tmp_path / "hf", WIDE["gpt-oss"], dtype="float32")
    formats = {"_exps": "MXFP4"}
    files = model_files(convert(directory, tmp_path / "x.gguf", weights="F16", formats=formats))
    config = files.config()
    with files.weights(config) as weights:
        experts = next(parts_of(config.layers, Experts))
        for described in (experts.experts[0].up, experts.experts[-1].down):
            form = weights[described.weights[0]].integers
            assert form is not None
            assert (form.bits, form.group_size, form.table) == (4, 32, E2M1_TWICE)
            assert weights[described.weights[0]].format.title == "MXFP4"


def test_mxfp4_computes_as_that_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both packings give the same bits.

    Low halves of bytes are the first 16 numbers of a block in files, and every second number in
    directories."""
    monkeypatch.setattr(test_mxfp4_experts, "CONFIG", WIDE["gpt-oss"])
    packed, floats = test_mxfp4_experts.write(tmp_path)
    file = convert(floats, tmp_path / "x.gguf", formats={"_exps": "MXFP4"})
    assert torch.equal(logits_of(file, "native"), logits_of(packed, "native"))


@pytest.mark.parametrize("formats", [NATIVE, CUDA], ids=["native", "cuda"])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_weights_take_the_memory_that_was_expected(
    name: str, kind: str, formats: ComputedFormats, files: dict[tuple[str, str], Path]
) -> None:
    with WeightReading(model_files(files[name, kind]), formats=formats) as reading:
        expected = reading.expected_memory
        assert reading.read().memory == expected


@pytest.mark.parametrize("name", LATENT)
def test_what_expands_latents_may_be_one_tensor(tmp_path: Path, name: str) -> None:
    """Files before May 2025 have one tensor, and the heads' own sizes in metadata."""
    config = dict(CONFIGS[name])
    if name == "deepseek3":
        config["rope_scaling"] = {**config["rope_scaling"], "mscale": 0.7}
    directory = write_random_model(tmp_path / "hf", config, dtype="float32")
    file = convert(directory, tmp_path / "x.gguf", splits_latents=False)
    assert torch.equal(logits_of(file), logits_of(directory))


def composed_of(config: Any) -> Tensor:
    for latent in parts_of(config.layers, LatentAttention):
        return latent.expansion
    return next(parts_of(config.layers, Experts)).experts[1].up.weights[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    found: dict[tuple[str, str], Path] = {}
    for name, config in WIDE.items():
        directory = write_random_model(tmp_path_factory.mktemp(name), config, dtype="float32")
        mixed = {"ffn_up_exps": "Q8_0", "attn_v_b": "Q8_0"}
        for kind, formats in (("alike", {}), ("mixed", mixed)):
            path = directory / f"{kind}.gguf"
            found[name, kind] = convert(directory, path, weights="Q4_1", formats=formats)
    return found


@pytest.mark.parametrize("kind", ["alike", "mixed"])
@pytest.mark.parametrize("name", WIDE)
@given(data=st.data())
def test_any_range_of_rows_is_that_of_the_whole(
    name: str, kind: str, files: dict[tuple[str, str], Path], data: st.DataObject
) -> None:
    model = model_files(files[name, kind])
    config = model.config()
    tensor = composed_of(config)
    first = data.draw(st.integers(0, tensor.rows - 1))
    end = data.draw(st.integers(first + 1, tensor.rows))
    with model.weights(config) as weights:
        whole = weights[tensor].floats()
        assert np.array_equal(weights[tensor].floats(first, end), whole[first:end])
        assert np.array_equal(weights[tensor].sliced(first, end).floats(), whole[first:end])


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek3-moe"])
async def test_tokens_are_those_of_the_directory(tmp_path: Path, name: str) -> None:
    config = WIDE.get(name, CONFIGS[name])
    model = write_random_model(tmp_path / "random", config, dtype="float32")
    directory = with_bytes_vocabulary(model, tmp_path / "hf")
    file = convert(directory, tmp_path / "x.gguf")
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    found = []
    for path in (directory, file):
        async with Engine(
            str(path), max_num_batched_tokens=7, max_num_seqs=4, page_size=4, num_pages=40
        ) as engine:
            prompt = [(7 * i) % VOCAB_SIZE for i in range(40)]
            found.append((await engine.generate(prompt, params)).token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == 24


def changed(path: Path, out: Path, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Copy the file with other metadata and tensors. None removes one."""
    file, content = GGUFFile(path), path.read_bytes()
    stored = {
        name: Stored(
            entry.shape,
            BY_NAME[entry.dtype].number,
            content[entry.offset : entry.offset + entry.num_bytes],
        )
        for name, entry in file.tensors.items()
    }
    pairs = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer")}
    file.close()
    pairs, kept = ({**old, **new} for old, new in ((pairs, keys), (stored, tensors)))
    return write_gguf(
        out,
        {key: value for key, value in pairs.items() if value is not None},
        {name: one for name, one in kept.items() if one is not None},
    )


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("gpt-oss", {"gpt-oss.rope.freq_base_swa": 7.0}, "all layers of this architecture have"),
        ("deepseek3-moe", {"deepseek2.expert_gating_func": 3}, "known are 1, a softmax, and 2"),
        ("deepseek2-moe", {"deepseek2.expert_weights_norm": True}, "weights of a softmax are as"),
        ("deepseek3", {"deepseek2.rope.scaling.attn_factor": 2.0}, "yarn_log_multiplier scales"),
    ],
)
def test_settings_that_no_block_computes_are_refused_by_name(
    tmp_path: Path, name: str, keys: dict[str, Any], says: str
) -> None:
    directory = write_random_model(tmp_path / "hf", CONFIGS[name], dtype="float32")
    path = changed(convert(directory, tmp_path / "x.gguf"), tmp_path / "y.gguf", keys, {})
    with pytest.raises(UnsupportedModelError) as caught:
        model_files(path).config()
    assert says in str(caught.value)
    assert next(iter(keys)) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"attention.head_count_kv": 2}, "must be 1, or the number of heads, 6"),
        ({"attention.key_length": 31}, "attention.key_length must be 30, which are cached"),
        ({"attention.value_length": 25}, "attention.value_length must be 24, which are cached"),
        ({"attention.key_length_mla": 6}, "key_length_mla must be above rope.dimension_count 6"),
        ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank must be an integer"),
        ({"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier must be a number"),
    ],
)
def test_sizes_of_latents_that_make_no_sense_are_refused(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    directory = write_random_model(tmp_path / "hf", CONFIGS["deepseek3"], dtype="float32")
    given = {f"deepseek2.{key}": value for key, value in keys.items()}
    path = changed(convert(directory, tmp_path / "x.gguf"), tmp_path / "y.gguf", given, {})
    with pytest.raises(ModelError) as caught:
        model_files(path).config()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensors", "says"),
    [
        ("gpt-oss", {"blk.0.ffn_up_exps.weight": None}, "lack model.layers.0.mlp.experts.0.gate"),
        ("gpt-oss", {"blk.1.attn_sinks.weight": None}, "lack model.layers.1.self_attn.sinks"),
        ("deepseek2", {"blk.0.attn_k_b.weight": None}, "lack model.layers.0.self_attn.kv_b_proj"),
        (
            "deepseek2",
            {"blk.0.attn_k_b.weight": Stored((6, 10, 24), 0, bytes(6 * 10 * 24 * 4))},
            "has shape [6, 10, 24], and its metadata ask for [6, 24, 10]",
        ),
        (
            "deepseek2",
            {"blk.0.attn_kv_b.weight": Stored((144, 24), 0, bytes(144 * 24 * 4))},
            "has no place for blk.0.attn_k_b.weight, blk.0.attn_v_b.weight",
        ),
        (
            "gpt-oss",
            {"blk.0.ffn_up_exps.bias": Stored((5, 79), 0, bytes(5 * 79 * 4))},
            "ffn_up_exps.bias[0] has shape [79], and its metadata ask for [80]",
        ),
    ],
)
def test_parts_that_make_no_whole_are_refused(
    tmp_path: Path, name: str, tensors: dict[str, Any], says: str
) -> None:
    directory = write_random_model(tmp_path / "hf", CONFIGS[name], dtype="float32")
    path = changed(convert(directory, tmp_path / "x.gguf"), tmp_path / "y.gguf", {}, tensors)
    model = model_files(path)
    with pytest.raises(WeightsError) as caught:
        model.weights(model.config())
    assert says in str(caught.value)
