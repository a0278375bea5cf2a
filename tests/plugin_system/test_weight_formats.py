"""Formats of weights that plugins offer: the tokens of the decoded weights, and errors that name
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aioserve import (
    Engine,
    PluginError,
    SamplingParams,
    UnsupportedModelError,
    WeightFormat,
    WeightFormatSpec,
    WeightPart,
    WeightReader,
    WeightsError,
    hookimpl,
)
from aioserve.architectures import Fields
from aioserve.models.quantization.config import METHODS
from aioserve.plugins import PluginRegistry
from aioserve.testing import check_weight_format
from aioserve.testing.random_model import write_random_model
from tests.plugin_system.planted import entry_point

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SAID = {"quant_method": "mine", "bits": 8}


class Reader(WeightReader):
    """Numbers of 8 bits, with a scale for each input, which is read whole."""

    unread = ("note",)

    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        return {
            "numbers": WeightPart(("I8",), (rows, columns)),
            "scales": WeightPart(("F32",), (columns,), by_rows=False),
        }

    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        return parts["numbers"].astype(np.float32) * parts["scales"]


def read(config: Fields) -> WeightReader:
    if config.integer("bits", 8) != 8:
        config.unsupported("bits", "numbers have 8 bits")
    return Reader()


def encode(weight: Any) -> dict[str, Any]:
    scales = np.abs(weight).max(axis=0).astype(np.float32) / 127
    return {"numbers": np.rint(weight / scales).astype(np.int8), "scales": scales}


MINE = WeightFormat(read=read, example={"bits": 8}, encode=encode)


class Plugin:
    def __init__(self, written: Any = MINE, name: str = "mine") -> None:
        self.spec = WeightFormatSpec(name, written)

    @hookimpl
    def aioserve_weight_formats(self):
        return [self.spec]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A model whose linear layers are stored in the format, and one with the decoded numbers."""
    plain = write_random_model(tmp_path / "plain", CONFIG, seed=5, dtype="float32")
    coded = tmp_path / "coded"
    coded.mkdir()
    (coded / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": SAID}))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        parts, module = encode(weight), name.removesuffix(".weight")
        stored |= {f"{module}.{part}": array for part, array in parts.items()}
        stored[f"{module}.note"] = np.zeros(1, np.int8)
        tensors[name] = Reader().decode(parts, 0, *weight.shape)
    save_file(stored, coded / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    return coded, plain


async def tokens_of(path: Path, *plugins: object, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    async with Engine(str(path), device="cpu", plugins=plugins, **options) as engine:
        return [
            (await engine.generate(prompt, params)).token_ids
            for prompt in ([7], list(range(1, 60)), [5] * 20)
        ]


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_are_those_of_the_decoded_weights(
    models: tuple[Path, Path], backend: str, dtype: str
) -> None:
    coded, plain = models
    expected = await tokens_of(plain, backend=backend, dtype=dtype)
    assert await tokens_of(coded, Plugin(), backend=backend, dtype=dtype) == expected


@pytest.mark.asyncio
async def test_without_the_plugin_the_model_is_refused(models: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="quant_method = 'mine' is not supported"):
        await tokens_of(models[0])


@pytest.mark.asyncio
async def test_a_setting_that_a_plugin_refuses_is_told(models: tuple[Path, Path]) -> None:
    file = models[0] / "config.json"
    said = json.loads(file.read_text())
    said["quantization_config"]["bits"] = 3
    file.write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.bits = 3"):
        await tokens_of(models[0], Plugin())


def test_a_format_keeps_its_contract() -> None:
    check_weight_format(MINE)


class Raising(Reader):
    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        raise SystemExit("planted")


class Doubles(Reader):
    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        return super().decode(parts, first, end, columns).astype(np.float64)


class Transposed(Reader):
    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        return super().decode(parts, first, end, columns).T


class OtherParts(Reader):
    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        return {"numbers": WeightPart(("I8",), (columns, rows))}


class OneDtype(Reader):
    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        """Name a dtype that others are part of, without a tuple around it."""
        dtypes: Any = "BF16"
        return {"codes": WeightPart(dtypes, (rows, columns))}


class ByPlace(Reader):
    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        decoded = super().decode(parts, first, end, columns)
        decoded[0] += 1
        return decoded


class Noise(Reader):
    def decode(self, parts: Any, first: int, end: int, columns: int) -> Any:
        return np.ones((end - first, columns), np.float32) * np.arange(columns, dtype=np.float32)


BAD = [
    (Raising, "can't decode .*SystemExit"),
    (Doubles, "decode must give float32"),
    (Transposed, "decode must give float32"),
    (OtherParts, "each part must be a WeightPart"),
    (OneDtype, "dtypes of a part must be a tuple of str"),
    (lambda: 5, "which is no WeightReader"),
]


@pytest.mark.parametrize(
    ("reader", "why"),
    [*BAD, (ByPlace, "other numbers"), (Noise, "a correlation of at least")],
)
def test_the_check_finds_what_breaks_the_contract(reader: Any, why: str) -> None:
    written = msgspec.structs.replace(MINE, read=lambda config: reader())
    with pytest.raises(AssertionError, match=why):
        check_weight_format(written)


@pytest.mark.asyncio
@pytest.mark.parametrize(("reader", "why"), BAD)
async def test_a_format_that_fails_names_its_plugin(
    models: tuple[Path, Path], reader: Any, why: str
) -> None:
    coded, plain = models
    plugin = Plugin(msgspec.structs.replace(MINE, read=lambda config: reader()))
    with pytest.raises(PluginError, match=rf"weight format mine \(given to the engine\).*{why}"):
        await tokens_of(coded, plugin)
    assert await tokens_of(plain, plugin) == await tokens_of(plain)


@pytest.mark.asyncio
async def test_a_part_that_is_missing_is_told(models: tuple[Path, Path]) -> None:
    file = models[0] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"lack model\.layers\.0\.mlp\.up_proj\.scales"):
        await tokens_of(models[0], Plugin())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_plugin_takes_the_name_of_a_bundled_format(installed, caplog, name: str) -> None:
    installed.append(entry_point("shadowing", lambda: Plugin(name=name)))
    registry = PluginRegistry()
    told = f"weight format '{name}' is built in; plugin shadowing (some-dist 1.2) must give"
    assert told in caplog.text
    assert registry.known_kinds().schemes == METHODS
