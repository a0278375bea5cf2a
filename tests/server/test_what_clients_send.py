"""Fields that ask for nothing are let through and counted in every API.

Fields that would change an answer are refused by name.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from aioserve.server.hint_fields import MAX_LOOKED_AT
from aioserve.server.hint_tables import TABLES, Hint, is_one_of
from tests.server.scripts import TEMPLATE, TURNS, scripted
from tests.server.what_clients_send import (
    BODIES,
    CHANGING,
    CLIENTS,
    ON_MODELS_THAT_DO_NOT_REASON,
)

pytestmark = pytest.mark.asyncio

PLAIN_TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}" + TURNS
EXAMPLES: dict[type, list[Any]] = {
    bool: [True, False],
    int: [0, 7],
    float: [0.5, 1],
    str: ["x", ""],
    dict: [{}, {"a": 1}],
    list: [[], ["a"]],
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f"}
WHERE: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", lambda more: more),
    "chat": ("/v1/chat/completions", lambda more: more),
    "chat: `stream_options` of it and of completions": (
        "/v1/completions",
        lambda more: {"stream_options": more},
    ),
    "chat: `tools`": (
        "/v1/chat/completions",
        lambda more: {"tools": [{"type": "function", "function": {"name": "f"}, **more}]},
    ),
    "responses": ("/v1/responses", lambda more: more),
    "responses: `stream_options`": ("/v1/responses", lambda more: {"stream_options": more}),
    "responses: `tools`": ("/v1/responses", lambda more: {"tools": [{**FUNCTION, **more}]}),
    "responses: `reasoning`": ("/v1/responses", lambda more: {"reasoning": more}),
    "embeddings, score, rerank": ("/v1/embeddings", lambda more: more),
    "messages": ("/v1/messages", lambda more: more),
    "messages: `tools`": ("/v1/messages", lambda more: {"tools": [{**TOOL, **more}]}),
    "messages: `thinking`": (
        "/v1/messages",
        lambda more: {"thinking": {"type": "adaptive", **more}},
    ),
    "messages: `output_config.format`": (
        "/v1/messages/count_tokens",
        lambda more: {
            "output_config": {"format": {"type": "json_schema", "schema": {"const": 1}, **more}}
        },
    ),
    "Ollama's": ("/api/chat", lambda more: more),
    "Ollama's: `options`": ("/api/chat", lambda more: {"options": more}),
}
"""Path and place of a field, by its table."""


def counted(metrics: str) -> dict[str, int]:
    rows = re.findall(r'let_through_fields_total{field="([^"]+)"} ([\d.]+)', metrics)
    return {field: int(float(count)) for field, count in rows}


def said(answer: httpx.Response) -> Any:
    """Return the text of an answer, without parts that differ each time."""
    told = answer.json()
    if "choices" in told:
        return told["choices"]
    if "output" in told:
        return [item.get("content") for item in told["output"]]
    return told.get("content") or told.get("message") or told.get("response") or told


async def sent(client: httpx.AsyncClient, path: str, more: dict[str, Any]) -> httpx.Response:
    return await client.post(path, json={"model": "scripted", **BODIES[path], **more})


async def let_through(client: httpx.AsyncClient, path: str, more: dict[str, Any]) -> set[str]:
    """Send the fields, with and without them. Return the names that were counted."""
    plain = await sent(client, path, {})
    before = counted((await client.get("/metrics")).text)
    answer = await sent(client, path, more)
    assert answer.status_code == 200, (path, more, answer.text)
    if "tools" not in more and "output_config" not in more:
        assert said(answer) == said(plain), (path, more)
    after = counted((await client.get("/metrics")).text)
    return {name for name, count in after.items() if count > before.get(name, 0)}


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE], ids=["reasons", "does not"])
async def test_what_changes_no_answer_is_let_through_and_counted(template: str) -> None:
    async with scripted(template=template) as (_, engine, client):
        assert engine.reasons == (template == TEMPLATE)
        for who, path, more, names in CLIENTS:
            assert await let_through(client, path, more) == names, (who, path)


async def test_what_is_about_reasoning_asks_a_model_without_any_for_nothing() -> None:
    async with scripted(template=PLAIN_TEMPLATE) as (_, _, client):
        for who, path, more, names in ON_MODELS_THAT_DO_NOT_REASON:
            assert await let_through(client, path, more) == names, (who, path, more)
    refused = 0
    async with scripted(template=TEMPLATE) as (_, _, client):
        for _, path, more, names in ON_MODELS_THAT_DO_NOT_REASON:
            answer = await sent(client, path, more)
            if answer.status_code == 200:  # a switch that isn't there, or a budget that is kept
                assert names <= {"thinking", "think"}, more
            else:
                assert any(name.partition(".")[0] in answer.text for name in names), answer.text
                refused += 1
    assert refused > len(ON_MODELS_THAT_DO_NOT_REASON) - 5


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE], ids=["reasons", "does not"])
async def test_what_would_change_an_answer_is_refused_by_name(template: str) -> None:
    async with scripted(template=template) as (_, _, client):
        for path, more, field in CHANGING:
            answer = await sent(client, path, more)
            assert answer.status_code == 400, (path, more)
            message = re.sub(r"\[\d+\]", "", answer.text)
            assert field in message, (path, more, message)
        assert not counted((await client.get("/metrics")).text)


def values_of(hint: Hint, *, reasons: bool) -> list[Any]:
    values = hint.always if reasons else hint.always + hint.without_reasoning
    examples = [EXAMPLES[one] if isinstance(one, type) else [one] for one in values]
    return list(itertools.chain(*examples))


@pytest.mark.more
@pytest.mark.parametrize("reasons", [True, False])
async def test_tables_hold_for_each_value_that_they_name_and_for_no_other(reasons: bool) -> None:
    assert WHERE.keys() == TABLES.keys()
    others = [5.5, -3, "no such", True, False, {"odd": 1}, ["odd"]]
    async with scripted(template=TEMPLATE if reasons else PLAIN_TEMPLATE) as (_, _, client):
        for about, (path, placed) in WHERE.items():
            rows = {name: values_of(hint, reasons=reasons) for name, hint in TABLES[about].items()}
            for number in range(max(map(len, rows.values()))):
                more = {name: row[number] for name, row in rows.items() if number < len(row)}
                answer = await sent(client, path, placed(more))
                assert answer.status_code == 200, (about, more, answer.text)
            for name, hint in TABLES[about].items():
                among = hint.always + hint.without_reasoning
                wrong = next(one for one in others if not is_one_of(one, among))
                wrongs = [wrong, *(hint.without_reasoning if reasons else ())]
                for value in wrongs:
                    value = EXAMPLES[value][0] if isinstance(value, type) else value
                    if is_one_of(value, hint.always):
                        continue
                    answer = await sent(client, path, placed({name: value}))
                    assert answer.status_code == 400, (about, name, value)
                    assert name in answer.text


async def test_a_hint_is_named_in_the_log_and_counted_as_often_as_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "aioserve.server")
    marked = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    tools = [marked, marked | {"function": {"name": "g"}}]
    async with scripted() as (_, _, client):
        body = {"model": "scripted", **BODIES["/v1/chat/completions"], "tools": tools}
        await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        metrics = (await client.get("/metrics")).text
    assert counted(metrics) == {"tools.cache_control": 2}
    lines = [one.getMessage() for one in caplog.records if "let" in one.getMessage()]
    assert lines == ["call mine: let tools.cache_control through, which changes nothing here"]


async def test_more_than_anybody_sends_is_refused() -> None:
    async with scripted() as (_, _, client):
        for count, status in ((MAX_LOOKED_AT - 100, 200), (MAX_LOOKED_AT, 400)):
            nulls = dict.fromkeys(f"odd{number}" for number in range(count))
            answer = await sent(client, "/v1/completions", {"logit_bias": nulls})
            assert answer.status_code == status, answer.text
        # The fields beside it are counted too.
        tools = [{"type": "function", "function": {"name": "f"}}] * MAX_LOOKED_AT
        many = await sent(client, "/v1/chat/completions", {"tools": tools, "odd": None})
    for one in (answer, many):
        assert one.status_code == 400
        assert f"at most {MAX_LOOKED_AT} fields" in one.text


async def test_what_stands_beside_a_hint_is_read_as_it_was_written() -> None:
    schema = {"const": 2**70, "title": "Å \U0001f600", "description": None}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}, "x": None}
    async with scripted() as (seen, _, client):
        for more in ({}, {"odd": None}, {"verbosity": "low"}):
            body = {"tools": [tool if more else {**tool, "cache_control": {}}], **more}
            assert (await sent(client, "/v1/chat/completions", body)).status_code == 200
    assert len(set(seen.prompts)) == 1
    assert str(2**70) in seen.prompts[0]
    assert json.dumps("Å", ensure_ascii=False)[1:-1] in seen.prompts[0]


async def test_no_penalties_are_what_ollamas_clients_mean_by_a_span_of_0() -> None:
    drawn = {"repeat_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    async with scripted() as (_, engine, client):
        for span, is_held in ((0, False), (-1, True), (64, True)):
            body = {"options": {**drawn, "repeat_last_n": span}}
            with patch.object(engine, "chat", wraps=engine.chat) as asked:
                assert (await sent(client, "/api/chat", body)).status_code == 200
            params = asked.call_args.args[1]
            assert (params.repetition_penalty != 1.0) == is_held
            assert (params.presence_penalty != 0.0) == is_held
            assert (params.frequency_penalty != 0.0) == is_held
