"""An engine with a CUDA device as programs open it: from files, through the loader."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, EngineClosedError, SamplingParams
from tests.execution.gpu.host_device import HostDevice, cuda_is_the_host
from tests.parity.tiny_models import write

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    write("qwen3", path, dtype="float32")
    return path


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    return cuda_is_the_host(monkeypatch)


@pytest.mark.asyncio
async def test_who_opens_an_engine_hears_of_each_graph_on_the_loop(
    tiny: Path, device: HostDevice
) -> None:
    told: list[tuple[int, int]] = []
    threads: set[threading.Thread] = set()

    def listen(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.current_thread())
        assert device.captured >= done

    engine = Engine(tiny, graph_sizes=(2,), capture_progress=listen, **OPTIONS)
    async with engine:
        assert told == [(0, 2), (1, 2), (2, 2)]
        assert threads == {threading.current_thread()}
        seconds = engine.dump()["model"]["loading_seconds"]
        assert {"weights", "kv_cache", "graphs"} < seconds.keys()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        assert (await engine.generate([1, 2], params)).usage.completion_tokens == 1
    assert device.captured == 2


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"graph_sizes": ()}, {"capture_graphs": False}])
async def test_where_no_graph_is_captured_at_the_start_nobody_is_told(
    tiny: Path, device: HostDevice, options: dict[str, Any]
) -> None:
    told: list[tuple[int, int]] = []
    engine = Engine(tiny, capture_progress=lambda *now: told.append(now), **(OPTIONS | options))
    async with engine:
        assert "graphs" not in engine.dump()["model"]["loading_seconds"]
    assert told == []


@pytest.mark.asyncio
async def test_what_a_listener_raises_ends_the_start_and_leaves_no_thread(
    tiny: Path, device: HostDevice
) -> None:
    before = {thread.name for thread in threading.enumerate()}

    def listen(done: int, total: int) -> None:
        if done == 1:
            raise ZeroDivisionError("planted")

    engine = Engine(tiny, graph_sizes=(2,), capture_progress=listen, **OPTIONS)
    with pytest.raises(ZeroDivisionError, match="planted"):
        await engine.__aenter__()
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.dump()
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if name.startswith("aioserve-")]
