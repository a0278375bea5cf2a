"""`/api/embed` and the older `/api/embeddings`: texts as vectors.

The first returns a vector of length 1 for each text. The second returns one vector, as the model
makes it. Texts longer than the context are cut at their end, unless `truncate` is false.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.request import Usage
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.sampling import check_at_most
from aioserve.server.errors import as_named, refuse
from aioserve.server.ollama.answers import posted
from aioserve.server.ollama.ollama_request import ModelOptions, served_name
from aioserve.server.openai.embeddings import first_dimensions, written
from aioserve.timings import loop_seconds

__all__ = ["EmbedBody", "Embedded", "OneEmbedBody", "OneEmbedding", "embed", "embeddings"]


class _EmbedFields(Strict, frozen=True, kw_only=True):
    model: str
    options: ModelOptions | None = None
    """Options for drawing tokens. Embedding draws none."""
    keep_alive: float | str | None = None
    """Has no effect: the model is there as long as the server is."""


class EmbedBody(_EmbedFields, frozen=True, kw_only=True):
    input: str | list[str] | None = None
    """Texts. An empty one asks for the model to be loaded, which it is."""
    truncate: bool | None = None
    """True by default."""
    dimensions: int | None = None
    """Number of entries to keep of each vector, the first ones."""


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    """Nanoseconds from the body to the vectors."""
    load_duration: int = 0
    prompt_eval_count: int


class OneEmbedBody(_EmbedFields, frozen=True, kw_only=True):
    prompt: str | None = None


class OneEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    embedding: list[float]


async def _vectors(
    call: Call, body: _EmbedFields, texts: list[str], *, truncate: bool, normalize: bool
) -> tuple[npt.NDArray[np.float32], Usage]:
    num_ctx = None if body.options is None else body.options.num_ctx
    if num_ctx is not None and num_ctx < 1:
        raise refuse("options.num_ctx", f"must be at least 1, got {num_ctx}")
    most = -1 if num_ctx is None or num_ctx >= call.facts.limits.max_model_len else num_ctx
    cut: dict[str, Any] = (
        {"truncate_prompt_tokens": most, "truncation_side": "right"} if truncate else {}
    )
    with as_named({"prompt": "input", "prompts": "input"}):
        vectors, usage = await call.engine.embed_counted(
            texts, normalize=normalize, **cut, **call.options()
        )
    call.call_log.counts.append(usage)
    return vectors, usage


def _alone(_: int, vector: object) -> object:
    return vector


@posted("/api/embed", "Embed texts, as Ollama does", answer=Embedded)
async def embed(call: Call, body: EmbedBody) -> Embedded:
    began = loop_seconds()
    name = served_name(call, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    check_at_most("input", "have at most {} entries", len(texts), call.settings.max_inputs)
    texts = [] if texts == [""] else texts
    found: Any = []
    num_tokens = 0
    if texts:
        vectors, usage = await _vectors(
            call,
            body,
            texts,
            truncate=body.truncate is not False,
            normalize=body.dimensions is None,
        )
        if body.dimensions is not None:
            vectors = first_dimensions(vectors, body.dimensions, normalize=True)
        found, num_tokens = written(call, vectors, _alone), usage.prompt_tokens
    return Embedded(
        model=name,
        embeddings=found,
        total_duration=int((loop_seconds() - began) * 1e9),
        prompt_eval_count=num_tokens,
    )


@posted("/api/embeddings", "Embed a text, as Ollama once did", answer=OneEmbedding)
async def embeddings(call: Call, body: OneEmbedBody) -> OneEmbedding:
    served_name(call, body.model)
    if not body.prompt:
        empty: Any = []
        return OneEmbedding(embedding=empty)
    with as_named({"input": "prompt"}):
        vectors, _ = await _vectors(call, body, [body.prompt], truncate=True, normalize=False)
    return OneEmbedding(embedding=vectors[0].tolist())
