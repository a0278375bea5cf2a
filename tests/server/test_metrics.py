"""`/metrics`: its numbers are the engine's, and their number is bounded."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from aioserve import Engine, SamplingParams, Speculation
from aioserve.server import ServerSettings, create_app
from tests.server.serving import client_of, served
from tests.waits import until

PROMPT = "import json\n" * 8
BODY: dict[str, Any] = {
    "model": "pyhelp",
    "prompt": PROMPT,
    "max_tokens": 6,
    "ignore_eos": True,
}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
NAME = re.compile(
    r"aioserve_[a-z0-9_]+|process_[a-z_]+|vllm:(num_requests_waiting|num_requests_running|"
    r"kv_cache_usage_perc|cache_config_info)"
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(client: httpx.AsyncClient, key: str | None = None) -> Samples:
    headers = {} if key is None else {"x-api-key": key}
    text = (await client.get("/metrics", headers=headers)).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: object) -> float:
    return samples[name, tuple(sorted((key, str(each)) for key, each in labels.items()))]


@pytest.mark.asyncio
async def test_the_numbers_are_those_of_the_engine_and_of_all_its_requests() -> None:
    async with served(num_pages=128) as (engine, client):
        for stream in (False, True):
            await client.post("/v1/completions", json=BODY | {"stream": stream})
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        await engine.generate(PROMPT, params, tenant="of-the-program")  # not over HTTP
        stats = engine.stats()
        found = await scraped(client)
    assert value(found, "aioserve_generated_tokens_total") == stats.tokens_generated_total == 18
    assert value(found, "aioserve_cached_tokens_total") == stats.tokens_cached_total > 0
    assert value(found, "aioserve_steps_total") == stats.steps_total
    assert value(found, "aioserve_step_seconds_total") == pytest.approx(stats.step_seconds_total)
    pages = {"free": stats.pages_free, "cached": stats.pages_cached, "fenced": 0}
    for state, expected in (pages | {"held_by_requests": 0}).items():
        assert value(found, "aioserve_kv_pages", state=state) == expected
    for name in ("seconds", "queue_seconds", "prefill_seconds", "time_to_first_token_seconds"):
        assert value(found, f"aioserve_request_{name}_count") == 3, name
    assert value(found, "aioserve_request_inter_token_seconds_count") == 3
    assert value(found, "aioserve_request_generated_tokens_sum") == 18
    assert value(found, "aioserve_request_tokens_total", kind="generated", tenant="") == 18
    assert value(found, "aioserve_requests_total", finish_reason="length", tenant="") == 3
    route = {"route": "/v1/completions", "method": "POST", "status": 200}
    assert value(found, "aioserve_http_requests_total", **route) == 2
    assert value(found, "aioserve_http_requests_in_flight") == 1  # the scrape
    hits = stats.tokens_cached_total / (stats.tokens_cached_total + stats.tokens_prefilled_total)
    assert value(found, "aioserve_prefix_hit_ratio") == pytest.approx(hits)
    for phase in ("prefill", "decode"):
        work = getattr(stats, phase)
        for name in ("tokens", "seconds", "flops", "bytes"):
            shown = value(found, f"aioserve_phase_{name}_total", phase=phase)
            assert shown == pytest.approx(getattr(work, f"{name}_total"))
    for reason, count in stats.requests_finished_total.items():
        assert value(found, "aioserve_requests_finished_total", finish_reason=reason) == count
    assert value(found, "aioserve_tokens_per_step") == pytest.approx(stats.tokens_per_step)
    variance = "latency_variance_square_seconds"
    shown = value(found, f"aioserve_request_{variance}")
    assert shown == pytest.approx(getattr(stats, variance), abs=1e-12)
    assert value(found, "aioserve_service_gap_seconds") == pytest.approx(stats.service_gap_seconds)
    # The device's limits are unknown, and no request holds a page.
    absent = (
        "aioserve_compute_use_ratio",
        "aioserve_bandwidth_use_ratio",
        "aioserve_kv_fill_ratio",
    )
    assert not {name for name, _ in found} & set(absent)


@pytest.mark.asyncio
async def test_the_use_of_a_device_with_known_limits_is_shown() -> None:
    limits: dict[str, Any] = {"peak_flops_per_second": 1e12, "peak_bytes_per_second": 1e11}
    async with served(num_pages=128, **limits) as (engine, client):
        await client.post("/v1/completions", json=BODY)
        stats = engine.stats()
        found = await scraped(client)
    for phase in ("prefill", "decode"):
        for use in ("compute", "bandwidth"):
            expected = getattr(getattr(stats, phase), f"{use}_use")
            assert expected > 0
            shown = value(found, f"aioserve_{use}_use_ratio", phase=phase)
            assert shown == pytest.approx(expected)


@pytest.mark.asyncio
async def test_the_model_server_protocol_finds_its_gauges_while_requests_run() -> None:
    body = BODY | {"max_tokens": 200, "stream": True}
    async with served(num_pages=256, max_num_seqs=1) as (engine, client):
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: engine.stats().num_running == 1 and engine.stats().num_waiting == 2)
        found = await scraped(client)
        for call in calls:
            call.cancel()
        await until(lambda: not engine.stats().num_running)
    assert value(found, "vllm:num_requests_waiting") == 2
    assert value(found, "vllm:num_requests_running") == 1
    used = value(found, "vllm:kv_cache_usage_perc")
    assert 0 < used == value(found, "aioserve_kv_use_ratio") < 1
    assert value(found, "vllm:cache_config_info", block_size=16, num_gpu_blocks=256) == 1
    assert value(found, "aioserve_max_model_len_tokens") > 0


@pytest.mark.asyncio
async def test_prometheus_reads_both_formats_and_names_have_a_prefix() -> None:
    speculation = Speculation(drafter="ngram:min_ngram=1")
    async with served(num_pages=64, speculation=speculation) as (_, client):
        await client.post("/v1/completions", json=BODY)
        text = await client.get("/metrics")
        modern = await client.get("/metrics", headers=OPENMETRICS)
    assert text.headers["content-type"].startswith("text/plain")
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    reference = Path(__file__).parents[2] / "docs" / "reference"
    page = (reference / "server-metrics.md").read_text("utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `aios"))
    told = {name.removesuffix("_total") for name in re.findall("aioserve_[a-z0-9_]+", rows)}
    families = {family.name for family in openmetrics_families(modern.text)}
    assert told == {name for name in families if name.startswith("aioserve_")}
    named = [families]
    named.append({family.name for family in text_string_to_metric_families(text.text)})
    for names in named:
        assert len(names) > 40
        assert [name for name in names if not NAME.fullmatch(name)] == []


@pytest.mark.asyncio
async def test_nothing_that_clients_send_makes_new_series() -> None:
    settings = ServerSettings(api_keys={"alice": "alice's-very-secret-key"})
    async with served(settings, num_pages=128) as (engine, client):
        key = "alice's-very-secret-key"
        client.headers["x-api-key"] = key

        async def calls(mark: str) -> None:
            await client.post("/v1/completions", json=BODY)
            await client.post("/v1/completions", json=BODY | {"model": f"model-{mark}"})
            await client.get(f"/no/{mark}")
            await client.request(mark, "/v1/models")
            await client.get("/v1/models", headers={"x-request-id": mark, "host": "localhost"})
            await engine.generate(PROMPT, SamplingParams(max_tokens=1), tenant=f"tenant-{mark}")

        await calls("COPY")
        await scraped(client, key)
        before = await scraped(client, key)
        for mark in ("LOCK", "MOVE", "PURGE"):
            await calls(mark)
        after = await scraped(client, key)
    assert after.keys() == before.keys()
    counted = {"finish_reason": "length", "tenant": "alice"}
    assert value(after, "aioserve_requests_total", **counted) == 4
    other = {"route": "/v1/models", "method": "other", "status": 405}
    assert value(after, "aioserve_http_requests_total", **other) == 4


@pytest.mark.asyncio
async def test_a_client_that_leaves_is_counted_and_no_longer_in_flight() -> None:
    body = BODY | {"max_tokens": 400}
    async with served(num_pages=256) as (engine, client):
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: not engine.stats().num_running)
        left = {"route": "/v1/completions", "method": "POST", "status": "499"}
        counted = ("aioserve_http_requests_total", tuple(sorted(left.items())))
        aborted = ("aioserve_requests_total", (("finish_reason", "abort"), ("tenant", "")))

        async def once_counted() -> Samples | None:
            samples = await scraped(client)
            return samples if {counted, aborted} <= samples.keys() else None

        found = await until(once_counted)
    assert found[counted] == found[aborted] == 1
    assert value(found, "aioserve_http_requests_in_flight") == 1


@pytest.mark.asyncio
async def test_apps_of_one_process_and_of_one_engine_count_by_themselves() -> None:
    engine = Engine(num_pages=64)
    first, second = create_app(engine), create_app(engine)  # before it is entered
    async with (
        engine,
        Engine(num_pages=64) as other,
        client_of(first) as client,
        client_of(second) as beside,
        client_of(create_app(other)) as apart,
    ):
        await client.post("/v1/completions", json=BODY)
        found = [await scraped(each) for each in (client, beside, apart)]
    ended = ("aioserve_request_seconds_count", "aioserve_generated_tokens_total")
    assert [[value(each, name) for name in ended] for each in found] == [[1, 6], [1, 6], [0, 0]]
    route = {"route": "/v1/completions", "method": "POST", "status": "200"}
    name = ("aioserve_http_requests_total", tuple(sorted(route.items())))
    assert [name in each for each in found] == [True, False, False]


@pytest.mark.asyncio
async def test_metrics_can_be_switched_off() -> None:
    async with served(ServerSettings(metrics=False, page=False), num_pages=64) as (engine, client):
        assert (await client.get("/metrics")).status_code == 404
        assert engine.dump()["observers"] == []


@pytest.mark.asyncio
async def test_an_app_watches_its_engine_from_when_it_is_made_until_its_lifespan_ends() -> None:
    async with Engine(num_pages=64) as engine:
        app = create_app(engine)
        assert len(engine.dump()["observers"]) == 2
        for _ in range(2):
            async with app.router.lifespan_context(app):
                assert len(engine.dump()["observers"]) == 2
                async with client_of(app) as client:
                    await client.post("/v1/completions", json=BODY)
                    found = await scraped(client)
            assert engine.dump()["observers"] == []
    assert value(found, "aioserve_request_seconds_count") == 2
