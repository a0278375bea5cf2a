"""`create_app`: an engine's APIs as one ASGI app.

The app observes the engine until its lifespan ends. An app that is mounted in another has no
lifespan of its own. It observes as long as the engine exists, unless the outer app runs
`app.router.lifespan_context`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, Route

from aioserve import Observer
from aioserve.engine.interface import EngineLike
from aioserve.server.anthropic.messages import ANTHROPIC_ERRORS, count_tokens, messages
from aioserve.server.app_state import AppState
from aioserve.server.call_reports import AccessLog, Spans
from aioserve.server.endpoint import Endpoint, EndpointApp, ErrorShape, shown_path
from aioserve.server.metrics import Metrics
from aioserve.server.middleware import NOT_FOUND, CallMiddleware, Listener
from aioserve.server.ollama import answers as ollama
from aioserve.server.ollama import embeddings as ollama_embeddings
from aioserve.server.ollama.models import api_version, ps, show, tags
from aioserve.server.openai.chat_batch import chat_batch
from aioserve.server.openai.chat_completions import chat
from aioserve.server.openai.completions import completions
from aioserve.server.openai.embeddings import embeddings, pooling
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.models import model, models
from aioserve.server.openai.responses_api.handlers import (
    cancel_response,
    delete_response,
    input_items,
    response,
    responses,
)
from aioserve.server.openai.similarity import rerank, score, v1_rerank, v1_score, v2_rerank
from aioserve.server.openai.tokens import detokenize, tokenize
from aioserve.server.openapi import describing
from aioserve.server.operations import (
    abort_request,
    abort_requests,
    health,
    ping,
    ready,
    reset_prefix_cache,
    server_info,
    version,
)
from aioserve.server.page import PAGE_PATHS, page_routes
from aioserve.server.request_checks import checks_of
from aioserve.server.settings import ServerSettings
from aioserve.server.step_log.endpoints import live, live_now, trace
from aioserve.server.step_log.recorder import StepRecorder

__all__ = ["ENDPOINTS", "PAGE_ENDPOINTS", "create_app"]


ENDPOINTS: Sequence[Endpoint[Any]] = (
    *(models, model, completions, chat, chat_batch),
    *(embeddings, pooling, tokenize, detokenize),
    *(responses, response, delete_response, cancel_response, input_items),
    *(messages, count_tokens),
    *(ollama.chat, ollama.generate, tags, ps, show, api_version),
    *(ollama_embeddings.embed, ollama_embeddings.embeddings),
    *(score, v1_score, rerank, v1_rerank, v2_rerank),
    *(health, ready, ping, version, server_info, reset_prefix_cache),
    *(abort_requests, abort_request),
)
PAGE_ENDPOINTS: Sequence[Endpoint[Any]] = (live, live_now, trace)
"""Endpoints that the page reads, about the engine."""


def create_app(engine: EngineLike, settings: ServerSettings | None = None) -> Starlette:
    """Return an ASGI app that serves `engine`, and can be mounted in any other.

    The engine belongs to the caller. Enter it before the first request, on the event loop that
    serves the app, and close it after the last. The app observes it from now on until the end of
    its lifespan, if it has one. Raises `ConfigError` for settings with invalid hosts, origins or
    operators.
    """
    settings = ServerSettings() if settings is None else settings
    endpoints, steps = list(ENDPOINTS), None
    if settings.page:
        steps = StepRecorder()
        endpoints += PAGE_ENDPOINTS
    endpoints.append(describing(endpoints))
    app_state = AppState(engine, settings, steps)

    routes: list[Route | Mount] = [
        Route(endpoint.path, EndpointApp(endpoint, app_state), methods=[endpoint.method])
        for endpoint in endpoints
    ]
    listeners = _listeners(app_state)
    routes += [
        Route("/metrics", one, methods=["GET"]) for one in listeners if isinstance(one, Metrics)
    ]
    if settings.page:
        routes += page_routes()
    middleware = Middleware(
        CallMiddleware,
        checks=checks_of(settings, PAGE_PATHS if settings.page else ()),
        listeners=listeners,
        shape_of=partial(_shape_of, {endpoint.path: endpoint.errors for endpoint in endpoints}),
        routes={_named(route): shown_path(route.path) for route in routes},
        calls=app_state.calls,
        max_calls=settings.max_concurrent_calls,
    )
    observers: list[Observer] = [one for one in listeners if isinstance(one, Metrics)]
    if steps is not None:
        observers.append(steps)
    stops: list[Callable[[], None]] = [engine.observe(observer) for observer in observers]

    @asynccontextmanager
    async def watching(_: Starlette) -> AsyncIterator[None]:
        """Lifespan of the app, which may run more than once."""
        if not stops:
            stops.extend([engine.observe(observer) for observer in observers])
        try:
            yield
        finally:
            while stops:
                stops.pop()()

    app = Starlette(
        routes=routes,
        middleware=[middleware],
        exception_handlers=NOT_FOUND,
        lifespan=watching,
    )
    app.router.redirect_slashes = False  # behind a proxy that ends TLS, it would lead to http://
    app.state.app_state = app_state
    return app


SHAPES_BELOW = {"/api/": ollama.OLLAMA_ERRORS, "/v1/messages/": ANTHROPIC_ERRORS}
"""Formats of errors at unknown paths, by their beginning."""


def _shape_of(shapes: Mapping[str, ErrorShape], path: str) -> ErrorShape:
    """Return the format of errors at `path`: its endpoint's, or else its API's."""
    if (found := shapes.get(path)) is not None:
        return found
    below = (shape for begin, shape in SHAPES_BELOW.items() if path.startswith(begin))
    return next(below, OPENAI_ERRORS)


def _named(route: Route | Mount) -> object:
    """Return the object under "endpoint" in the scopes of requests to `route`."""
    return route.app if isinstance(route, Mount) else route.endpoint


def _listeners(app_state: AppState) -> Sequence[Listener]:
    settings, spans = app_state.settings, Spans.installed()
    found: list[Listener] = [] if spans is None else [spans]
    if settings.metrics:
        found.append(Metrics(app_state, {key.name for key in settings.keys}))
    if settings.access_log != "off":
        found.append(AccessLog(settings.access_log))
    return found
