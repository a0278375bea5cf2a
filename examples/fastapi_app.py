"""Server-sent events and whole completions from FastAPI. Start it with

    uvicorn fastapi_app:app

and ask: curl -N localhost:8000/ask -H 'content-type: application/json' \\
             -d '{"question": "What does json.dumps do?"}'
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from aioserve import Engine, SamplingParams, TokenStream
from aioserve.errors import AioserveError, InvalidRequestError, RequestRefusedError
from aioserve.http import until_disconnected

PARAMS = SamplingParams(max_tokens=256, temperature=0.0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Engine("pyhelp") as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    question: str


@app.exception_handler(InvalidRequestError)
async def bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 400)


@app.exception_handler(RequestRefusedError)
async def unavailable(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 503)


@app.post("/ask", response_model=None)
async def ask(body: Question, request: Request) -> Response:
    messages = [{"role": "user", "content": body.question}]
    stream = app.state.engine.stream(messages, PARAMS)
    async with until_disconnected(request):
        # Errors that end the request before its first token are raised here, in time for a status
        # other than 200.
        await stream.started()
        return StreamingResponse(events(stream), media_type="text/event-stream")
    return Response(status_code=499)  # the client has disconnected, which ended its request


async def events(stream: TokenStream) -> AsyncIterator[str]:
    # When the client disconnects this generator is cancelled. Leaving `async with` then ends the
    # request: no later step works for it.
    async with stream:
        try:
            async for token in stream:
                yield event(text=token.text)
            yield event(finish_reason=stream.finish_reason)
        except AioserveError as error:  # for example a step that failed
            yield event(error=str(error))


@app.post("/ask-whole", response_model=None)
async def ask_whole(body: Question, request: Request) -> dict[str, str] | Response:
    messages = [{"role": "user", "content": body.question}]
    async with until_disconnected(request):
        completion = await app.state.engine.generate(messages, PARAMS)
        return {"text": completion.text}
    # The client has disconnected, which ended its request.
    return Response(status_code=499)


def event(**fields: str | None) -> str:
    return f"data: {json.dumps(fields)}\n\n"
