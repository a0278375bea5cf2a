"""App whose tests are in `test_weather_app.py`, for docs/how-to/test-your-app.md."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from aioserve import Engine, SamplingParams, StructuredOutput, TokenStream
from aioserve.errors import AioserveError, InvalidRequestError, QueueFullError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
NOTES = ["A refund takes five days.", "We open at noon.", "Parking is behind the house."]


class Question(BaseModel):
    text: str


class Place(BaseModel):
    city: str
    days: int


def create_app(model: Any = "pyhelp", **options: Any) -> FastAPI:
    """Make the app around an engine with that model, a name or an object, and these options."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Engine(model, **options) as engine:
            app.state.engine = engine
            yield

    app = FastAPI(lifespan=lifespan)

    def engine() -> Engine:
        return app.state.engine

    @app.post("/ask")
    async def ask(body: Question) -> StreamingResponse:
        try:
            stream = engine().stream(messages_of(body), SamplingParams(max_tokens=500))
        except InvalidRequestError as error:
            raise HTTPException(400, str(error)) from error
        except QueueFullError as error:
            raise HTTPException(503, str(error)) from error
        return StreamingResponse(pieces(stream), media_type="text/plain")

    @app.post("/place")
    async def place(body: Question) -> Place:
        form = StructuredOutput(json_schema=Place.model_json_schema())
        params = SamplingParams(structured_output=form)
        completion = await engine().generate(messages_of(body), params)
        return Place.model_validate_json(completion.text)

    @app.post("/weather")
    async def weather(body: Question) -> dict[str, str]:
        messages = messages_of(body)
        answer = await engine().chat(messages, tools=TOOLS).completion()
        while answer.tool_calls:
            messages.append(answer.message)
            for call in answer.tool_calls:
                told = temperature(**json.loads(call.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
            answer = await engine().chat(messages, tools=TOOLS).completion()
        return {"text": answer.content}

    @app.post("/note")
    async def note(body: Question) -> dict[str, str]:
        wanted, *vectors = await engine().embed([body.text, *NOTES])
        nearest = max(range(len(NOTES)), key=lambda index: float(vectors[index] @ wanted))
        return {"text": NOTES[nearest]}

    return app


def messages_of(body: Question) -> list[dict[str, Any]]:
    return [{"role": "user", "content": body.text}]


def temperature(city: str) -> str:
    return {"Oslo": "4 degrees"}.get(city, "unknown")


async def pieces(stream: TokenStream) -> AsyncIterator[str]:
    async with stream:
        try:
            async for token in stream:
                yield token.text
        except AioserveError as error:
            yield f"\n(failed: {error})"


app = create_app()
