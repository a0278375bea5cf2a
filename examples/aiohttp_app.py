"""Stream plain text from aiohttp. Start it with

    python aiohttp_app.py

and ask: curl -N localhost:8080/complete -d 'def fibonacci(n):'
"""

from collections.abc import AsyncIterator

from aiohttp import web

from aioserve import Engine, SamplingParams
from aioserve.errors import InvalidRequestError, RequestRefusedError

PARAMS = SamplingParams(max_tokens=256, temperature=0.0)
ENGINE = web.AppKey("engine", Engine)


async def engine_context(app: web.Application) -> AsyncIterator[None]:
    async with Engine("pyhelp") as engine:
        app[ENGINE] = engine
        yield


async def complete(request: web.Request) -> web.StreamResponse:
    prompt = (await request.read()).decode(errors="replace")
    try:
        stream = request.app[ENGINE].stream(prompt, PARAMS)
        await stream.started()  # a prompt that is too long fails here, in time for a 400
    except InvalidRequestError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    except RequestRefusedError as error:
        raise web.HTTPServiceUnavailable(text=str(error)) from error
    async with stream:
        response = web.StreamResponse(headers={"content-type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        async for token in stream:
            await response.write(token.text.encode())
        await response.write_eof()
    return response


def create_app() -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(engine_context)
    app.router.add_post("/complete", complete)
    return app


if __name__ == "__main__":
    # Without this, aiohttp lets a handler run on after its client has disconnected. A request that
    # still waits in the queue would then be answered for nobody.
    web.run_app(create_app(), handler_cancellation=True)
