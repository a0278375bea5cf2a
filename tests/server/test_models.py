"""`/v1/models`, and the names under which models are served."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.server.app_state import name_of
from aioserve.testing import FakeModel
from tests.doubles.fake_engine import FakeEngine
from tests.server.serving import client_of, served

ENGINES = pytest.mark.parametrize(
    "made", [lambda: Engine(FakeModel()), FakeEngine], ids=["engine", "fake engine"]
)
NAMES = ("org/name", "plain", "a/b/c d", "\u00e4\u2028?#%2F")


@pytest.mark.asyncio
@ENGINES
async def test_each_name_of_the_list_is_found_by_itself(made: Any) -> None:
    settings = ServerSettings(served_model_names=NAMES)
    async with made() as engine, client_of(create_app(engine, settings)) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == list(NAMES)
        for model in listed:
            # Clients may encode a slash, or not.
            for safe in ("/", ""):
                answer = await client.get(f"/v1/models/{quote(model['id'], safe=safe)}")
                assert answer.status_code == 200, answer.text
                assert answer.json() == model
        metrics = (await client.get("/metrics")).text
    assert 'route="/v1/models/{model}"' in metrics
    assert "org" not in metrics


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "name", ["name", "org", "org/", "org/name/", "Plain", "x" * 9000, "..%2Fx"]
)
@ENGINES
async def test_another_is_not_found_as_the_api_says_it(made: Any, name: str) -> None:
    settings = ServerSettings(served_model_names=NAMES)
    async with made() as engine, client_of(create_app(engine, settings)) as client:
        answer = await client.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(answer.content) < 1000
        for method in ("POST", "DELETE"):
            answer = await client.request(method, f"/v1/models/{name}")
            assert answer.status_code == 405


@pytest.mark.asyncio
@ENGINES
async def test_it_needs_a_key_where_there_are_keys(made: Any) -> None:
    settings = ServerSettings(api_keys=["some-very-secret-key"], served_model_names=["a"])
    async with made() as engine, client_of(create_app(engine, settings)) as client:
        assert (await client.get("/v1/models/a")).status_code == 401
        headers = {"authorization": "Bearer some-very-secret-key"}
        assert (await client.get("/v1/models/a", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("./llama", "llama"),
        ("./llama/", "llama"),
        ("llama/", "llama"),
        ("llama", "llama"),
        ("models/qwen", "qwen"),
        ("./models/../models/qwen/.", "qwen"),
        ("latest", "latest"),
        ("~/llama", "llama"),
        (".", "here"),
        ("./", "here"),
        ("models/..", "here"),
        ("..", "home"),
        ("/srv/models/llama", "llama"),
        ("/srv/models/llama/", "llama"),
        ("/srv/models/v1.5", "v1.5"),
        ("org/llama", "org/llama"),
        ("pyhelp", "pyhelp"),
        ("/", "/"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_path(
    given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "home" / "here"
    for model in ("llama", "models/qwen", "models", "."):
        (here / model).mkdir(parents=True, exist_ok=True)
        (here / model / "config.json").write_text("{}")
    (here / "latest").symlink_to("llama")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    assert name_of(given) == name


@pytest.mark.asyncio
async def test_a_relative_path_is_served_by_its_name_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with resources.as_file(resources.files("aioserve.assets").joinpath("pyhelp")) as source:
        shutil.copytree(source, tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    engine = Engine("models/llama/", num_pages=64)
    async with engine, client_of(create_app(engine)) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "llama"
        monkeypatch.chdir("/")
        body = {"model": "llama", "prompt": "hi", "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert 'model="llama"' in (await client.get("/metrics")).text


ASKED = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
    ("/pooling", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
]


@pytest.mark.asyncio
async def test_a_request_without_a_model_asks_for_the_one_that_is_served() -> None:
    async with served(ServerSettings(served_model_names=["first", "b"]), num_pages=256) as both:
        for path, body in ASKED:
            answer = await both[1].post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert '"model":"first"' in answer.text or path == "/score"
            empty = await both[1].post(path, json=body | {"model": ""})
            assert empty.status_code == 404
