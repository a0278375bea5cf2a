"""Quantised copies of models: weights that are read back, unchanged parts, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve import Engine, SamplingParams
from aioserve.errors import ConfigError, ModelError, WeightsError
from aioserve.models.files import model_files
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import METHODS, Compressed, method_named
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.copying import fill_the_disk, give_a_tower
from tests.models.quantization.layouts import decoded
from tests.models.quantization.writers import CONFIG, matrices
from tests.parity.tiny_models import ARCHITECTURES, write

NAMES = sorted(METHODS)
methods = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", CONFIG, dtype="bfloat16")


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def write_floats(model: Path, copy: Path, method: Compressed, to: Path) -> Path:
    """Write the float model of the copy, and assert that all else equals the original model."""
    plain, stored = tensors_in(model), tensors_in(copy)
    for module in list(matrices(plain)):
        weight = plain[f"{module}.weight"]
        parts = {
            name.removeprefix(f"{module}."): stored.pop(name)
            for name in list(stored)
            if name.startswith(f"{module}.") and not name.endswith(".bias")
        }
        if (shape := parts.pop("weight_shape", None)) is not None:
            assert shape.tolist() == list(weight.shape)
        floats, each = decoded(parts, method, weight.shape[1])
        assert parts["weight_scale"].dtype == (
            torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        )
        assert ((floats - weight.float()).abs() <= 20 * each.abs()).all()
        plain[f"{module}.weight"] = floats
        stored[f"{module}.weight"] = floats
    assert stored.keys() == plain.keys()
    for tensor, one in stored.items():
        assert one.dtype == plain[tensor].dtype
        assert torch.equal(one, plain[tensor]), tensor
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({tensor: one.float() for tensor, one in plain.items()}, to / "model.safetensors")
    said = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(said | {"dtype": "float32"}))
    return to


@methods
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_is_the_float_model_of_its_rounded_weights(tmp_path: Path, name: str, dtype: str):
    model = write_random_model(tmp_path / "model", CONFIG, dtype=dtype)
    method = method_named(name, None)
    written = write_quantized_copy(model, tmp_path / "copy", method)
    floats = write_floats(model, tmp_path / "copy", method, tmp_path / "floats")
    check_stands_for(tmp_path / "copy", floats)
    assert written.num_files == 1
    assert written.written_bytes == (tmp_path / "copy/model.safetensors").stat().st_size
    assert written.read_bytes == sum(one.nbytes for one in tensors_in(model).values())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("neox", r"gpt_neox\..*\.weight"), ("gpt-oss", r"model\..*experts\.gate_up_proj\[0\]")],
)
def test_weights_that_are_stored_in_turns_are_refused_by_name(
    name: str, tensor: str, tmp_path: Path
):
    model, copy = write(name, tmp_path / "model"), tmp_path / "copy"
    with pytest.raises(ConfigError, match=rf"rows in turns in {tensor}"):
        write_quantized_copy(model, copy, method_named("w8a8", None))
    assert not copy.exists()


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt-oss"])
def test_every_architecture_is_copied_or_refused_by_name(tmp_path: Path, architecture: str):
    model, copy = write(architecture, tmp_path / "model"), tmp_path / "copy"
    method = method_named("w8a8", None)
    if architecture == "gpt2":
        with pytest.raises(
            ConfigError, match=r"model must .*\.attn\.c_attn\.weight as \[in, out\]"
        ):
            write_quantized_copy(model, copy, method)
        assert not copy.exists()
        return
    write_quantized_copy(model, copy, method)
    check_stands_for(copy, write_floats(model, copy, method, tmp_path / "floats"))


@pytest.mark.asyncio
@methods
async def test_an_engine_gives_the_tokens_of_the_float_model(
    tmp_path: Path, model: Path, name: str
):
    method = method_named(name, 64 if name == "w4a16" else None)
    if name == "w4a16":
        model = write_random_model(
            tmp_path / "wide", CONFIG | {"intermediate_size": 128}, dtype="bfloat16"
        )
    write_quantized_copy(model, tmp_path / "copy", method)
    floats = write_floats(model, tmp_path / "copy", method, tmp_path / "floats")
    answers = []
    for directory in (tmp_path / "copy", floats):
        async with Engine(directory, backend="reference", dtype="float32", num_pages=16) as engine:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            answer = await engine.generate([5, 9, 200, 31, 77], params)
            answers.append(answer.token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 24


@methods
def test_shards_hold_the_same(tmp_path: Path, model: Path, name: str):
    method = method_named(name, None)
    write_quantized_copy(model, tmp_path / "one", method)
    written = write_quantized_copy(model, tmp_path / "many", method, shard_bytes=20_000)
    assert written.num_files == len([*(tmp_path / "many").glob("*.safetensors")]) > 3
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[tensor], many[tensor]) for tensor in one)
    model_files(tmp_path / "many").weights(model_files(tmp_path / "many").config()).close()
    again = model_files(tmp_path / "many").config()
    assert again.quantization is not None
    sharded = tmp_path / "sharded"
    shutil.copytree(model, sharded)
    tensors = tensors_in(sharded)
    (sharded / "model.safetensors").unlink()
    placed = {tensor: f"part-{i % 2}.safetensors" for i, tensor in enumerate(sorted(tensors))}
    for file in set(placed.values()):
        save_file({t: tensors[t] for t, f in placed.items() if f == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    write_quantized_copy(sharded, tmp_path / "of-shards", method)
    assert not (tmp_path / "of-shards/model.safetensors.index.json").exists()
    of_shards = tensors_in(tmp_path / "of-shards")
    assert all(torch.equal(one[tensor], of_shards[tensor]) for tensor in one)


def test_settings_and_tokenizer_go_along_and_other_weights_do_not(tmp_path: Path, model: Path):
    for file in ("generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer.model"):
        (model / file).write_text(f"{file} itself" if file != "generation_config.json" else "{}")
    (model / "pytorch_model.bin").write_text("a pickle")
    (model / "pytorch_model.bin.index.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    write_quantized_copy(model, tmp_path / "copy", method_named("w4a16", None))
    tool_use = tmp_path / "copy" / "additional_chat_templates" / "tool_use.jinja"
    assert tool_use.read_text() == "tools"
    names = {file.name for file in (tmp_path / "copy").iterdir()}
    assert names == {file.name for file in model.iterdir()} - {
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    }
    for name in names - {"config.json", "model.safetensors", "additional_chat_templates"}:
        assert (tmp_path / "copy" / name).read_bytes() == (model / name).read_bytes()
    said = json.loads((tmp_path / "copy/config.json").read_text())
    quantization = said.pop("quantization_config")
    assert said == json.loads((model / "config.json").read_text())
    assert quantization["format"] == "pack-quantized"
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 32, "group")
    assert (tmp_path / "copy").stat().st_mode == model.stat().st_mode


def test_towers_for_images_stay_and_are_named(tmp_path: Path):
    model = write("gemma3", tmp_path / "model")
    tower = {
        "vision_tower.encoder.fc1.weight": torch.randn(6, 4),
        "vision_tower.encoder.fc1.bias": torch.randn(6),
        "vision_tower.encoder.norm.weight": torch.randn(6),
    }
    give_a_tower(model, tower)
    write_quantized_copy(model, tmp_path / "copy", method_named("int8", None))
    copied = tensors_in(tmp_path / "copy")
    assert all(torch.equal(copied[name], tensor) for name, tensor in tower.items())
    assert "language_model.model.layers.0.mlp.down_proj.weight_packed" in copied
    quantization = json.loads((tmp_path / "copy/config.json").read_text())["quantization_config"]
    assert quantization["ignore"] == ["lm_head", "vision_tower.encoder.fc1"]
    config = model_files(tmp_path / "copy").config()
    model_files(tmp_path / "copy").weights(config).close()


def test_progress_reaches_all_bytes(tmp_path: Path, model: Path):
    calls: list[tuple[int, int]] = []
    written = write_quantized_copy(
        model,
        tmp_path / "copy",
        method_named("fp8", None),
        progress=lambda *counts: calls.append(counts),
    )
    assert calls == sorted(set(calls))
    assert calls[-1] == (written.read_bytes, written.read_bytes)
    assert len(calls) > 10


# -- refusals, and the traces of a failed run


def left_in(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


def refused(model: Path, out: Path, name: str = "int8", group_size: int | None = None) -> str:
    """Return the message of a `ConfigError`, and check that no files are left."""
    before = left_in(model.parent)
    with pytest.raises(ConfigError) as refusal:
        write_quantized_copy(model, out, method_named(name, group_size))
    assert left_in(model.parent) == before
    return str(refusal.value)


def test_what_is_there_is_never_overwritten(tmp_path: Path, model: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "file")
    for out in (tmp_path / "full", tmp_path / "file", tmp_path / "dangling", model):
        assert f"out must be a directory that is empty or not there yet, got {out}" in refused(
            model, out
        )
    assert "out must be in a directory that is there" in refused(model, tmp_path / "no/such")
    assert "out: " in refused(model, tmp_path / ("x" * 300))
    assert left_in(tmp_path / "full") == {"mine"}


def test_an_empty_directory_is_filled_also_through_a_link(tmp_path: Path, model: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_quantized_copy(model, tmp_path / "link", method_named("int8", None))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path, model: Path):
    write_quantized_copy(model, tmp_path / "copy", method_named("int8", None))
    assert "quantization_config says compressed-tensors" in refused(
        tmp_path / "copy", tmp_path / "again"
    )


def test_groups_that_do_not_divide_a_layer_are_refused(tmp_path: Path, model: Path):
    message = refused(model, tmp_path / "copy", "w4a16", 64)
    assert "group_size must divide the inputs of every linear layer, got 64" in message
    assert "mlp.down_proj has 96" in message


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    message = refused(model, tmp_path / "copy")
    assert f"bytes, and {tmp_path} has 1000 left" in message


@pytest.mark.parametrize("number", [3, 30])
def test_a_disk_that_fills_up_leaves_no_half_model(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    fill_the_disk(monkeypatch, number)
    before = left_in(tmp_path)
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be written: No space left"):
        write_quantized_copy(model, tmp_path / "copy", method_named("int8", None))
    assert left_in(tmp_path) == before


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, model: Path):
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    before = left_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_quantized_copy(
            model, tmp_path / "copy", method_named("int8", None), progress=interrupt
        )
    assert left_in(tmp_path) == before


def test_a_directory_that_was_filled_meanwhile_stays(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill(done: int, total: int) -> None:
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / "mine").touch()

    with pytest.raises(ConfigError, match="can't be written: Directory not empty"):
        write_quantized_copy(model, tmp_path / "copy", method_named("int8", None), progress=fill)
    assert left_in(tmp_path) == {"model", "copy"}
    assert left_in(tmp_path / "copy") == {"mine"}


def test_a_tensor_that_holds_nan_is_named(tmp_path: Path, model: Path):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight: NaN and infinity"):
        write_quantized_copy(model, tmp_path / "copy", method_named("w4a16", None))
    assert left_in(tmp_path) == {"model"}


def test_memory_is_that_of_some_rows(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    largest = 0
    encoded = Compressed.encoded

    def watched(self: Compressed, weight: Any, scales: str) -> Any:
        nonlocal largest
        largest = max(largest, weight.size)
        return encoded(self, weight, scales)

    monkeypatch.setattr(Compressed, "encoded", watched)
    monkeypatch.setattr("aioserve.models.stored.BLOCK_VALUES", 500)
    write_quantized_copy(model, tmp_path / "small", method_named("w4a16", None))
    assert largest <= 500
    monkeypatch.undo()
    write_quantized_copy(model, tmp_path / "whole", method_named("w4a16", None))
    small, whole = (tensors_in(tmp_path / name) for name in ("small", "whole"))
    assert all(torch.equal(small[name], whole[name]) for name in whole)


def test_a_file_that_can_not_be_read_is_an_error_of_the_model(tmp_path: Path, model: Path):
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        write_quantized_copy(model, tmp_path / "copy", method_named("int8", None))
