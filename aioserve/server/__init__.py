"""HTTP over an `Engine`: an ASGI app that speaks the APIs which clients of language models speak.

    from aioserve.server import create_app

    async with Engine("path/to/model") as engine:
        app = create_app(engine)

    Door ──► guards/ ──► EndpointApp ──┬─► openai/, anthropic/ ──► answers/ ──► Engine
      └► telemetry/: metrics, log,     ├─► operations: is it alive, is it ready
         spans                         └─► page/, steps/: what the engine does, shown

`openai/` and `anthropic/` are bodies, answers and errors as each API writes them, `answers/` is
what they share: tools and forms, limits, the pieces of answers. `app` lists the endpoints, `served`
is what each handler is given, `running` and `draining` are the life of a server, `connections` and
`outgoing` are its half of HTTP/1.1, whatever clients do. Knows the engine by its public methods
alone: neither the scheduler nor tensors.
"""

from __future__ import annotations

from aioserve.server.app import create_app
from aioserve.server.app_state import drain
from aioserve.server.connections import http_protocol
from aioserve.server.settings import ServerSettings
from aioserve.server.steps.trace_file import tracing

__all__ = ["ServerSettings", "create_app", "drain", "http_protocol", "tracing"]
