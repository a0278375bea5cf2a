"""`/v1/models`: what is served here."""

from __future__ import annotations

from typing import Literal

import msgspec

from aioserve.server.endpoint import Endpoint
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.served import Call

__all__ = ["MODELS", "Model", "ModelList"]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """When this server began to serve it, in seconds since 1970."""
    owned_by: str = "aioserve"
    max_model_len: int
    """Most tokens of a prompt and its answer together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def models(call: Call, _: None) -> ModelList:
    served = call.served
    length = served.engine.limits.max_model_len
    return ModelList(
        data=[
            Model(id=name, created=served.created_seconds, max_model_len=length)
            for name in served.model_names
        ]
    )


MODELS: Endpoint[None] = Endpoint(
    "/v1/models", models, OPENAI_ERRORS, answer=ModelList, summary="The models served here"
)
