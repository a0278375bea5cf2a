"""`create_app`: an engine's APIs as one ASGI app."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Scope

from aioserve.engine.engine import Engine
from aioserve.server.endpoint import Endpoint, EndpointApp
from aioserve.server.openai.completions import COMPLETIONS
from aioserve.server.openai.models import MODELS
from aioserve.server.page import page_routes
from aioserve.server.served import Call, Served
from aioserve.server.settings import ServerSettings
from aioserve.server.steps.download import TRACE
from aioserve.server.steps.live import LIVE, LIVE_NOW
from aioserve.server.steps.recorder import StepRecorder

__all__ = ["ENDPOINTS", "PAGE_ENDPOINTS", "create_app"]

ENDPOINTS: Sequence[Endpoint[Any]] = (MODELS, COMPLETIONS)
PAGE_ENDPOINTS: Sequence[Endpoint[Any]] = (LIVE, LIVE_NOW, TRACE)
"""What the page shows of the engine."""


def create_app(engine: Engine, settings: ServerSettings | None = None) -> Starlette:
    """An ASGI app that serves `engine`, which belongs to the caller: it is entered before the first
    request comes, on the event loop that serves the app, and closed after the last. The app can be
    mounted in any other."""
    settings = ServerSettings() if settings is None else settings
    endpoints, pages, steps = list(ENDPOINTS), [], None
    if settings.page:
        steps = StepRecorder()
        engine.observe(steps)
        endpoints += PAGE_ENDPOINTS
        pages = page_routes()
    served = Served(engine, settings, steps)

    def call_of(_: Scope) -> Call:
        return Call(served, uuid.uuid4().hex)

    return Starlette(
        routes=[
            Route(endpoint.path, EndpointApp(endpoint, call_of), methods=[endpoint.method])
            for endpoint in endpoints
        ]
        + pages
    )
