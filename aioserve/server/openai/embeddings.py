"""`/v1/embeddings` and `/pooling`: texts, or a conversation, as vectors.

Vectors are pooled hidden states, either scaled to length 1 or unchanged.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.engine.options import Pooling
from aioserve.engine.truncation import TruncationSide
from aioserve.request import Usage
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.sampling import template_variables
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import as_named, refuse
from aioserve.server.hint_tables import OF_EMBEDDINGS, Hints
from aioserve.server.json_parts import LongJson
from aioserve.server.openai.chat_request import messages_of
from aioserve.server.openai.completions_request import prompts_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import CallFields

__all__ = [
    "Embedding",
    "EmbeddingList",
    "EmbeddingRequest",
    "EmbeddingUsage",
    "PooledList",
    "PoolingRequest",
    "embedding_usage",
    "embeddings",
    "first_dimensions",
    "pooling",
    "written",
]

NUMBERS_PER_UNIT = 8
"""Numbers that are written in one unit of work."""
_NAMES = {"prompt": "input", "prompts": "input", "tenant": "user"}


class EmbeddingRequest(CallFields, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_EMBEDDINGS
    default_side: ClassVar[TruncationSide] = "right"

    input: str | list[str | int | list[int]] | None = None
    """One text or several, as text or as token ids."""
    messages: list[dict[str, Any]] | None = None
    """One conversation in place of `input`, framed by the model's chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """False by default."""
    encoding_format: Literal["float", "base64"] | None = None
    """Format of vectors: "float" by default, or "base64" of float32, little-endian."""
    dimensions: int | None = None
    """Number of entries to keep, the first ones, for models trained for it (Matryoshka
    representations)."""
    pooling: Pooling | None = None
    normalize: bool | None = None
    """True if vectors are scaled to the Euclidean length 1."""
    prompt_name: str | None = None
    """Name of the model's prompt that goes before each text; "" for none."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


def embedding_usage(usage: Usage) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """Body of `/pooling`. By default, vectors aren't scaled."""

    task: Literal["embed"] | None = None


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PooledList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


async def _prompts(call: Call, body: EmbeddingRequest) -> list[Any]:
    """Prompts of a body. Raises `ApiError`."""
    if (body.input is None) == (body.messages is None):
        raise refuse("input", "or messages must be given, and not both")
    if body.input is not None:
        for field in ("chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, field) is not None:
                raise refuse(field, "goes with messages alone")
        return prompts_of(body.input, call.settings.max_inputs, "input")
    if not body.messages:
        raise refuse("messages", "must not be empty")
    with as_named({"prompt": "messages"}):
        ids = await call.engine.encode(
            await messages_of(body.messages, call),
            chat_template_kwargs=template_variables(call, body.chat_template_kwargs),
            add_generation_prompt=bool(body.add_generation_prompt),
            **body.truncation_options,
        )
    return [ids]


def first_dimensions(
    vectors: npt.NDArray[np.float32], dimensions: int, *, normalize: bool
) -> npt.NDArray[np.float32]:
    """Return the first `dimensions` entries of `vectors`, float32 `[N, hidden]`, as `[N,
    dimensions]`. Raises `ApiError` if vectors are shorter."""
    size = vectors.shape[1]
    if not 1 <= dimensions <= size:
        raise refuse("dimensions", f"must be in [1, {size}], got {dimensions}")
    first = vectors[:, :dimensions]
    if not normalize:
        return first
    lengths = np.linalg.norm(first, axis=1, keepdims=True)
    return first / np.maximum(lengths, np.finfo(np.float32).tiny)


def written(
    call: Call,
    vectors: npt.NDArray[np.float32],
    made: Callable[[int, list[float] | str], object],
    *,
    in_base64: bool = False,
) -> Any:
    """Return a list with the result of `made` for each of `vectors`, `[N, hidden]`.

    The function takes an index and a vector, as numbers or as base64 of their bytes. The list is
    made while it is sent, and the vectors are kept until then. Raises `ApiError` if all calls
    together keep too many.
    """
    call.kept.keep(vectors.nbytes)

    async def entries() -> AsyncGenerator[object, None]:
        for index, one in enumerate(vectors):
            await call.pace.before(1 + len(one) // (NUMBERS_PER_UNIT * (8 if in_base64 else 1)))
            yield made(index, _in_base64(one) if in_base64 else one.tolist())

    return LongJson.of_list(entries)


def _in_base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def _encoded(
    call: Call,
    body: EmbeddingRequest,
    made: Callable[[int, list[float] | str], object],
    *,
    normalize: bool | None = None,
) -> tuple[Any, Usage]:
    """Return a list with the result of `made` for each vector of a body, and the usage.

    The function takes an index and a vector, in the format that the body asks for. Bodies without
    `normalize` use the value here; None leaves it to the model's files. Raises `ApiError`.
    """
    body.check(call)
    prompts = await _prompts(call, body)
    normalize = normalize if body.normalize is None else body.normalize
    if normalize is None:
        normalize = call.facts.retrieval.normalize
    with as_named(_NAMES):
        vectors, usage = await call.engine.embed_counted(
            prompts,
            pooling=body.pooling,
            normalize=normalize and body.dimensions is None,
            prompt_name=body.prompt_name,
            **body.options(call),
        )
    call.call_log.counts.append(usage)
    if body.dimensions is not None:
        vectors = first_dimensions(vectors, body.dimensions, normalize=normalize)
    return written(call, vectors, made, in_base64=body.encoding_format == "base64"), usage


@endpoint(OPENAI_ERRORS, "/v1/embeddings", "Embed texts", method="POST")
async def embeddings(call: Call, body: EmbeddingRequest) -> EmbeddingList:
    data, usage = await _encoded(
        call, body, lambda index, one: Embedding(index=index, embedding=one)
    )
    return EmbeddingList(
        model=call.app_state.served_name(body.model),
        data=data,
        usage=embedding_usage(usage),
    )


@endpoint(OPENAI_ERRORS, "/pooling", "Pooled hidden states of texts", method="POST")
async def pooling(call: Call, body: PoolingRequest) -> PooledList:
    data, usage = await _encoded(
        call, body, lambda index, one: Pooled(index=index, data=one), normalize=False
    )
    return PooledList(
        id=f"pool-{call.call_log.call_id}",
        created=call.created_seconds,
        model=call.app_state.served_name(body.model),
        data=data,
        usage=embedding_usage(usage),
    )
