"""Models whose files lack a chat template, or sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from aioserve import Engine, SamplingParams
from aioserve.config import EngineConfig
from aioserve.engine.params_intake import ParamsIntake
from aioserve.execution.runner import LoadedModel
from aioserve.models.config import UNSAID_OF_GGUF
from aioserve.server import create_app
from aioserve.testing import FakeModel
from tests.engine.scripted import ScriptedModel
from tests.server.scripts import TEMPLATE
from tests.server.serving import client_of, served

pytestmark = pytest.mark.asyncio

SAID = {"model": "fake", "stream": False, "options": {"num_predict": 5, "seed": 7}}
MESSAGES = [{"role": "user", "content": "ab"}]


async def test_generate_completes_where_there_is_no_template() -> None:
    async with served(model=FakeModel()) as (engine, client):
        assert not engine.has_chat_template
        expected = await engine.generate(
            "ab", SamplingParams(temperature=0.0, max_tokens=5, seed=7)
        )
        for more in ({}, {"raw": True}, {"think": False}, {"system": ""}):
            answer = await client.post("/api/generate", json=SAID | {"prompt": "ab"} | more)
            assert answer.status_code == 200, answer.text
            assert answer.json()["response"] == expected.text
            assert answer.json()["prompt_eval_count"] == 2
        loaded = await client.post("/api/generate", json=SAID)
        assert loaded.json()["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/generate", {"prompt": "ab", "system": "be brief"}, "needs a model with a chat temp"),
        ("/api/chat", {"messages": MESSAGES}, "option chat_template gives one"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "option chat_template gives one"),
    ],
)
async def test_what_needs_a_template_says_so(path: str, body: dict[str, Any], says: str) -> None:
    async with served(model=FakeModel()) as (_, client):
        answer = await client.post(path, json={"model": "fake"} | body)
        assert answer.status_code == 400
        assert says in answer.text


class Unsaid(ScriptedModel):
    """Model whose files don't say how it is sampled."""

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await super().load(config, num_slots=num_slots)
        params = UNSAID_OF_GGUF.sampling_params()
        return msgspec.structs.replace(loaded, defaults=params, says_sampling=False)


class Greedy(ScriptedModel):
    """Model whose makers say that it is greedy."""


CHAT = {"messages": MESSAGES, "max_tokens": 3}
CALLS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3}, True),
    ("/v1/chat/completions", CHAT, True),
    ("/v1/responses", {"input": "ab", "max_output_tokens": 16}, True),
    ("/v1/messages", CHAT, True),
    ("/api/chat", {"messages": MESSAGES, "stream": False}, False),
    ("/api/generate", {"prompt": "ab", "stream": False}, False),
]
"""Path, body, and true if its API documents a temperature of 1."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Parameters of all requests so far."""
    seen: list[SamplingParams] = []
    checked: Callable[..., SamplingParams] = ParamsIntake.checked

    def kept(self: ParamsIntake, params: SamplingParams | None) -> SamplingParams:
        seen.append(checked(self, params))
        return seen[-1]

    monkeypatch.setattr(ParamsIntake, "checked", kept)
    return seen


@pytest.mark.parametrize(("path", "body", "is_documented"), CALLS)
@pytest.mark.parametrize("kind", [Unsaid, Greedy])
async def test_each_api_samples_as_it_documents_where_files_say_nothing(
    drawn: list[SamplingParams],
    kind: type[ScriptedModel],
    path: str,
    body: dict[str, Any],
    is_documented: bool,
) -> None:
    model = kind(TEMPLATE, "ok")
    # The script goes by a seed, for which bodies of Messages have no place.
    async with Engine(model, jump_forward=False) as engine, client_of(create_app(engine)) as client:
        drawn.clear()
        await client.post(path, json={"model": engine.model_name} | body)
        own = engine.default_params
    (params,) = drawn
    found = (params.temperature, params.top_k, params.top_p, params.min_p)
    if kind is Greedy:
        assert found == (own.temperature, own.top_k, own.top_p, own.min_p)
    else:
        assert found == ((1.0, 0, 1.0, 0.0) if is_documented else (0.8, 40, 0.95, 0.05))
