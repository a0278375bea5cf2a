"""`/score` and `/rerank`: relevance of texts to others.

A reranker scores pairs of texts itself. Other models compare embeddings, by the cosine of the angle
between them. The fields are those of vLLM, Jina and Cohere. All texts of a call are embedded at
once, and repeated texts only once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import msgspec
import numpy as np

from aioserve.engine.options import Pooling
from aioserve.engine.truncation import TruncationSide
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.sampling import check_at_most
from aioserve.server.endpoint import Endpoint, endpoint
from aioserve.server.errors import as_named, refuse
from aioserve.server.openai.embeddings import EmbeddingUsage, embedding_usage
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import CallFields

__all__ = [
    "RerankRequest",
    "Reranking",
    "ScoreList",
    "ScoreRequest",
    "rerank",
    "score",
    "v1_rerank",
    "v1_score",
    "v2_rerank",
]


class ScoreRequest(CallFields, frozen=True, kw_only=True):
    default_side: ClassVar[TruncationSide] = "right"

    text_1: str | list[str]
    text_2: str | list[str]
    """Texts to compare with `text_1`: one for each, or any number for one `text_1`."""
    pooling: Pooling | None = None
    """Pooling of the embeddings that are compared, whatever the model is."""
    instruction: str | None = None
    """Instruction for a reranker, in place of its own."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float
    """Score in [-1, 1]; of a reranker in [0, 1]."""


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(CallFields, frozen=True, kw_only=True):
    default_side: ClassVar[TruncationSide] = "right"

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """Number of documents to return; all by default, and for 0."""
    return_documents: bool | None = None
    """True by default."""
    pooling: Pooling | None = None
    """Pooling of the embeddings that are compared, whatever the model is."""
    instruction: str | None = None
    """Instruction for a reranker, in place of its own."""


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Place of the document in the request."""
    relevance_score: float
    """Relevance in [-1, 1]; of a reranker in [0, 1]."""
    document: Document | msgspec.UnsetType = msgspec.UNSET


class Reranking(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[Ranked]
    """Documents, the most relevant first. Equal ones are in the order of the request."""
    usage: EmbeddingUsage


@endpoint(OPENAI_ERRORS, "/score", "How alike texts are", method="POST")
async def score(call: Call, body: ScoreRequest) -> ScoreList:
    body.check(call)
    ones = _texts(call, "text_1", body.text_1)
    others = _texts(call, "text_2", body.text_2)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise refuse("text_2", f"must have {len(ones)} texts, as text_1 has, got {len(others)}")
    cosines, usage = await _compared(call, body, ones, others, "text_2")
    return ScoreList(
        id=f"score-{call.call_log.call_id}",
        created=call.created_seconds,
        model=call.app_state.served_name(body.model),
        data=[Score(index=index, score=cosine) for index, cosine in enumerate(cosines)],
        usage=usage,
    )


@endpoint(OPENAI_ERRORS, "/rerank", "Documents, the likest to a query first", method="POST")
async def rerank(call: Call, body: RerankRequest) -> Reranking:
    body.check(call)
    if (body.top_n or 0) < 0:
        raise refuse("top_n", f"must be at least 0, got {body.top_n}")
    queries = _texts(call, "query", body.query)
    written = [one if isinstance(one, str) else one.text for one in body.documents]
    texts = _texts(call, "documents", written)
    cosines, usage = await _compared(call, body, queries * len(texts), texts, "documents")
    order = sorted(range(len(texts)), key=lambda index: -cosines[index])
    shown = body.return_documents is not False
    return Reranking(
        id=f"rerank-{call.call_log.call_id}",
        model=call.app_state.served_name(body.model),
        results=[
            Ranked(
                index=index,
                relevance_score=cosines[index],
                document=Document(texts[index]) if shown else msgspec.UNSET,
            )
            for index in order[: body.top_n or None]
        ],
        usage=usage,
    )


v1_score: Endpoint[ScoreRequest] = replace(score, path="/v1/score")
v1_rerank: Endpoint[RerankRequest] = replace(rerank, path="/v1/rerank")
v2_rerank: Endpoint[RerankRequest] = replace(rerank, path="/v2/rerank")


def _texts(call: Call, field: str, given: str | list[str]) -> list[str]:
    """Return the texts of a field, one or several. Raises `ApiError` for none, for an empty one,
    and for too many."""
    texts = [given] if isinstance(given, str) else given
    check_at_most(field, "have at most {} texts", len(texts), call.settings.max_inputs)
    if not texts or not all(texts):
        raise refuse(field, "must not be empty, and have no empty text")
    return texts


async def _compared(
    call: Call,
    body: ScoreRequest | RerankRequest,
    ones: list[str],
    others: list[str],
    field: str,
) -> tuple[list[float], EmbeddingUsage]:
    """Compare each of `ones` with its neighbour in `others`, in the model's own way. `field` of the
    body has `others`."""
    if not call.facts.tells_relevance or body.pooling is not None:
        if body.instruction is not None:
            raise refuse("instruction", "goes with a model that is a reranker, without pooling")
        return await _cosines(call, body, ones, others, field)
    for name in ("truncate_prompt_tokens", "truncation_side"):
        if getattr(body, name) is not None:
            raise refuse(name, "isn't supported by a reranker, whose prompt has all of both texts")
    places = {
        pair: place for place, pair in enumerate(dict.fromkeys(zip(ones, others, strict=True)))
    }
    check_at_most(field, "have at most {} texts", len(places), call.settings.max_inputs)
    with as_named({"prompt": field, "prompts": field, "pairs": field, "tenant": "user"}):
        scores, usage = await call.engine.relevance(
            list(places), instruction=body.instruction, **body.options(call)
        )
    call.call_log.counts.append(usage)
    found = [scores[places[pair]] for pair in zip(ones, others, strict=True)]
    return [float(one) for one in found], embedding_usage(usage)


def _behind(prompt: str, texts: list[str]) -> list[str]:
    """Return the texts, each after `prompt`. Equal texts are one object."""
    made = {text: prompt + text for text in dict.fromkeys(texts)}
    return [made[text] for text in texts]


async def _cosines(
    call: Call,
    body: ScoreRequest | RerankRequest,
    ones: list[str],
    others: list[str],
    field: str,
) -> tuple[list[float], EmbeddingUsage]:
    """Compare the embedding of each of `ones` with that of its neighbour."""
    prompts = call.facts.retrieval.prompts if isinstance(body, RerankRequest) else {}
    query, document = (prompts.get(name, "") for name in ("query", "document"))
    # Each text once: thousands of documents share a query, which may be long.
    ones, others = _behind(query, ones), _behind(document, others)
    places = {text: place for place, text in enumerate(dict.fromkeys([*ones, *others]))}
    check_at_most(field, "have at most {} texts", len(places) - 1, call.settings.max_inputs)
    bare = "" if isinstance(body, RerankRequest) else None  # the default before both texts
    with as_named({"prompt": field, "prompts": field, "tenant": "user"}):
        vectors, usage = await call.engine.embed_counted(
            list(places),
            pooling=body.pooling,
            normalize=True,
            prompt_name=bare,
            **body.options(call),
        )
    call.call_log.counts.append(usage)
    first, second = (vectors[[places[text] for text in texts]] for texts in (ones, others))
    cosines = np.einsum("nh,nh->n", first, second)  # vectors have the length 1
    return cosines.clip(-1.0, 1.0).tolist(), embedding_usage(usage)
