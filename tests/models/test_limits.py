"""Sizes without kernels are refused by name before weights are searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, SamplingParams
from aioserve.capacity.models import read_sizes
from aioserve.capacity.weights import read_weights
from aioserve.cli.doctor import facts_of_model
from aioserve.errors import ModelError, UnsupportedModelError, WeightsError
from aioserve.formats.weights import CUDA, NATIVE, PLAIN_FLOATS, ComputedFormats
from aioserve.models.config import DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.reading import WeightReading
from aioserve.testing.random_model import write_random_model
from tests.parity.tiny_models import CONFIGS

TOO_LARGE: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama", {"head_dim": 300}, "head_dim = 300", "have heads of at most 256 numbers"),
    ("gpt-oss", {"head_dim": 258}, "head_dim = 258", "have heads of at most 256 numbers"),
    ("deepseek2", {"qk_rope_head_dim": 400}, "qk_rope_head_dim = 400", "rotate at most 256"),
    ("deepseek3", {"kv_lora_rank": 1100}, "kv_lora_rank = 1100", "beside 6 rotated numbers have"),
]


def config_of(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**CONFIGS[name], **fields}


def directory_of(path: Path, name: str, fields: dict[str, Any]) -> Path:
    """Write a directory without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_of(name, fields)))
    return path


@pytest.mark.parametrize(("formats", "devices"), [(NATIVE, "CPUs"), (CUDA, "GPUs")])
@pytest.mark.parametrize(("name", "fields", "says", "limit"), TOO_LARGE)
def test_the_field_its_value_and_the_limit_are_named_before_weights_are_looked_for(
    tmp_path: Path,
    name: str,
    fields: dict[str, Any],
    says: str,
    limit: str,
    formats: ComputedFormats,
    devices: str,
) -> None:
    files = model_files(directory_of(tmp_path / "model", name, fields))
    with pytest.raises(UnsupportedModelError) as caught:
        WeightReading(files, formats=formats)
    for part in (f"{files.path}/config.json: {says}", f"for {devices} {limit}"):
        assert part in str(caught.value)
    with pytest.raises(WeightsError, match=r"no \.safetensors"):
        WeightReading(files, formats=PLAIN_FLOATS)


@pytest.mark.parametrize(
    ("name", "fields", "formats"),
    [
        ("llama", {"head_dim": 256}, NATIVE),
        ("llama", {"head_dim": 256}, CUDA),
        ("deepseek2", {"kv_lora_rank": 1018}, NATIVE),
        ("deepseek2", {"kv_lora_rank": 512}, CUDA),
        ("deepseek2", {"qk_rope_head_dim": 256, "kv_lora_rank": 768}, NATIVE),
    ],
)
def test_the_largest_sizes_are_read(
    tmp_path: Path, name: str, fields: dict[str, Any], formats: ComputedFormats
) -> None:
    model = write_random_model(tmp_path, config_of(name, fields), dtype="float32")
    with WeightReading(model_files(model), formats=formats) as reading:
        assert reading.expected_memory.held_bytes > 0
    field, value = list(fields.items())[-1]
    beyond = directory_of(tmp_path / "beyond", name, {**fields, field: value + 2})
    with pytest.raises(UnsupportedModelError, match=f"{field} = {value + 2} is not supported"):
        WeightReading(model_files(beyond), formats=formats)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["llama", "deepseek3"])
async def test_an_engine_says_so_and_the_reference_computes_any(tmp_path: Path, name: str) -> None:
    fields = {"llama": {"head_dim": 258}, "deepseek3": {"kv_lora_rank": 1030}}[name]
    model = write_random_model(tmp_path / "model", config_of(name, fields), dtype="float32")
    with pytest.raises(UnsupportedModelError, match='backend="reference" computes larger ones'):
        async with Engine(str(model), backend="native"):
            pass
    async with Engine(str(model), backend="reference", num_pages=8) as engine:
        answer = await engine.generate([5, 6, 7], SamplingParams(max_tokens=3))
    assert answer.token_ids


@pytest.mark.parametrize(("name", "fields", "says", "limit"), TOO_LARGE)
def test_plan_and_doctor_say_the_same(
    tmp_path: Path, name: str, fields: dict[str, Any], says: str, limit: str
) -> None:
    model = write_random_model(tmp_path / "model", config_of(name, fields), dtype="float32")
    assert says in read_sizes(str(model)).refused
    assert read_weights(str(model)) is None
    facts = facts_of_model(str(model))
    assert f"{says} is not supported: kernels for GPUs {limit}" in facts["on_a_gpu"]
    assert f"{says} is not supported: kernels for CPUs {limit}" in facts["formats"]["error"]


def test_what_cpus_alone_compute_is_refused_on_gpus(tmp_path: Path) -> None:
    fields = {"kv_lora_rank": 600}
    model = write_random_model(tmp_path / "m", config_of("deepseek2", fields), dtype="float32")
    assert "kv_lora_rank = 600" in read_sizes(str(model)).refused
    assert read_weights(str(model)) is not None
    facts = facts_of_model(str(model))
    assert "latents of at most 512 numbers" in facts["on_a_gpu"]
    assert "error" not in facts["formats"]


def test_more_experts_than_all_layers_may_have_are_refused_at_once() -> None:
    fields = {"num_experts": 1024, "num_hidden_layers": 33, "num_experts_per_tok": 8}
    with pytest.raises(ModelError, match="must be at most 992 in each of 33 layers, got 1024"):
        DecoderConfig.from_dict({**CONFIGS["qwen3-moe"], **fields})
