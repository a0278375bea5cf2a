"""HTTP server over an `EngineLike`: an ASGI app with the APIs of common language model clients.

    from aioserve.server import create_app

    async with Engine("path/to/model") as engine:
        app = create_app(engine)

    CallMiddleware ──► request_checks ──► EndpointApp ──┬─► openai/, anthropic/ ──► EngineLike
      └► metrics, call_reports                          ├─► operations: is it alive, is it ready
                                                        └─► page/, steps/: what the engine does

The folders `openai/`, `anthropic/` and `ollama/` hold bodies, answers and errors in each API's
format. They share `chat_parts/`: tools and structured output, limits, the pieces of completions.
Endpoints are listed in `app`. Handlers get `app_state`, which also drains. `running` is the life of
a server. `connections` and `outgoing` are its half of HTTP/1.1, whatever clients do. The server
knows the engine by its public methods alone: neither the scheduler nor tensors.
"""

from __future__ import annotations

try:
    from aioserve.server.app import create_app
    from aioserve.server.app_state import drain
    from aioserve.server.connections import http_protocol
    from aioserve.server.settings import ServerSettings
    from aioserve.server.step_log.trace import tracing
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"aioserve.server needs {_missing.name}: pip install 'aioserve[server]'",
        name=_missing.name,
    ) from _missing

__all__ = ["ServerSettings", "create_app", "drain", "http_protocol", "tracing"]
