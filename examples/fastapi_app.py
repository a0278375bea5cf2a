"""Server-sent events from FastAPI. Start it with

    uvicorn fastapi_app:app

and ask: curl -N localhost:8000/ask -H 'content-type: application/json' \\
             -d '{"question": "What does json.dumps do?"}'
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from aioserve import Engine, SamplingParams, TokenStream
from aioserve.errors import AioserveError, InvalidRequestError, QueueFullError

PARAMS = SamplingParams(max_tokens=256, temperature=0.0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Engine("pyhelp") as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    question: str


@app.post("/ask")
async def ask(body: Question) -> StreamingResponse:
    messages = [{"role": "user", "content": body.question}]
    try:
        stream = app.state.engine.stream(messages, PARAMS)
    except InvalidRequestError as error:
        raise HTTPException(400, str(error)) from error
    except QueueFullError as error:
        raise HTTPException(503, str(error)) from error
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def events(stream: TokenStream) -> AsyncIterator[str]:
    # When the client goes away this generator is cancelled, and leaving `async with` ends the
    # request: no later step works for it.
    async with stream:
        try:
            async for token in stream:
                yield event(text=token.text)
            yield event(finish_reason=stream.finish_reason)
        except AioserveError as error:  # for example a question of too many tokens
            yield event(error=str(error))


def event(**fields: str | None) -> str:
    return f"data: {json.dumps(fields)}\n\n"
