"""Hostile bodies of `/rerank`, `/score`, `/v1/embeddings` and `/pooling`, and hostile files that
say how texts are embedded. All are served, or refused by name in few words."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from aioserve import Engine
from aioserve.errors import InvalidRequestError, ModelError, QueueFullError
from aioserve.models import reranking
from aioserve.models.fields import Fields
from aioserve.models.retrieval import read_retrieval
from aioserve.server import ServerSettings, create_app
from aioserve.testing import check_invariants
from tests.parity.test_requests import ROOMY
from tests.parity.test_reranking import CLASSIFIER, LONG
from tests.parity.test_retrieval import write_model, write_modules
from tests.server.serving import client_of

MAX_MESSAGE_CHARS = 700
TEXTS: list[Any] = ["", "\0", "a\0b", "x" * 100_000, "\u202e\u0000", "\u2028"]
VALUES: list[Any] = [
    *TEXTS,
    *(None, True, 0, -1, 1e9, 2**63, 10**30, 0.5, [], [""], ["a", ""], ["a"] * 5000),
    *([[]], [["a"]], [None], [1, "a"], {}, {"text": ""}, {"text": 1}, [{"text": "a", "x": 1}]),
    *([{"text": "a" * 99_999}], [1.5], [[1, 2], [3]], [[10**12]], [[-1]], {"a": {"b": []}}),
]
RERANK = {"query": "a", "documents": ["b", "c"]}
BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/rerank": (RERANK, ["top_n", "return_documents", "pooling", "instruction", "user", "model"]),
    "/v2/rerank": (RERANK, ["query", "documents", "truncate_prompt_tokens", "truncation_side"]),
    "/score": ({"text_1": "a", "text_2": "b"}, ["text_1", "text_2", "pooling", "instruction"]),
    "/v1/embeddings": (
        {"input": "a"},
        ["input", "messages", "encoding_format", "dimensions", "pooling", "prompt_name"],
    ),
    "/pooling": ({"input": "a"}, ["input", "dimensions", "task", "normalize"]),
}
DEEP = "[" * 60_000 + "]" * 60_000
RAW = [
    f'"documents": {DEEP}, "input": {DEEP}, "text_1": {DEEP}',
    *(f'"query": {one}, "input": {one}, "text_1": {one}' for one in ("NaN", '"\\ud800"', "1e400")),
    f'"top_n": {"9" * 5000}, "dimensions": {"9" * 5000}',
]


@asynccontextmanager
async def serving(
    directory: Path, *, reranks: bool, **settings: Any
) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    if reranks:
        write_model(directory, CLASSIFIER, num_labels=1, **LONG)
    else:
        write_model(directory, "Qwen3ForCausalLM")
        write_modules(directory, "lasttoken", normalize=True, default="query")
    async with Engine(str(directory), **ROOMY) as engine:
        app = create_app(engine, ServerSettings(**settings))
        async with client_of(app) as client:
            yield engine, client
        check_invariants(engine)


async def checked(client: httpx.AsyncClient, path: str, body: str) -> httpx.Response:
    """The answer, which is one, or an error in few words."""
    headers = {"content-type": "application/json"}
    answer = await client.post(path, content=body.encode(), headers=headers)
    assert answer.status_code < 500, (path, body[:200], answer.text[:400])
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert len(error["message"]) <= MAX_MESSAGE_CHARS, (path, body[:200])
        assert error["param"] or error["code"] == "invalid_json", (path, body[:200])
    else:
        json.loads(answer.text, parse_constant=pytest.fail)
    return answer


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize("reranks", [False, True])
async def test_hostile_bodies_are_refused_by_name_or_served(reranks: bool, tmp_path: Path) -> None:
    async with serving(tmp_path, reranks=reranks) as (_, client):
        for path, (base, fields) in BODIES.items():
            bare = {"model": tmp_path.name, **base}
            for field in fields:
                for value in VALUES:
                    await checked(client, path, json.dumps(bare | {field: value}))
            for raw in RAW:
                answer = await checked(client, path, f'{{"model": "{tmp_path.name}", {raw}}}')
                assert answer.status_code == 400


@pytest.mark.asyncio
async def test_a_choice_that_is_none_is_told_with_the_choices(tmp_path: Path) -> None:
    async with serving(tmp_path, reranks=False) as (_, client):
        body = json.dumps({"model": tmp_path.name, "input": "a", "pooling": "x" * 10_000})
        error = (await checked(client, "/v1/embeddings", body)).json()["error"]
        tool = {"type": "x" * 10_000, "function": {"name": "a"}}
        chat = {"model": tmp_path.name, "messages": [], "tools": [tool]}
        nested = (await checked(client, "/v1/chat/completions", json.dumps(chat))).json()["error"]
    assert nested["param"] == "tools[0].type"
    assert error["param"] == "pooling"
    assert error["message"].startswith("pooling: must be one of last, mean, cls, got 'xxx")
    assert len(error["message"]) < 300


@pytest.mark.more
@pytest.mark.asyncio
async def test_thousands_of_documents_are_served(tmp_path: Path) -> None:
    settings = {"max_inputs": 4096, "max_body_bytes": 2**25}
    async with serving(tmp_path, reranks=False, **settings) as (_, client):
        body = {"model": tmp_path.name, "query": "a", "documents": [f"{i}" for i in range(3000)]}
        told = (await checked(client, "/rerank", json.dumps(body | {"top_n": 10**9}))).json()
        assert len(told["results"]) == 3000
        body = body | {"query": "q" * 10_000_000}
        assert (await checked(client, "/rerank", json.dumps(body))).status_code == 400


# -- relevance


@pytest.mark.asyncio
async def test_one_pair_that_fails_ends_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path, reranks=True) as (engine, _):
        long, before = "x" * 60_000, asyncio.all_tasks()
        encoder = engine._lifecycle.usable().intake.encoder
        for wrong in (("a", ""), ("a", "\ud800"), ("a", long), 5):
            pairs: list[Any] = [*[("a", "b")] * 40, wrong, *[("a", long)] * 40]
            with pytest.raises(InvalidRequestError) as told:
                await engine.relevance(pairs)
            assert len(str(told.value)) < MAX_MESSAGE_CHARS
            assert engine.stats().num_waiting == engine.stats().num_running == 0
            assert asyncio.all_tasks() == before
            assert not encoder._wanted
        with pytest.raises((InvalidRequestError, QueueFullError)):
            await engine.relevance([("a", "y" * 10_000_000)] * 200)
        task = asyncio.ensure_future(engine.relevance([("a", "b" * 400)] * 200))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not encoder._wanted
        found, _ = await engine.relevance([("a", "b")])  # all threads and places are free again
        assert np.isfinite(found).all()


@pytest.mark.asyncio
async def test_large_scores_give_the_loop_its_turns_and_do_not_depend_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = reranking.Reranker.scores

    def scores(self: reranking.Reranker, states: Any) -> Any:
        sizes.append(len(states))
        return plain(self, states)

    async with serving(tmp_path, reranks=True) as (engine, _):
        monkeypatch.setattr(reranking.Reranker, "scores", scores)
        pairs = [("a", f"{index % 90}") for index in range(150)]
        found, _ = await engine.relevance(pairs)
    assert sum(sizes) == len(pairs) == len(found)
    assert max(sizes) <= 32
    np.testing.assert_array_equal(found[:60], found[90:])


def test_a_score_is_the_same_beside_any_others() -> None:
    """The large numbers cancel out, so that what is left tells the order of the sums."""
    rng = np.random.default_rng(0)
    order = rng.permutation(4096)
    weight = np.tile(rng.standard_normal(2048, np.float32), 2)[order]
    half = rng.standard_normal((33, 2048), np.float32) * np.float32(1e12)
    states = np.ascontiguousarray(np.concatenate([half, -half], axis=1)[:, order])
    template: Any = None
    reranker = reranking.Reranker(weight, template, None)
    alone = [reranker.scores(states[i : i + 1])[0] for i in range(len(states))]
    np.testing.assert_array_equal(reranker.scores(states), alone)
    assert len({*alone}) > 1


# -- files

POOLING: dict[str, Any] = {"pooling_mode_lasttoken": True, "include_prompt": True}
SAID: dict[str, Any] = {"prompts": {"query": "q: "}, "default_prompt_name": None}
MODULES: list[dict[str, Any]] = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
ODD: list[Any] = [
    *TEXTS,
    *(None, True, -1, math.nan, 10**900, "..", "/etc/passwd", [], [None], [[]], {}, {"a": 1}),
    *(["x"] * 1000, {"x" * 100_000: True}, {"": "x"}, {f"k{i}": "v" for i in range(300)}, "cls"),
]
BYTES = (b"", b"null", b"[", b"\xff", b"[" * 100_000, b'"\\ud800"', b'{"prompts":{"a":"\\ud800"}}')


def written(directory: Path, modules: Any, pooling: Any, said: Any) -> None:
    (directory / "1_Pooling").mkdir(exist_ok=True)
    names = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
    for name, value in zip(names, (modules, pooling, said), strict=True):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        (directory / name).write_bytes(content)


def read(directory: Path, *files: Any) -> None:
    """Assert that `read_retrieval` understands the files, or tells the problem in few words of
    plain text."""
    written(directory, *files)
    try:
        told = read_retrieval(directory).problem or ""
    except ModelError as error:
        told = str(error)
    assert len(told) <= MAX_MESSAGE_CHARS + len(str(directory)), told[:300]
    assert told.isprintable(), told


def test_hostile_files_are_refused_in_few_words_or_read(tmp_path: Path) -> None:
    for odd in [*ODD, *BYTES]:
        read(tmp_path, odd, POOLING, SAID)
        read(tmp_path, MODULES, odd, SAID)
        read(tmp_path, MODULES, POOLING, odd)
    for odd in ODD:
        for place in range(2):
            for field in ("type", "path"):
                modules = [{**module} for module in MODULES]
                modules[place][field] = odd
                read(tmp_path, modules, POOLING, SAID)
        modes = (
            "pooling_mode",
            "include_prompt",
            "pooling_mode_" + "y" * 90_000,
            "pooling_mode_\0",
        )
        for field in modes:
            read(tmp_path, MODULES, POOLING | {field: odd}, SAID)
            read(tmp_path, MODULES, {field: odd}, SAID)
        for field in SAID:
            read(tmp_path, MODULES, POOLING, SAID | {field: odd})
        read(tmp_path, MODULES, POOLING, {"prompts": {"a": odd}})
    many = {f"pooling_mode_{'z' * 50}{index}": True for index in range(5000)}
    read(tmp_path, MODULES, many, SAID)
    read(tmp_path, MODULES * 100, POOLING, SAID)


def test_a_message_about_a_field_is_short_whatever_the_file_calls_it() -> None:
    name = "pooling_mode_" + "\n" * 50_000
    with pytest.raises(ModelError) as told:
        Fields({name: "x" * 50_000}, "config.json").flag(name, default=False)
    assert len(str(told.value)) < 400
    assert str(told.value).isprintable()


@pytest.mark.asyncio
async def test_a_model_with_many_prompts_names_some(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3ForCausalLM")
    write_modules(tmp_path, "lasttoken", normalize=True)
    prompts = {f"{'p' * 3000}{index}": "a" for index in range(250)}
    said = json.dumps({"prompts": prompts})
    (tmp_path / "config_sentence_transformers.json").write_text(said)
    async with Engine(str(tmp_path), **ROOMY) as engine:
        with pytest.raises(InvalidRequestError, match="prompt_name must be") as told:
            await engine.embed("a", prompt_name="\n" * 250)
        assert len(str(told.value)) < MAX_MESSAGE_CHARS
        assert str(told.value).isprintable()
