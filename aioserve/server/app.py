"""`create_app`: an engine's APIs as one ASGI app."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Scope

from aioserve.engine.engine import Engine
from aioserve.server.anthropic.count_tokens import COUNT_TOKENS
from aioserve.server.anthropic.messages import MESSAGES
from aioserve.server.endpoint import Endpoint, EndpointApp
from aioserve.server.openai.chat import CHAT
from aioserve.server.openai.completions import COMPLETIONS
from aioserve.server.openai.embeddings import EMBEDDINGS
from aioserve.server.openai.models import MODELS
from aioserve.server.openai.responses import (
    DELETE_RESPONSE,
    GET_RESPONSE,
    INPUT_ITEMS,
    RESPONSES,
)
from aioserve.server.openai.tokens import DETOKENIZE, TOKENIZE
from aioserve.server.served import Call, Served
from aioserve.server.settings import ServerSettings

__all__ = ["ENDPOINTS", "create_app"]

ENDPOINTS: Sequence[Endpoint[Any]] = (
    MODELS,
    COMPLETIONS,
    CHAT,
    EMBEDDINGS,
    TOKENIZE,
    DETOKENIZE,
    RESPONSES,
    GET_RESPONSE,
    DELETE_RESPONSE,
    INPUT_ITEMS,
    MESSAGES,
    COUNT_TOKENS,
)


def create_app(engine: Engine, settings: ServerSettings | None = None) -> Starlette:
    """An ASGI app that serves `engine`, which belongs to the caller: it is entered before the first
    request comes, on the event loop that serves the app, and closed after the last. The app can be
    mounted in any other."""
    served = Served(engine, ServerSettings() if settings is None else settings)

    def call_of(_: Scope) -> Call:
        return Call(served, uuid.uuid4().hex)

    return Starlette(
        routes=[
            Route(endpoint.path, EndpointApp(endpoint, call_of), methods=[endpoint.method])
            for endpoint in ENDPOINTS
        ]
    )
