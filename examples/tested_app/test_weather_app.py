import asyncio
import json
from typing import Any

import httpx
import pytest
from weather_app import create_app

from aioserve.errors import RequestFailedError
from aioserve.testing import FakeModel, Fault, Faults, run_simulated

OSLO = {"name": "temperature", "arguments": {"city": "Oslo"}}


def test_an_answer(client_of):
    model = FakeModel(answers=["It rains."])
    answer = client_of(model).post("/ask", json={"text": "How is the weather?"})
    assert answer.text == "It rains."
    (request,) = model.requests
    assert request.messages == [{"role": "user", "content": "How is the weather?"}]
    assert request.params.max_tokens == 500


def test_answers_by_what_is_asked(client_of):
    client = client_of(FakeModel(answers=lambda messages: messages[-1]["content"].upper()))
    for text in ("rain", "snow"):
        assert client.post("/ask", json={"text": text}).text == text.upper()


def test_a_stream(client_of):
    client = client_of(FakeModel(answers=["It rains \N{UMBRELLA}."]))
    with client.stream("POST", "/ask", json={"text": "How is the weather?"}) as answer:
        assert "".join(answer.iter_text()) == "It rains \N{UMBRELLA}."


def test_json_of_a_schema(client_of):
    client = client_of(FakeModel(answers=[json.dumps({"city": "Oslo", "days": 3})]))
    answer = client.post("/place", json={"text": "Three days in Oslo"})
    assert answer.json() == {"city": "Oslo", "days": 3}


def test_json_that_breaks_the_schema_fails_the_test(client_of):
    client = client_of(FakeModel(answers=['{"city": "Oslo", "days": "three"}']))
    with pytest.raises(RequestFailedError, match=r"at character 25, .* comes '\"'"):
        client.post("/place", json={"text": "Three days in Oslo"})


def test_a_tool_call(client_of):
    model = FakeModel(answers=[OSLO, "Four degrees."])
    answer = client_of(model).post("/weather", json={"text": "How warm is it in Oslo?"})
    assert answer.json() == {"text": "Four degrees."}
    first, second = model.requests
    assert [tool["function"]["name"] for tool in first.tools] == ["temperature"]
    assert second.messages is not None
    assert second.messages[-1]["content"] == "4 degrees"


def test_embeddings(client_of):
    client = client_of(FakeModel(answers=[]))
    answer = client.post("/note", json={"text": "How long does a refund take?"})
    assert answer.json() == {"text": "A refund takes five days."}


def test_a_prompt_that_is_too_long(client_of):
    client = client_of(FakeModel(answers=[], max_model_len=100))
    assert "max_model_len is 100" in client.post("/ask", json={"text": "x" * 200}).text


def test_a_model_that_fails_in_the_middle(client_of):
    model = FakeModel(answers=["It rains."], faults=Faults(at={4: Fault.STEP_RAISES}))
    answer = client_of(model, overlap=False).post("/ask", json={"text": "?"})
    assert answer.text.startswith("It r\n(failed: ")


def test_a_full_queue():
    async def main():
        app = create_app(
            FakeModel(answers="It rains.", step_seconds=lambda plan: 60.0),
            max_num_seqs=1,
            max_waiting=1,
        )
        async with app.router.lifespan_context(app):
            running = app.state.engine.stream("one")
            await asyncio.sleep(1)
            waiting = app.state.engine.stream("another")
            transport = httpx.ASGITransport(app)
            async with (
                running,
                waiting,
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            ):
                answer = await client.post("/ask", json={"text": "Me too?"})
                assert answer.status_code == 503

    run_simulated(main)


def test_a_client_that_leaves():
    async def main():
        model = FakeModel(answers="It rains.", step_seconds=lambda plan: 1.0)
        app = create_app(model)
        async with app.router.lifespan_context(app):
            text = await left_after(3, app, "/ask", {"text": "How is the weather?"})
            assert text == "It "
            await asyncio.sleep(2)
            assert app.state.engine.stats().num_running == 0

    run_simulated(main)


async def left_after(num_pieces: int, app: Any, path: str, body: Any) -> str:
    """Return the text that a client has read which disconnects after so many pieces."""
    read: list[bytes] = []
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    leaves = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            read.append(message["body"])
            if len(read) == num_pieces:
                leaves.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return b"".join(read).decode()
