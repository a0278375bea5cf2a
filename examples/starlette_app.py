"""Stream plain text from Starlette. Start it with

    uvicorn starlette_app:app

and ask: curl -N localhost:8000/complete -d 'def fibonacci(n):'
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from aioserve import Engine, SamplingParams, TokenStream
from aioserve.errors import InvalidRequestError, RequestRefusedError
from aioserve.http import until_disconnected

PARAMS = SamplingParams(max_tokens=256, temperature=0.0)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with Engine("pyhelp") as engine:
        app.state.engine = engine
        yield


async def complete(request: Request) -> Response:
    prompt = (await request.body()).decode(errors="replace")
    try:
        stream = request.app.state.engine.stream(prompt, PARAMS)
        async with until_disconnected(request):
            await stream.started()  # a prompt that is too long fails here, in time for a 400
            return StreamingResponse(text(stream), media_type="text/plain")
    except InvalidRequestError as error:
        return PlainTextResponse(str(error), status_code=400)
    except RequestRefusedError as error:
        return PlainTextResponse(str(error), status_code=503)
    return Response(status_code=499)  # the client has disconnected, which ended its request


async def text(stream: TokenStream) -> AsyncIterator[str]:
    # Starlette cancels this generator when the client disconnects. Leaving `async with` then ends
    # the request: no later step works for it.
    async with stream:
        async for token in stream:
            yield token.text


app = Starlette(routes=[Route("/complete", complete, methods=["POST"])], lifespan=lifespan)
