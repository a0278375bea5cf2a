"""Relevance of documents to queries, by a model that is a reranker: a request for each pair.

A pair is a prompt, whose last hidden state the reranker makes one number of. So it takes the way of
an embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.arguments import check, optional, plain_str, shown, text
from aioserve.engine.encoding import Framed
from aioserve.engine.intake import Intake
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.prompt_only import embeddings_of
from aioserve.engine.prompts import listed
from aioserve.errors import InvalidRequestError
from aioserve.execution.loop_callbacks import settle
from aioserve.models.reranking import Reranker
from aioserve.request import Usage
from aioserve.text.conversation import Conversation, conversation_of

__all__ = ["relevance_of"]

MAX_INSTRUCTION_CHARS = 8192


async def relevance_of(
    engine: EngineLifecycle,
    pairs: Sequence[Any],
    *,
    instruction: str | None,
    **options: Any,
) -> tuple[npt.NDArray[np.float32], Usage]:
    """Return the relevance of each pair, float32 `[N]`, and the token counts of all together.
    `options` are those of embeddings."""
    live = engine.usable()
    reranker = live.model.reranker
    if reranker is None:
        raise InvalidRequestError(
            f"{live.model.name} tells no relevance: its files don't say that it is a reranker, and "
            "the engine's option reranker doesn't either",
            argument="pairs",
        )
    rule = optional(text(1, MAX_INSTRUCTION_CHARS))
    said = check(InvalidRequestError, "instruction", instruction, rule)
    conversations = [
        _conversation(reranker, live.intake, pair, said, f"pairs[{index}]")
        for index, pair in enumerate(listed("pairs", pairs, live.config.max_waiting))
    ]
    ids = await asyncio.gather(
        *[_encoded(live.intake, reranker, conversation) for conversation in conversations]
    )
    states, usage = await embeddings_of(
        engine, list(ids), pooling="last", normalize=False, prompt_name="", **options
    )
    return reranker.scores(states), usage


def _conversation(
    reranker: Reranker, intake: Intake, pair: Any, instruction: str | None, place: str
) -> Conversation:
    """Raises `InvalidRequestError` for what is no pair of texts."""
    both = [plain_str(one) for one in pair] if issubclass(type(pair), tuple | list) else []
    query, document = both if len(both) == 2 else (None, None)
    if not query or not document:
        raise InvalidRequestError(
            f"{place} must be a query and a document, two texts that aren't empty, got "
            f"{shown(pair)}",
            argument="pairs",
            value=pair,
        )
    messages = reranker.messages(query, document, instruction)
    return conversation_of(messages, max_chars=intake.encoder.max_chars)


async def _encoded(intake: Intake, reranker: Reranker, conversation: Conversation) -> Sequence[int]:
    """Token ids. Cancelled, a prompt that waits for a thread is forgotten."""
    intake.encoder.check_room(conversation.num_chars)
    encoded: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    prompt = Framed(conversation, reranker.template)
    encoding = intake.encoder.submit(prompt, conversation.num_chars, partial(settle, encoded))
    try:
        return await encoded
    finally:
        encoding.cancel()
