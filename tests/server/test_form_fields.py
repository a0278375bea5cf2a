"""Fields that ask for the form of an answer, with the names of several servers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import ASK, chat_joined, completions_joined, post

pytestmark = pytest.mark.asyncio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"enum": [1, 2]}
GBNF = 'root ::= "a" root "b" | "c"'
STRUCTURE = {"begin": "<f=n>", "schema": SCHEMA, "end": "</f>"}
TAG: dict[str, Any] = {"structures": [STRUCTURE], "triggers": ["<f="], "at_least_one": True}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"ebnf": 'root ::= "x" [ab]{2}'}, "x[ab]{2}"),
    ({"ebnf": 'start: "x" /[ab]/'}, "x[ab]"),
    ({"guided_json": SCHEMA}, "[12]"),
    ({"guided_json": json.dumps(SCHEMA)}, "[12]"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": GBNF}, "a*cb*"),
    ({"grammar": GBNF}, "a*cb*"),
    ({"json_schema": SCHEMA}, "[12]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "[12]"),
    ({"structured_outputs": {"grammar": GBNF}}, "a*cb*"),
    ({"structured_outputs": {"structural_tag": TAG}}, r".*<f=n>[12]</f>.*"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, r".*<f=n>[12]</f>.*"),
    ({"response_format": {"type": "structural_tag"} | TAG}, r".*<f=n>[12]</f>.*"),
    ({"response_format": {"type": "text"}, "regex": "[ab]{3}"}, "[ab]{3}"),
]
SHORT = {"temperature": 0, "max_tokens": 64}


def body_of(path: str) -> dict[str, Any]:
    asked = {"messages": ASK} if path == CHAT else {"prompt": "json"}
    return {"model": "pyhelp", **asked, **SHORT}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answers_have_the_form_whole_and_in_pieces(path: str) -> None:
    async with served(num_pages=256) as (engine, client):
        marks = engine.tokenizer.encode("<f=n>12</f>", add_special_tokens=False)
        likely = {"logit_bias": {str(token_id): 100 for token_id in marks}}
        for form, expected in FORMS:
            body = body_of(path) | form
            if "structural_tag" in str(form):
                body |= likely
            whole = await post(client, path, body)
            events = await post(client, path, body | {"stream": True})
            choice = whole["choices"][0]
            if path == CHAT:
                text, joined = choice["message"]["content"], chat_joined(events)[0]["content"]
            else:
                text, joined = choice["text"], completions_joined(events)[0]["text"]
            assert joined == text, form
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(expected, text, re.DOTALL), (form, text)
            else:
                assert "structural_tag" in str(form), (form, text)
                assert "<f=" not in text or re.search("<f=n>[12]</f>", text), (form, text)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "regex"),
    ({"ebnf": "root ::= other"}, "ebnf"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex"),
    ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    (
        {"response_format": {"type": "structural_tag", "structures": [STRUCTURE]}},
        "response_format.triggers",
    ),
    ({"response_format": {"type": "structural_tag", **TAG, "triggers": ["?"]}}, "response_format"),
    ({"response_format": {"type": "json_object", **TAG}}, "response_format.structures"),
    ({"response_format": {"type": "text", "triggers": ["a"]}}, "response_format.triggers"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_wrong_is_named_by_its_field(path: str) -> None:
    async with served(num_pages=64) as (_, client):
        for form, param in WRONG:
            answer = await client.post(path, json=body_of(path) | form)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert param.split(".")[0] in error["message"], error


async def test_white_space_may_be_said_beside_any_form_of_json() -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}
    forms = ({"guided_json": schema}, {"response_format": {"type": "structural_tag"} | TAG})
    async with served(num_pages=256) as (_, client):
        for form in forms:
            body = body_of(COMPLETIONS) | form | {"structured_outputs": {"max_whitespace": 0}}
            (choice,) = (await post(client, COMPLETIONS, body))["choices"]
            if "guided_json" in form:
                assert choice["text"] == "[1,1]"
        wrong = {"regex": "a", "structured_outputs": {"max_whitespace": 0}}
        answer = await client.post(COMPLETIONS, json=body_of(COMPLETIONS) | wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "regex")


async def test_schemas_in_all_fields_are_limited() -> None:
    large = {"type": "string", "title": "x" * 200}
    tag = TAG | {"structures": [STRUCTURE | {"schema": large}]}
    async with served(ServerSettings(max_schema_bytes=200), num_pages=64) as (_, client):
        for form in (
            {"guided_json": large},
            {"structured_outputs": {"structural_tag": tag}},
            {"response_format": {"type": "structural_tag"} | tag},
        ):
            answer = await client.post(COMPLETIONS, json=body_of(COMPLETIONS) | form)
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (next(iter(form)), "limit_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_form_of_nothing_is_none(path: str) -> None:
    async with served(num_pages=256) as (_, client):

        async def text(**form: Any) -> str:
            choice = (await post(client, path, body_of(path) | form))["choices"][0]
            return choice["message"]["content"] if path == CHAT else choice["text"]

        free, an_object = await text(), await text(response_format={"type": "json_object"})
        assert await text(grammar="") == free
        assert await text(grammar="", regex="[ab]{3}") != free
        assert await text(response_format={"type": "json_object", "schema": {}}) == an_object
        assert an_object.startswith("{")
