"""`/v1/models` and `/v1/models/{id}`: the models served here."""

from __future__ import annotations

from typing import Literal

import msgspec

from aioserve.server.app_state import Call
from aioserve.server.bodies import NoParameters, Strict
from aioserve.server.endpoint import endpoint
from aioserve.server.openai.errors import OPENAI_ERRORS

__all__ = ["Model", "ModelList", "model", "models"]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Time when this server began to serve it, in seconds since 1970."""
    owned_by: str = "aioserve"
    max_model_len: int
    """Most tokens of a prompt and its answer together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Named(Strict, frozen=True, kw_only=True):
    model: str


@endpoint(OPENAI_ERRORS, "/v1/models", "The models served here")
async def models(call: Call, _: NoParameters) -> ModelList:
    return ModelList(data=[_model(call, name) for name in call.app_state.model_names])


# Names may have slashes.
@endpoint(OPENAI_ERRORS, "/v1/models/{model:path}", "One of them")
async def model(call: Call, named: Named) -> Model:
    call.app_state.check_model(named.model)
    return _model(call, named.model)


def _model(call: Call, name: str) -> Model:
    length = call.facts.limits.max_model_len
    return Model(id=name, created=call.app_state.created_seconds, max_model_len=length)
