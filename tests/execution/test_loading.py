"""The memory of KV pools: the pages that fit, and the option to blame if they don't."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aioserve import Engine, Speculation, _native
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution import loading
from aioserve.execution.loading import cpu, place
from aioserve.execution.speculation.branches import scratch_pages
from tests.waits import LIMIT_SECONDS, until

TOO_MANY = 2**31 - 1


@pytest.mark.parametrize("option", ["num_pages", "num_host_pages"])
@pytest.mark.asyncio
async def test_a_pool_that_cannot_be_reserved_is_blamed_on_its_option(option):
    options: dict[str, Any] = {"num_pages": 64, option: TOO_MANY}
    config = EngineConfig(page_size=128, **options)
    with pytest.raises(ConfigError, match=f"^{option}={TOO_MANY} pages of KV cache can't"):
        await loading.load("pyhelp", config, num_slots=4)


@pytest.mark.asyncio
async def test_a_loading_that_is_cancelled_ends_when_its_pages_are_allocated(monkeypatch):
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def allocated(*args):
        began.set()
        assert go_on.wait(LIMIT_SECONDS)
        ended.set()
        raise ConfigError("nobody hears of this")

    monkeypatch.setattr(place, "allocated", allocated)
    loaded = asyncio.ensure_future(loading.load("pyhelp", EngineConfig(), num_slots=4))
    await until(began.is_set)
    loaded.cancel()
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not loaded.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await loaded
    assert ended.is_set()


@pytest.mark.asyncio
async def test_host_pages_are_taken_from_the_memory_that_the_device_pages_may_have(monkeypatch):
    async def num_pages(**options) -> int:
        config = EngineConfig(memory_utilization=0.5, **options)
        loaded = await loading.load("pyhelp", config, num_slots=4)
        await loaded.runner.aclose()
        return loaded.limits.num_pages

    loaded = await loading.load("pyhelp", EngineConfig(num_pages=100), num_slots=4)
    await loaded.runner.aclose()
    page_bytes = loaded.description["kv_cache_bytes"] // 100
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 200 * page_bytes)

    assert await num_pages() == 100
    assert await num_pages(num_host_pages=70) == 30
    with pytest.raises(ConfigError, match="num_host_pages=100 leave 0 bytes"):
        await num_pages(num_host_pages=100)


@pytest.mark.asyncio
async def test_the_size_of_the_host_pool_is_a_fact_of_the_loaded_model():
    async with Engine("pyhelp", num_pages=64, num_host_pages=16) as engine:
        facts = engine.dump()["model"]
    assert facts["host_kv_cache_bytes"] * 4 == facts["kv_cache_bytes"]
    loaded = await loading.load("pyhelp", EngineConfig(num_pages=64), num_slots=4)
    await loaded.runner.aclose()
    assert loaded.description["host_kv_cache_bytes"] == 0


@pytest.mark.asyncio
async def test_pages_of_branches_are_told_beside_those_of_requests(monkeypatch):
    async def facts(**options) -> dict[str, Any]:
        loaded = await loading.load("pyhelp", EngineConfig(**options), num_slots=4)
        await loaded.runner.aclose()
        return dict(loaded.description)

    options: dict[str, Any] = {
        "speculation": Speculation(drafter="medusa", max_tokens=8, max_branches=2),
        "max_num_seqs": 4,
    }
    without, found = await facts(num_pages=100), await facts(num_pages=100, **options)
    page_bytes = without["kv_cache_bytes"] // 100
    scratch = scratch_pages(2, 8, 4, 16, num_groups=1)
    assert (without["scratch_kv_cache_bytes"], found["kv_cache_bytes"]) == (0, 100 * page_bytes)
    assert found["scratch_kv_cache_bytes"] == scratch * page_bytes

    beside = f"and {scratch} pages for max_branches=2"
    with pytest.raises(ConfigError, match=f"{TOO_MANY} pages of KV cache {beside} can't be"):
        await facts(num_pages=TOO_MANY, page_size=16, **options)
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 10 * page_bytes)
    with pytest.raises(ConfigError, match=f"num_host_pages=0 {beside} leave 0 bytes"):
        await facts(**options)


@pytest.mark.asyncio
async def test_the_backend_is_chosen_by_name_and_the_environment_only_fills_in(monkeypatch):
    async def used(**options) -> str:
        loaded = await loading.load("pyhelp", EngineConfig(num_pages=8, **options), num_slots=4)
        await loaded.runner.aclose()
        return loaded.description["backend"]

    monkeypatch.delenv("AIOSERVE_OPS", raising=False)
    assert await used() == "native"
    assert await used(backend="reference") == "reference"
    monkeypatch.setenv("AIOSERVE_OPS", "reference")
    assert await used() == "reference"
    assert await used(backend="native") == "native"
    monkeypatch.setenv("AIOSERVE_OPS", "natvie")
    with pytest.raises(ConfigError, match="AIOSERVE_OPS must be one of auto, native, reference"):
        await used()
    with pytest.raises(ConfigError, match="backend must be one of 'auto', 'native', 'reference', "):
        Engine("pyhelp", backend="natvie")  # pyright: ignore[reportArgumentType]


@pytest.mark.asyncio
async def test_a_build_without_the_kernels_of_this_cpu_says_so(monkeypatch, caplog):
    async def warnings() -> list[str]:
        caplog.clear()
        loaded = await loading.load("pyhelp", EngineConfig(num_pages=8), num_slots=2)
        await loaded.runner.aclose()
        return [record.message for record in caplog.records if "no kernels" in record.message]

    assert await warnings() == []
    info = _native.cpu_info()
    monkeypatch.setattr(_native, "cpu_info", lambda: info | {"best_isa": "avx1024"})
    (told,) = await warnings()
    assert told.startswith("This build has no kernels for avx1024, the best that this CPU has")
