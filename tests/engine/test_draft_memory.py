"""`aioserve plan` predicts the memory that an engine takes for a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import Engine, Speculation
from aioserve.assets import draft_path
from aioserve.capacity.capacity import DraftMemory, capacity_of
from aioserve.capacity.drafts import memory_of_head, memory_of_model
from aioserve.capacity.models import read_sizes
from aioserve.capacity.weights import read_weights
from aioserve.errors import ConfigError, ModelError, WeightsError
from tests.engine.test_draft_heads import models, speculation_of
from tests.models.heads.directories import HIDDEN, eagle3_config, eagle3_tensors, write_head

__all__ = ["models"]

pytestmark = pytest.mark.asyncio

PAGES = 24


async def facts_of(model: str, speculation: Speculation) -> dict[str, Any]:
    async with Engine(model, speculation=speculation, num_pages=PAGES, page_size=8) as engine:
        return engine.dump()["model"]["draft"]


@pytest.mark.parametrize("kind", ["eagle3", "few", "windows", "mtp", "medusa"])
async def test_a_head_takes_what_is_planned(models: Path, kind: str) -> None:
    target = str(models / "target")
    planned = memory_of_head(str(models / kind), read_sizes(target))
    facts = await facts_of(target, speculation_of(models, kind))
    assert planned.kind == facts["head"]
    assert planned.state_bytes_per_token * PAGES * 8 == facts["state_bytes"]
    assert planned.kv_bytes_per_token * PAGES * 8 == facts.get("kv_cache_bytes", 0)
    size = sum([path.stat().st_size for path in (models / kind).glob("*.safetensors")])
    # The file's tensors, without its header, its token table, and tensors that the target has
    # anyway.
    assert 0.5 * size < planned.weight_bytes <= size


async def test_a_draft_model_takes_what_is_planned() -> None:
    name = str(draft_path("pyhelp"))
    planned, weights = memory_of_model(name, read_sizes("pyhelp")), read_weights(name)
    assert weights is not None
    facts = await facts_of("pyhelp", Speculation(drafter="model"))
    assert planned.kind == "model"
    assert planned.kv_bytes_per_token * PAGES * 8 == facts["kv_cache_bytes"]
    assert facts["weight_bytes"] == weights.on_cpu.by_format()
    assert planned.weight_bytes == weights.on_gpu.held_bytes


async def test_a_draft_leaves_room_for_fewer_pages() -> None:
    sizes, room = read_sizes("pyhelp"), 1 << 25
    draft = DraftMemory(
        draft="d",
        kind="model",
        weight_bytes=1 << 20,
        kv_bytes_per_token=100,
        num_kv_heads=2,
        state_bytes_per_token=28,
    )
    without = capacity_of("pyhelp", sizes, gpu_memory_bytes=room)
    found = capacity_of("pyhelp", sizes, gpu_memory_bytes=room, draft=draft)
    beside = room - without.weight_bytes
    assert without.num_pages == int(beside * 0.9) // without.page_bytes_per_gpu
    page = without.page_bytes_per_gpu + 128 * 16
    assert found.num_pages == int((beside - (1 << 20)) * 0.9) // page
    assert (found.page_bytes_per_gpu, found.draft) == (without.page_bytes_per_gpu, draft)
    full = capacity_of("pyhelp", sizes, gpu_memory_bytes=found.weight_bytes + 1000, draft=draft)
    assert not full.weights_fit
    assert full.num_pages == 0


async def test_what_is_no_head_is_refused(models: Path) -> None:
    target = str(models / "target")
    with pytest.raises(ModelError, match="architectures"):
        memory_of_head(target, read_sizes(target))
    with pytest.raises(ModelError, match=r"no config\.json"):
        memory_of_head(str(models), read_sizes(target))


@pytest.mark.parametrize(
    ("layer", "changed"),
    [
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
        ({}, {"target_hidden_size": 40}),
        ({"hidden_size": 40}, {"target_hidden_size": HIDDEN}),
        ({"vocab_size": 99}, {"draft_vocab_size": 99}),
    ],
    ids=str,
)
async def test_a_head_of_another_model_is_refused_in_the_words_of_an_engine(
    models: Path, tmp_path: Path, layer: dict[str, Any], changed: dict[str, Any]
) -> None:
    config, target = eagle3_config(layer, **changed), str(models / "target")
    write_head(tmp_path, config, eagle3_tensors(config, embedding=False))
    speculation = Speculation(drafter=f"eagle3:path={tmp_path}")
    with pytest.raises(ModelError) as of_engine:
        async with Engine(target, speculation=speculation):
            pass
    with pytest.raises(ModelError) as of_plan:
        memory_of_head(str(tmp_path), read_sizes(target))
    assert str(tmp_path / "config.json") in str(of_plan.value)
    assert str(of_engine.value) == f"drafter 'eagle3' can't be loaded: {of_plan.value}"


async def test_a_head_for_a_model_that_makes_no_tokens_is_refused(models: Path) -> None:
    sizes = msgspec.structs.replace(read_sizes(str(models / "target")), has_head=False)
    with pytest.raises(ModelError, match="a head can't draft for a model that makes no tokens"):
        memory_of_head(str(models / "mtp"), sizes)


async def test_a_draft_of_another_vocabulary_is_not_planned(models: Path) -> None:
    target = read_sizes(str(models / "target"))
    with pytest.raises(ConfigError, match=r"vocabulary of 128256 tokens, and .* of 288"):
        memory_of_model("llama-3-1b", target)


@pytest.mark.parametrize("changed", [{"num_hidden_layers": 2}, {"intermediate_size": 2**31 - 1}])
async def test_what_a_head_says_of_itself_is_held_against_its_files(
    changed: dict[str, int], models: Path, tmp_path: Path
) -> None:
    tensors = eagle3_tensors(eagle3_config())
    head = write_head(tmp_path, eagle3_config(changed), tensors)
    with pytest.raises(WeightsError, match=r"lack model\.layers\.1|config.json asks for"):
        memory_of_head(str(head), read_sizes(str(models / "target")))
