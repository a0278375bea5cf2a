"""Prompts with a gap: `suffix` of completions, and of Ollama's generate."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve.text import fill_in
from tests.server.serving import served
from tests.server.talking import post

pytestmark = pytest.mark.asyncio

FORM = "<|im_start|>{prefix}<|im_end|>{suffix}"
"""Form of marks that the embedded model's tokenizer has."""
BODY: dict[str, Any] = {"model": "pyhelp", "prompt": "def {suffix}(", "suffix": "{prefix}):"}
FILLED = "<|im_start|>def {suffix}(<|im_end|>{prefix}):"


async def test_an_answer_fills_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"temperature": 0, "max_tokens": 4}
    async with served(num_pages=256) as (_, client):
        whole = await post(client, "/v1/completions", {"prompt": FILLED} | drawn)
        monkeypatch.setattr(fill_in, "FORMS", ("<none>{prefix}{suffix}", FORM))
        body = BODY | drawn | {"logprobs": 0, "return_token_ids": True}
        answer = await post(client, "/v1/completions", body)
        options = {"temperature": 0, "num_predict": 4}
        lines = BODY | {"options": options, "stream": False}
        told = await post(client, "/api/generate", lines)
        wrong = [
            await client.post("/v1/completions", json=BODY | {"echo": True}),
            await client.post("/v1/completions", json=BODY | {"prompt": [[5]]}),
            await client.post("/v1/completions", json=BODY | {"truncate_prompt_tokens": 4}),
            await client.post("/api/generate", json=lines | {"system": "x"}),
        ]
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"] == told["response"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert [one.status_code for one in wrong] == [400] * 4
    assert all("suffix" in one.text for one in wrong)


async def test_a_model_without_marks_refuses_it_by_name() -> None:
    async with served(num_pages=256) as (_, client):
        refused = await client.post("/v1/completions", json=BODY)
        empty = await client.post("/v1/completions", json=BODY | {"suffix": ""})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert "no marks of a gap" in refused.json()["error"]["message"]
    assert empty.status_code == 200
