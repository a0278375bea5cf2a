"""Families of models that plugins offer: the same tokens as bundled ones, and errors that name
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import (
    Engine,
    ModelFamily,
    ModelFamilySpec,
    PluginError,
    SamplingParams,
    UnsupportedModelError,
    hookimpl,
)
from aioserve.architectures import (
    Architecture,
    Fields,
    activation,
    llama_like,
    read_rope,
    read_shape,
)
from aioserve.capacity.models import read_sizes
from aioserve.models.families import FAMILIES
from aioserve.plugins import PluginRegistry
from aioserve.testing import check_model_family
from aioserve.testing.random_model import write_random_model
from tests.plugin_system.planted import entry_point

CONFIG: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def like_llama(config: Fields) -> Architecture:
    shape = read_shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
    )


MINE = ModelFamily(model_type="mine", describe=like_llama, example=CONFIG)


class Plugin:
    def __init__(self, family: Any = MINE, name: str = "MineForCausalLM") -> None:
        self.spec = ModelFamilySpec(name, family, "Llama by another name")

    @hookimpl
    def aioserve_model_families(self):
        return [self.spec]


async def tokens_of(path: Path, *plugins: object, **options: Any) -> list[tuple[int, ...]]:
    prompts = [[7], list(range(1, 60)), [5] * 20]
    found = []
    async with Engine(str(path), device="cpu", plugins=plugins, **options) as engine:
        for params in (
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True),
        ):
            found += [(await engine.generate(prompt, params)).token_ids for prompt in prompts]
    return found


def renamed(path: Path, target: Path, **changes: Any) -> Path:
    """The same model, whose config.json says something else."""
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return write_random_model(tmp_path / "bundled", config, seed=5)


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["architectures", "model_type"])
async def test_llama_by_another_name_has_the_same_tokens(
    bundled: Path, tmp_path: Path, by: str
) -> None:
    names = ["MineForCausalLM"] if by == "architectures" else []
    mine = renamed(bundled, tmp_path / "mine", architectures=names, model_type="mine")
    expected = await tokens_of(bundled)
    assert await tokens_of(mine, Plugin()) == expected
    small = await tokens_of(mine, Plugin(), max_num_batched_tokens=8, quantization=None)
    assert small == expected
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        await tokens_of(mine)


def test_a_family_keeps_its_contract() -> None:
    check_model_family(MINE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"example": {}}, "must have an example"),
        ({"model_type": ""}, "model_type must be a str"),
        ({"describe": 5}, "describe must be callable"),
        ({"describe": lambda config: 1}, "must give an Architecture"),
        ({"describe": lambda config: 1 // 0}, "raised ZeroDivisionError"),
        ({"example": {**CONFIG, "num_key_value_heads": 3}}, "a divisor of"),
    ],
)
def test_the_check_finds_what_breaks_the_contract(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_model_family(msgspec.structs.replace(MINE, **changes))


def test_the_check_finds_a_description_that_changes() -> None:
    counted: list[int] = []

    def describe(config: Fields) -> Architecture:
        counted.append(1)
        changed = {**config.values, "intermediate_size": 96 + len(counted)}
        return like_llama(Fields(changed, config.source))

    with pytest.raises(AssertionError, match="two architectures"):
        check_model_family(msgspec.structs.replace(MINE, describe=describe))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_no_plugin_takes_the_name_of_a_bundled_family(installed, caplog, name: str) -> None:
    installed.append(entry_point("shadowing", lambda: Plugin(name=name)))
    registry = PluginRegistry()
    assert f"'{name}' is built in; plugin shadowing (some-dist 1.2) must give" in caplog.text
    assert registry.known_kinds().families == FAMILIES
    with pytest.raises(PluginError, match="is built in"):
        PluginRegistry([Plugin(name=name)])


def test_no_plugin_takes_the_model_type_of_another_family(installed, caplog) -> None:
    llama = msgspec.structs.replace(MINE, model_type="llama")
    installed.append(entry_point("a", lambda: Plugin(llama)))
    installed.append(entry_point("b", Plugin))
    installed.append(entry_point("c", lambda: Plugin(name="OtherForCausalLM")))
    registry = PluginRegistry()
    assert "has the model_type 'llama', which is that of 'LlamaForCausalLM'" in caplog.text
    assert "'mine', which is that of 'MineForCausalLM', of plugin b (some-dist 1.2)" in caplog.text
    assert [*registry.model_families] == ["MineForCausalLM"]


def raising(config: Fields) -> Architecture:
    raise SystemExit("planted")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("describe", "why"),
    [
        (raising, r"MineForCausalLM \(given to the engine\) can't describe .*SystemExit"),
        (lambda config: None, r"MineForCausalLM \(given to the engine\) described .* by None"),
    ],
)
async def test_a_family_that_fails_names_its_plugin(
    bundled: Path, tmp_path: Path, describe: Any, why: str
) -> None:
    mine = renamed(bundled, tmp_path / "mine", architectures=["MineForCausalLM"])
    failing = msgspec.structs.replace(MINE, describe=describe)
    with pytest.raises(PluginError, match=why):
        await tokens_of(mine, Plugin(failing))
    assert await tokens_of(bundled, Plugin(failing)) == await tokens_of(bundled)


def test_what_a_plugin_describes_can_be_planned(bundled: Path, tmp_path: Path) -> None:
    mine = renamed(bundled, tmp_path / "mine", architectures=["MineForCausalLM"])
    known = PluginRegistry([Plugin()]).known_kinds()
    assert read_sizes(str(mine), known).parameters == read_sizes(str(bundled)).parameters
