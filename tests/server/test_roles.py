"""Role that no template knows: a 400 in the format of its API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.talking import HERMES, scripted

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "asistant", "content": "Ho"}]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": MESSAGES}),
    ],
)
async def test_a_misspelt_role_is_a_400_of_its_api(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with scripted("Hello", template=HERMES) as (_, client):
        told = await client.post(path, json={"model": "scripted", "stream": stream, **body})
        assert told.status_code == 400
        error = told.json()["error"]
        message = error if path == "/api/chat" else error["message"]
        assert "role" in message
        assert "asistant" in message
