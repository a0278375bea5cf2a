"""Spans of OpenTelemetry, as its SDK gets them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aioserve.server.call_reports import Spans
from tests.server.serving import served
from tests.waits import until

BODY: dict[str, Any] = {
    "model": "pyhelp",
    "prompt": "unmistakable = 'prompt'\n",
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0.5,
}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.mark.asyncio
async def test_a_call_is_a_span_of_its_callers_trace(exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "job-1"}
    async with served(num_pages=64) as (_, client):
        for stream in (False, True):
            body = BODY | {"stream": stream}
            await client.post("/v1/completions", json=body, headers=headers)
        await client.get("/v1/models", headers=headers)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["text_completion pyhelp"] * 2
    for span, stream in zip(spans, (False, True), strict=True):
        assert span.context is not None
        assert span.parent is not None
        assert span.context.trace_id == int(TRACE, 16)
        assert span.parent.span_id == int(PARENT, 16)
        assert span.kind == trace.SpanKind.SERVER
        assert span.status.status_code == trace.StatusCode.UNSET
        found = dict(span.attributes or {})
        assert found.pop("gen_ai.usage.input_tokens") > 0  # type: ignore
        assert found.pop("gen_ai.usage.cache_read.input_tokens") >= 0  # type: ignore
        assert found.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore
        assert found == {
            "aioserve.request_id": "job-1",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "aioserve",
            "gen_ai.request.max_tokens": 6,
            "gen_ai.request.model": "pyhelp",
            "gen_ai.request.stream": stream,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.response.model": "pyhelp",
            "gen_ai.usage.output_tokens": 6,
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "http.route": "/v1/completions",
        }
    assert "unmistakable" not in "".join(span.to_json() for span in spans)


@pytest.mark.asyncio
async def test_each_api_says_its_limit_of_tokens_by_one_attribute(
    exporter: InMemorySpanExporter,
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with served(num_pages=256) as (_, client):
        for path, body in (
            ("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 3}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
            ("/v1/messages", {"messages": messages, "max_tokens": 3}),
        ):
            answer = await client.post(path, json={"model": "pyhelp", **body})
            assert answer.status_code == 200, answer.text
        await until(lambda: len(exporter.get_finished_spans()) == 3)
    for span in exporter.get_finished_spans():
        assert (span.attributes or {})["gen_ai.request.max_tokens"] == 3


@pytest.mark.asyncio
async def test_spans_end_with_calls_that_fail_or_are_left(exporter: InMemorySpanExporter) -> None:
    async with served(num_pages=256) as (engine, client):
        await client.post("/v1/completions", json=BODY | {"model": "x" * 300})
        body = BODY | {"max_tokens": 400}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: len(exporter.get_finished_spans()) == 2)
    refused, left = exporter.get_finished_spans()
    assert (refused.attributes or {})["error.type"] == "model_not_found"
    assert refused.name == "text_completion"
    assert refused.status.status_code == trace.StatusCode.UNSET  # the client's fault
    assert (left.attributes or {})["error.type"] == "client_left"
    assert left.status.status_code == trace.StatusCode.ERROR


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert Spans.installed() is None
