"""What `aioserve plan` says of a draft is what an engine takes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    # Tensors of the file without its header, its table of tokens, and what the target has itself.
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


async def test_what_is_no_head_or_reads_other_layers_is_refused(models: Path) -> None:
    target = str(models / "target")
    with pytest.raises(ModelError, match="architectures"):
        memory_of_head(target, read_sizes(target))
    with pytest.raises(ModelError, match=r"no config\.json"):
        memory_of_head(str(models), read_sizes(target))


async def test_what_an_engine_refuses_is_not_planned(models: Path, tmp_path: Path) -> None:
    target = read_sizes(str(models / "target"))
    config = eagle3_config()
    tensors = eagle3_tensors(config)

    def refused(**changed: Any) -> str:
        head = write_head(tmp_path / "head", config | changed, tensors)
        with pytest.raises(ModelError) as caught:
            memory_of_head(str(head), target)
        return str(caught.value)

    assert "[0, 3] for a target of 3 layers" in refused(eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    assert str(tmp_path / "head" / "config.json") in refused(
        eagle_aux_hidden_state_layer_ids=[1, 2, 4]
    )
    wider = eagle3_config({"vocab_size": 300}, draft_vocab_size=300)
    assert "number of tokens must be that of the target" in refused(**wider)
    config = eagle3_config({"hidden_size": 2 * HIDDEN, "head_dim": 8})
    tensors = eagle3_tensors(config)
    assert f"hidden size must be that of the target, {HIDDEN}" in refused()
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
