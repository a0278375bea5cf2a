"""Forms with repeats that multiply beyond a bound: each API answers 400, and names the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import served
from tests.server.talking import ASK, CHAT_BODY, scripted

pytestmark = pytest.mark.asyncio

HUGE = "((a{1000}){1000}){1000}"
SCHEMA = {"type": "string", "pattern": HUGE}
OBJECT = {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"]}
GBNF = 'root ::= (("a"{1000}){1000}){1000}'
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": HUGE}, "regex"),
    ({"ebnf": GBNF}, "ebnf"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"guided_regex": HUGE}, "guided_regex"),
    ({"guided_grammar": f"start: T\nT: /{HUGE}/"}, "guided_grammar"),
    ({"structured_outputs": {"regex": HUGE}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs"),
    ({"response_format": {"type": "structural_tag"} | TAG}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": OBJECT},
            }
        },
        "response_format",
    ),
]


async def test_openais_routes_refuse_them_by_the_name_of_the_field() -> None:
    async with served() as (_, client):
        for form, name in FORMS:
            for path, asked in (
                ("/v1/chat/completions", {"messages": ASK}),
                ("/v1/completions", {"prompt": "json"}),
            ):
                answer = await client.post(path, json={"model": "pyhelp"} | asked | form)
                assert answer.status_code == 400, (form, answer.text)
                error = answer.json()["error"]
                assert error["param"] == name
                assert "50000 are taken at most" in error["message"]
        form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": OBJECT}}}
        answer = await client.post("/v1/responses", json={"model": "pyhelp", "input": "a"} | form)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "text.format"
        body = {"model": "pyhelp", "prompt": "json", "format": OBJECT, "stream": False}
        answer = await client.post("/api/generate", json=body)
        assert answer.status_code == 400
        assert "format must be" in answer.json()["error"]


async def test_strict_tools_refuse_them() -> None:
    function = {"name": "weather", "parameters": OBJECT, "strict": True}
    async with scripted("Hello.") as (_, client):
        answer = await client.post(
            "/v1/chat/completions",
            json=CHAT_BODY | {"tools": [{"type": "function", "function": function}]},
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "tools"
    assert "50000 are taken at most" in answer.json()["error"]["message"]
