"""Access log: one line for each call, which says how it went and nothing of its content."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import SamplingParams
from aioserve.server import ServerSettings
from aioserve.server.call_log import CallLog
from aioserve.server.call_reports import AccessLog
from tests.server.serving import served
from tests.waits import until

PROMPT = "unmistakable = 'prompt'\n"
BODY: dict[str, Any] = {"model": "pyhelp", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}


class Lines(logging.Handler):
    """Lines of the access log, while a test runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, self.format(record)))


@pytest.fixture
def lines() -> Any:
    logger, handler = logging.getLogger("aioserve.access"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.asyncio
async def test_a_call_is_a_line_with_what_it_took(lines: list[tuple[int, str]]) -> None:
    key = "alice's-very-secret-key"
    settings = ServerSettings(api_keys={"alice": key})
    async with served(settings, num_pages=64) as (_, client):
        client.headers["x-api-key"] = key
        for stream in (False, True):
            body = BODY | {"stream": stream}
            headers = {"x-request-id": f"job-{stream}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
        await client.post("/v1/completions", json=BODY | {"temperature": -1})
        await client.get("/v1/models")
    levels = [level for level, _ in lines]
    told = [json.loads(line) for _, line in lines]
    assert levels == [logging.INFO] * 3 + [logging.DEBUG]
    for one, stream in zip(told, (False, True), strict=False):
        assert one["request_id"] == f"job-{stream}"
        assert (one["route"], one["status"], one["whole"]) == ("/v1/completions", 200, True)
        assert (one["tenant"], one["model"], one["stream"]) == ("alice", "pyhelp", stream)
        assert one["completion_tokens"] == 6
        assert one["prompt_tokens"] > one["cached_tokens"] >= 0
        assert one["finish_reason"] == "length"
        assert 0 < one["first_token_seconds"] < one["total_seconds"]
        assert one["error"] is None
    assert (told[2]["status"], told[2]["error"]) == (400, "InvalidSamplingError")
    assert told[3]["route"] == "/v1/models"
    text = "\n".join(line for _, line in lines)
    assert "unmistakable" not in text
    assert key not in text
    assert answer.text not in text


@pytest.mark.asyncio
async def test_a_refusal_without_a_code_is_called_by_its_class_or_its_status(
    lines: list[tuple[int, str]],
) -> None:
    async with served(num_pages=64) as (_, client):
        await client.post("/v1/completions", json=BODY | {"best_of": 0})
        await client.post("/v1/completions", json=BODY | {"max_tokens": "many"})
        await client.post("/v1/completions", content=b"{}")
        chat = {"model": "pyhelp", "input": [{"role": "user", "content": ""}], "temperature": -1}
        await client.post("/v1/responses", json=chat)
        await client.post("/v1/completions", json=BODY | {"model": "another"})
    told = [json.loads(line) for _, line in lines]
    assert [(one["status"], one["error"]) for one in told] == [
        (400, "InvalidSamplingError"),
        (400, "bad_request"),
        (415, "unsupported_media_type"),
        (400, "InvalidSamplingError"),
        (404, "model_not_found"),
    ]


MESSAGES = [{"role": "user", "content": "unmistakable"}]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [PROMPT, "a"], "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/responses", {"input": "unmistakable", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/embeddings", {"input": [PROMPT, "a"]}),
    ],
)
async def test_every_api_tells_what_its_calls_took(
    lines: list[tuple[int, str]], path: str, body: dict[str, Any]
) -> None:
    whole = path == "/v1/embeddings"
    async with served(num_pages=256) as (engine, client):
        for stream in (False,) if whole else (False, True):
            asked = body if whole else body | {"stream": stream}
            answer = await client.post(path, json=asked | {"model": "pyhelp"})
            assert answer.status_code == 200, answer.text
        generated = engine.stats().tokens_generated_total
    told = [json.loads(line) for _, line in lines]
    assert [(one["route"], one["whole"], one["error"]) for one in told] == [
        (path, True, None) for _ in told
    ]
    assert sum(one["completion_tokens"] for one in told) == generated
    assert all(one["prompt_tokens"] > 0 for one in told)
    assert all(whole or one["first_token_seconds"] > 0 for one in told)
    assert "unmistakable" not in "".join(line for _, line in lines)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/responses", {"input": "unmistakable", "max_output_tokens": 3}),
    ],
)
async def test_a_call_that_ends_before_its_first_token_tells_of_its_request(
    lines: list[tuple[int, str]], path: str, body: dict[str, Any], stream: bool
) -> None:
    late = {"model": "pyhelp", "deadline_seconds": 0.3, "stream": stream}
    busy = SamplingParams(max_tokens=3900, ignore_eos=True)
    async with served(num_pages=256, max_num_seqs=1) as (engine, client):
        serving = asyncio.create_task(engine.generate("import", busy))
        await until(lambda: engine.stats().num_running)
        answer = await client.post(path, json=body | late)
        serving.cancel()
        assert answer.status_code == 504, answer.text
    told = json.loads(lines[0][1])
    assert (told["finish_reason"], told["error"]) == ("abort", "deadline_exceeded")
    assert told["prompt_tokens"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_told_of(lines: list[tuple[int, str]], stream: bool) -> None:
    body = BODY | {"max_tokens": 400, "stream": stream}
    async with served(num_pages=256) as (engine, client):
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: lines)
    told = json.loads(lines[0][1])
    assert not told["whole"]
    assert told["status"] in ({None, 200} if stream else {None})


texts = st.text(max_size=60)


@given(texts, texts, texts, texts, st.sampled_from(["json", "key_value"]))
def test_no_text_of_others_ends_a_line_or_looks_like_another_field(
    request_id: str, tenant: str, model: str, error: str, form: Literal["json", "key_value"]
) -> None:
    record = CallLog(call_id="0" * 32, request_id=request_id, method="POST")
    record.tenant, record.model, record.error = tenant, model, error
    logger, handler = logging.getLogger("aioserve.access"), Lines()
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.DEBUG)
        AccessLog(form).ended(record)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    ((_, line),) = handler.lines
    assert all(" " <= character <= "~" for character in line)
    found = json.loads(line) if form == "json" else fields_of(line)
    given = {"request_id": request_id, "tenant": tenant, "model": model, "error": error}
    assert {name: found[name] for name in given} == given
    assert len(found) == 16 or form == "key_value"


def fields_of(line: str) -> dict[str, Any]:
    """Fields of `name=value name="value"`, as read by a parser that knows JSON strings."""
    found: dict[str, Any] = {}
    while line:
        name, _, line = line.partition("=")
        if line.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(line)
            line = line[end + 1 :]
        else:
            value, _, line = line.partition(" ")
        assert name not in found
        found[name] = value
    return found


@pytest.mark.asyncio
async def test_the_log_can_be_switched_off(lines: list[tuple[int, str]]) -> None:
    async with served(ServerSettings(access_log="off"), num_pages=64) as (_, client):
        await client.get("/no/such")
    assert lines == []
