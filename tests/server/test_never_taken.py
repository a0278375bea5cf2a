"""Parts that no request may have: templates, URLs to fetch, tensors and weights."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve.server.app import ENDPOINTS
from tests.server.serving import served

TAKES_BODIES = [one.path for one in ENDPOINTS if one.reads_body]
FIELDS = ("chat_template", "prompt_embeds", "image_url", "lora_path", "multi_modal_data")
SOURCE = {"type": "url", "url": "http://127.0.0.1/x.png"}
PARTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "image_url": {"image_url": {"url": "http://127.0.0.1/x.png"}},
        "input_audio": {"input_audio": {"data": "", "format": "wav"}},
        "file": {"file": {"file_id": "f"}},
    },
    "/v1/messages": {
        "image": {"source": SOURCE},
        "source.type": {"type": "document", "source": SOURCE},
    },
}
"""Parts of messages, by type, or by the refused field of a known type."""


@pytest.mark.sampled(6)
@pytest.mark.asyncio
@pytest.mark.parametrize("path", TAKES_BODIES)
async def test_templates_tensors_and_weights_are_refused_by_name(path: str) -> None:
    async with served(num_pages=64) as (_, client):
        for field in FIELDS:
            answer = await client.post(path, json={field: "{{ 1 }}"})
            assert answer.status_code == 400
            assert field in answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PARTS)
async def test_parts_that_are_no_text_are_refused_by_name(path: str) -> None:
    async with served(num_pages=64) as (_, client):
        for name, fields in PARTS[path].items():
            parts = [{"type": "text", "text": "a"}, {"type": name, **fields}]
            messages = [{"role": "user", "content": parts}]
            body = {"model": "pyhelp", "messages": messages, "max_tokens": 1}
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert name in answer.text


@pytest.mark.asyncio
async def test_a_prompt_is_text_or_token_ids() -> None:
    async with served(num_pages=64) as (_, client):
        for prompt in ({"url": "http://127.0.0.1/"}, [[0.1, 0.2]], [0.5]):
            body = {"model": "pyhelp", "prompt": prompt}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert "prompt" in answer.text
