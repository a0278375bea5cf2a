"""Choices of `/v1/completions`: several prompts and samples, echoes and log-probabilities."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from aioserve import SamplingParams
from aioserve.assets import model_path
from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import completions_joined, post

pytestmark = pytest.mark.asyncio
PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "pyhelp", "temperature": 0, "max_tokens": 4}
PROMPTS = ["json.dumps", "re.compile(é", "The list"]


async def test_choices_run_over_prompts_and_samples() -> None:
    async with served(num_pages=256) as (engine, client):
        ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        alone = [
            (await post(client, PATH, BODY | {"prompt": prompt}))["choices"][0]["text"]
            for prompt in PROMPTS
        ]
        for prompt in (PROMPTS, ids):
            body = BODY | {"prompt": prompt, "n": 2}
            answer = await post(client, PATH, body)
            texts = [choice["text"] for choice in answer["choices"]]
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            assert texts == [text for text in alone for _ in range(2)]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
            assert answer["usage"]["completion_tokens"] == 24
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            events = await post(client, PATH, body)
            assert events[-1]["usage"]["completion_tokens"] == 24
            joined = completions_joined(events[:-1])
            assert [joined[index]["text"] for index in range(6)] == texts


async def test_one_prompt_of_ids_is_one_prompt() -> None:
    async with served(num_pages=256) as (engine, client):
        ids = engine.tokenizer.encode(PROMPTS[0])
        one = await post(client, PATH, BODY | {"prompt": ids})
        same = await post(client, PATH, BODY | {"prompt": PROMPTS[0]})
    assert one["choices"] == same["choices"]


async def test_sixteen_tokens_come_unless_it_is_said() -> None:
    async with served(num_pages=256) as (_, client):
        body = {"model": "pyhelp", "prompt": "a", "ignore_eos": True}
        some = await post(client, PATH, body)
        more = await post(client, PATH, body | {"max_tokens": None})
    assert some["usage"]["completion_tokens"] == 16
    assert more["usage"]["total_tokens"] > 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echo_has_the_prompts_logprobs_as_harnesses_want_them(
    stream: bool, max_tokens: int
) -> None:
    prompt = PROMPTS[1]
    async with served(num_pages=256) as (engine, client):
        ids = engine.tokenizer.encode(prompt)
        body = BODY | {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        answer = await post(client, PATH, body | {"stream": stream})
        choices = completions_joined(answer)[0] if stream else answer["choices"][0]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
        whole = await engine.generate(prompt, params)
        text = whole.text if max_tokens else ""
        if not stream:
            assert answer["usage"]["completion_tokens"] == max_tokens
    assert choices["text"] == prompt + text
    assert choices["finish_reason"] == "length"
    logprobs = choices["logprobs"]
    assert whole.prompt_logprobs is not None
    assert whole.logprobs is not None
    expected = [*whole.prompt_logprobs, *whole.logprobs[:max_tokens]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for found, top, wanted in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], expected[1:], strict=True
    ):
        assert wanted is not None
        assert found == pytest.approx(wanted.logprob, abs=1e-4)
        assert max(top.values()) == pytest.approx(wanted.top[0].logprob, abs=1e-4)
        assert 1 <= len(top) <= 2
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith("bytes:"):
            assert choices["text"][at : at + len(token)] == token


MARKED = "<|im_start|>user\nHi<|im_end|>"


@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echo_has_the_special_tokens_of_a_prompt_and_counts_them(as_ids: bool) -> None:
    async with served(num_pages=256) as (engine, client):
        ids = engine.tokenizer.encode(MARKED)
        prompt = [ids] if as_ids else MARKED
        body = BODY | {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2}
        choice = (await post(client, PATH, body))["choices"][0]
    assert choice["text"].startswith(MARKED)
    logprobs = choice["logprobs"]
    written = [
        choice["text"][at : at + len(token)]
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ]
    assert written[: len(ids)] == logprobs["tokens"][: len(ids)]
    assert "".join(written[: len(ids)]) == MARKED


async def test_the_best_of_several_are_the_likeliest() -> None:
    async with served(num_pages=256) as (_, client):
        body = {"model": "pyhelp", "prompt": "a", "seed": 3, "max_tokens": 5, "logprobs": 0}
        every = (await post(client, PATH, body | {"n": 4}))["choices"]
        best = await post(client, PATH, body | {"n": 2, "best_of": 4})
        body |= {"n": 1, "best_of": 2, "stream": True}
        refused = await client.post(PATH, json=body)
        served_too = await post(client, PATH, body | {"n": 2})
    every.sort(key=lambda one: -math.fsum(one["logprobs"]["token_logprobs"]))
    mean = {one["text"]: one for one in every}
    assert {one["text"] for one in best["choices"]} <= set(mean)
    assert len(best["choices"]) == 2
    assert best["usage"]["completion_tokens"] >= 10
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    assert served_too


async def test_what_ended_an_answer_is_told() -> None:
    async with served(num_pages=256) as (_, client):
        body = BODY | {"prompt": PROMPTS[0], "max_tokens": 40}
        text = (await post(client, PATH, body))["choices"][0]["text"]
        stop = text[5:7]
        for stream in (False, True):
            answer = await post(client, PATH, body | {"stop": [stop, "~~"], "stream": stream})
            choice = completions_joined(answer)[0] if stream else answer["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            assert choice["text"] == text[: text.index(stop)]


async def test_ids_come_where_they_are_asked_for() -> None:
    async with served(num_pages=256) as (engine, client):
        body = BODY | {"prompt": PROMPTS[0], "return_token_ids": True}
        (whole,) = (await post(client, PATH, body))["choices"]
        events = await post(client, PATH, body | {"stream": True})
        assert engine.tokenizer.decode(whole["token_ids"]) == whole["text"]
        assert whole["prompt_token_ids"] == engine.tokenizer.encode(PROMPTS[0])
    assert completions_joined(events)[0] == whole


async def test_a_model_without_a_tokenizer_continues_ids(tmp_path: Path) -> None:
    source = model_path("pyhelp")
    assert source is not None
    shutil.copytree(source, tmp_path / "pyhelp")
    (tmp_path / "pyhelp" / "tokenizer.json").unlink()
    async with served(model=str(tmp_path / "pyhelp"), num_pages=64) as (_, client):
        body = {"model": "pyhelp", "prompt": [1, 2], "max_tokens": 3, "logprobs": 1}
        (choice,) = (await post(client, PATH, body | {"return_token_ids": True}))["choices"]
        refused = [await client.post(PATH, json=body | {"echo": True})]
        refused.append(await client.post(PATH, json=body | {"prompt": "a"}))
        tokens = await client.post("/tokenize", json={"prompt": "a"})
    assert choice["text"] == ""
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert [one.json()["error"]["param"] for one in refused] == ["echo", "prompt"]
    assert tokens.status_code == 400


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[5], [10**6]]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": -1, "echo": True}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "x"}, "suffix"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
]


async def test_what_is_wrong_is_named() -> None:
    async with served(num_pages=256) as (engine, client):
        for change, param in WRONG:
            answer = await client.post(PATH, json=BODY | {"prompt": "a"} | change)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
        assert not engine.stats().num_running
        assert not engine.stats().num_waiting


AT_LIMIT: list[tuple[str, Any, Any]] = [
    ("prompt", ["a", "b"], ["a", "b", "c"]),
    ("n", 2, 3),
    ("best_of", 2, 3),
    ("logprobs", 3, 4),
    ("stop", "x", ["x", "y"]),
]


@pytest.mark.parametrize(("field", "fits", "too_much"), AT_LIMIT)
async def test_limits_are_kept_and_what_is_at_them_is_served(
    field: str, fits: Any, too_much: Any
) -> None:
    settings = ServerSettings(max_prompts=2, max_n=2, max_top_logprobs=3, max_stops=1)
    async with served(settings, num_pages=256) as (_, client):
        await post(client, PATH, BODY | {"prompt": "a"} | {field: fits})
        answer = await client.post(PATH, json=BODY | {"prompt": "a"} | {field: too_much})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["code"] == "limit_exceeded"
