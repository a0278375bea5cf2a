"""`/v1/embeddings`: texts as vectors, which are pooled hidden states of the model."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec

from aioserve.server.app_state import Call
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import as_named, refuse
from aioserve.server.openai.completions_request import prompts_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import CallFields

__all__ = ["Embedding", "EmbeddingList", "EmbeddingRequest", "embeddings"]

_NAMES = {"prompt": "input", "prompts": "input", "tenant": "user"}


class EmbeddingRequest(CallFields, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    """One or several, as text or as token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """float where it isn't said. base64: of float32, little-endian."""
    dimensions: int | None = None
    """Refused unless it is what the model has."""
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None
    """To the Euclidean length 1, where it isn't said."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@endpoint(OPENAI_ERRORS, "/v1/embeddings", "Embed texts", method="POST")
async def embeddings(call: Call, body: EmbeddingRequest) -> EmbeddingList:
    body.check(call)
    prompts: list[Any] = prompts_of(body.input, call.settings.max_prompts, "input")
    with as_named(_NAMES):
        vectors, usage = await call.engine.embed_counted(
            prompts,
            pooling=body.pooling or "last",
            normalize=body.normalize is not False,
            **body.options(call),
        )
    call.call_log.counts.append(usage)
    size = vectors.shape[1]
    if body.dimensions not in (None, size):
        raise refuse(
            "dimensions", f"must be {size}, which the model has, or left out; got {body.dimensions}"
        )
    if body.encoding_format == "base64":
        written = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
    else:
        written = vectors.tolist()
    return EmbeddingList(
        model=body.model,
        data=[Embedding(index=index, embedding=one) for index, one in enumerate(written)],
        usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens),
    )
