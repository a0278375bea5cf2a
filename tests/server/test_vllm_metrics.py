"""`/metrics` under vLLM's names: the numbers equal those under our own names."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioserve import Speculation
from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.test_metrics import BODY, scraped, value

pytestmark = pytest.mark.asyncio

LABELS = {"model_name": "pyhelp", "engine": "0"}
SAME = {
    "vllm:generation_tokens_total": "aioserve_generated_tokens_total",
    "vllm:prefix_cache_hits_total": "aioserve_cached_tokens_total",
    "vllm:num_preemptions_total": "aioserve_preemptions_total",
    "vllm:kv_cache_usage_perc": "aioserve_kv_use_ratio",
    "vllm:num_requests_running": "aioserve_sequences_running",
    "vllm:num_requests_waiting": "aioserve_requests_waiting",
    "vllm:time_to_first_token_seconds_sum": "aioserve_request_time_to_first_token_seconds_sum",
    "vllm:e2e_request_latency_seconds_sum": "aioserve_request_seconds_sum",
    "vllm:request_queue_time_seconds_sum": "aioserve_request_queue_seconds_sum",
    "vllm:request_prefill_time_seconds_sum": "aioserve_request_prefill_seconds_sum",
    "vllm:request_decode_time_seconds_count": "aioserve_request_decode_seconds_count",
    "vllm:request_inference_time_seconds_sum": "aioserve_request_inference_seconds_sum",
    "vllm:request_prompt_tokens_sum": "aioserve_request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum": "aioserve_request_generated_tokens_sum",
    "vllm:request_time_per_output_token_seconds_sum": "aioserve_request_inter_token_seconds_sum",
    "vllm:inter_token_latency_seconds_sum": "aioserve_token_gap_seconds_sum",
    "vllm:time_per_output_token_seconds_count": "aioserve_token_gap_seconds_count",
}


async def test_both_names_have_the_same_numbers() -> None:
    settings = ServerSettings(metrics_names="both")
    speculation = Speculation(drafter="ngram:min_ngram=1")
    async with served(settings, num_pages=128, speculation=speculation) as (engine, client):
        for n in (1, 2):
            answer = await client.post("/v1/completions", json=BODY | {"n": n})
            assert answer.status_code == 200
        stats, found = engine.stats(), await scraped(client)
    for name, own in SAME.items():
        assert value(found, name, **LABELS) == value(found, own), name
    prompt_tokens = stats.tokens_prefilled_total + stats.tokens_cached_total
    assert value(found, "vllm:prompt_tokens_total", **LABELS) == prompt_tokens > 0
    assert value(found, "vllm:prefix_cache_queries_total", **LABELS) == prompt_tokens
    ended = dict.fromkeys(("stop", "abort", "error"), 0) | {"length": 2}
    for reason, count in ended.items():
        labels = LABELS | {"finished_reason": reason}
        assert value(found, "vllm:request_success_total", **labels) == count
    drafted = sum(stats.tokens_drafted_total)
    assert value(found, "vllm:spec_decode_num_draft_tokens_total", **LABELS) == drafted
    gaps = [
        count for (name, _), count in found.items() if name == "aioserve_token_gap_seconds_count"
    ]
    assert gaps == [3 * (BODY["max_tokens"] - 1)]
    bucket = {"le": "+Inf"} | LABELS
    assert value(found, "vllm:inter_token_latency_seconds_bucket", **bucket) == gaps[0]


@pytest.mark.parametrize("names", ["vllm", "both"])
async def test_each_name_is_told_once(names: str) -> None:
    settings = ServerSettings(metrics_names=names)  # pyright: ignore[reportArgumentType]
    async with served(settings, num_pages=128) as (_, client):
        await client.post("/v1/completions", json=BODY)
        text = (await client.get("/metrics")).text
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    others = {name for name in families if not name.startswith(("vllm:", "process_"))}
    assert bool(others) == (names == "both")
