"""`use_beam_search`: the beams of the engine, and a refusal of what they can't do."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import Engine, SamplingParams
from aioserve.server import ServerSettings
from tests.engine.idle import all_given_back
from tests.server.serving import served
from tests.server.talking import ASK, TOOLS, post

pytestmark = pytest.mark.asyncio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "import json"}}
BEAMS: dict[str, Any] = {"model": "pyhelp", "use_beam_search": True, "n": 3, "max_tokens": 6}
OF_THE_ENGINE = (
    "length_penalty",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)
PLAIN: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "seed": 5,
    "stop": [],
    "stream": False,
    "response_format": {"type": "text"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"length_penalty": 0.2, "ignore_eos": True},
        {"stop": ["o", "\n"], "deadline_seconds": 3600},
        {"stop": "e", "include_stop_str_in_output": True},
        {"stop_token_ids": [*range(40)], "include_stop_str_in_output": False},
        PLAIN,
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"allowed_token_ids": [*range(97, 123)], "frequency_penalty": 2},
        {"bad_words": ["e", " "], "min_tokens": 6, "stop": "o"},
        {"logit_bias": {"101": -5, "115": 4}},
    ],
)
async def test_choices_are_the_beams_of_the_engine(path: str, more: dict[str, Any]) -> None:
    async with served(num_pages=256) as (engine, client):
        body = BEAMS | ASKED[path] | {"return_token_ids": True, "cache_salt": "a"} | more
        answer = await post(client, path, body)
        prompt: Any = ASK if path == CHAT else "import json"
        options = {name: more[name] for name in OF_THE_ENGINE if name in more}
        if bias := more.get("logit_bias"):
            options["logit_bias"] = {int(id): value for id, value in bias.items()}
        expected = await engine.beam_search(prompt, beam_width=3, max_tokens=6, **options)
        ids = await engine.encode(prompt)
        assert not engine.stats().pages_held_by_requests
    choices = answer["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert [tuple(one["token_ids"]) for one in choices] == [beam.token_ids for beam in expected]
    texts = [one["message"]["content"] if path == CHAT else one["text"] for one in choices]
    assert texts == [beam.text for beam in expected]
    assert [one["finish_reason"] for one in choices] == [str(one.finish_reason) for one in expected]
    assert [one["stop_reason"] for one in choices] == [one.stop_reason for one in expected]
    holder = answer if path == CHAT else choices[2]
    assert holder["prompt_token_ids"] == ids
    count = sum([len(beam.token_ids) for beam in expected])
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == count


async def test_each_prompt_has_its_beams_and_is_cut_as_others_are() -> None:
    async with served(num_pages=256) as (engine, client):
        long = "import json, os " * 20
        body = BEAMS | {"prompt": ["re", long], "n": 2, "truncate_prompt_tokens": 4}
        answer = await post(client, COMPLETIONS, body)
        ids = await engine.encode(long, truncate_prompt_tokens=4)
        expected = [
            await engine.beam_search(one, beam_width=2, max_tokens=6) for one in ("re", ids)
        ]
        texts = [beam.text for beams in expected for beam in beams]
        room = engine.limits.max_model_len - 7
        most = {"prompt": long * 60, "n": 1, "max_tokens": 7, "truncate_prompt_tokens": -1}
        assert (await post(client, COMPLETIONS, BEAMS | most))["usage"]["prompt_tokens"] == room
    assert [one["text"] for one in answer["choices"]] == texts
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]


async def test_an_echoed_message_goes_before_each_beam() -> None:
    last = {"role": "assistant", "content": "Once"}
    go_on: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    async with served(num_pages=256) as (engine, client):
        body = BEAMS | go_on | {"messages": [*ASK, last], "echo": True}
        answer = await post(client, CHAT, body)
        ids = await engine.encode([*ASK, last], **go_on)
        expected = await engine.beam_search(ids, beam_width=3, max_tokens=6)
    texts = [one["message"]["content"] for one in answer["choices"]]
    assert texts == ["Once" + beam.text for beam in expected]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_deadline_ends_a_search_as_any_answer(path: str) -> None:
    async with served(num_pages=256) as (engine, client):
        body = BEAMS | ASKED[path] | {"max_tokens": 400, "ignore_eos": True}
        late = await client.post(path, json=body | {"deadline_seconds": 1e-6})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert await all_given_back(engine)
        wrong = await client.post(path, json=body | {"deadline_seconds": 0})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "deadline_seconds")


REFUSED: list[dict[str, Any]] = [
    {"stream": True},
    {"temperature": 0.5},
    {"top_p": 0.5},
    {"thinking_token_budget": 3},
    {"prompt_logprobs": 1},
    {"regex": "a"},
    {"structured_outputs": {"regex": "a"}},
    {"response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_a_search_cannot_do_is_refused_by_name(path: str) -> None:
    own: dict[str, list[dict[str, Any]]] = {
        CHAT: [{"tools": TOOLS}, {"logprobs": True}],
        COMPLETIONS: [{"logprobs": 0}, {"echo": True}, {"best_of": 4}],
    }
    async with served(ServerSettings(max_n=16), num_pages=64) as (_, client):
        for wrong in [*REFUSED, *own[path]]:
            answer = await client.post(path, json=BEAMS | ASKED[path] | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unsupported_parameter"), error
            assert error["param"] == next(iter(wrong))
            assert "use_beam_search" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_wrong_is_named_as_the_api_names_it(path: str) -> None:
    async with served(ServerSettings(max_n=64), num_pages=64, max_num_seqs=64) as (engine, client):
        letter = await engine.encode("e", add_special_tokens=False)
        for wrong, param in (
            ({"n": 33}, "n"),
            ({"n": 0}, "n"),
            ({"length_penalty": 11}, "length_penalty"),
            ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"min_tokens": 7}, "min_tokens"),
            ({"presence_penalty": 2.5}, "presence_penalty"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": letter, "bad_words": ["e"]}, "allowed_token_ids"),
            ({"use_beam_search": 1}, "use_beam_search"),
            ({"truncate_prompt_tokens": -1, "max_tokens": 10**6}, "max_tokens"),
        ):
            answer = await client.post(path, json=BEAMS | ASKED[path] | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error


async def test_what_is_not_asked_is_as_the_makers_of_the_model_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: dict[str, Any] = {"repetition_penalty": 2.5, "presence_penalty": 1.0, "min_tokens": 5}
    monkeypatch.setattr(Engine, "default_params", SamplingParams(max_tokens=5, **own))
    async with served(num_pages=256) as (engine, client):
        body: dict[str, Any] = {**BEAMS, "prompt": "import json", "max_tokens": None}
        answer = await post(client, COMPLETIONS, body)
        own |= {"beam_width": 3, "max_tokens": 5}
        expected = await engine.beam_search("import json", **own)
        assert [one["text"] for one in answer["choices"]] == [beam.text for beam in expected]
        answer = await post(client, COMPLETIONS, body | {"repetition_penalty": 1})
        own["repetition_penalty"] = 1.0
        expected = await engine.beam_search("import json", **own)
        assert [one["text"] for one in answer["choices"]] == [beam.text for beam in expected]
