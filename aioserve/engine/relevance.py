"""Relevance of documents to queries, by a model that is a reranker: a request for each pair.

Each pair becomes a prompt, and the reranker makes one number of its last hidden state. So it is
computed like an embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.arguments import check, optional, plain_str, shown, text
from aioserve.engine.encoding import Encoding, Framed
from aioserve.engine.intake import Intake
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.prompt_only import embeddings_of
from aioserve.engine.prompts import listed
from aioserve.errors import InvalidRequestError
from aioserve.execution.loop_callbacks import resolve
from aioserve.models.reranking import Reranker
from aioserve.request import Usage
from aioserve.text.conversation import Conversation, conversation_of

__all__ = ["relevance_of"]

MAX_INSTRUCTION_CHARS = 8192
MAX_SCORED_AT_ONCE = 32
"""Hidden states scored before the event loop gets its turn. One of 8,192 numbers takes about 10
µs."""


async def relevance_of(
    engine: EngineLifecycle,
    pairs: Sequence[Any],
    *,
    instruction: str | None,
    **options: Any,
) -> tuple[npt.NDArray[np.float32], Usage]:
    """Return the relevance of each pair, float32 `[N]`, and the token counts of all together.

    `options` are those of embeddings.
    """
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
    every = listed("pairs", pairs, live.config.max_waiting)
    ids = await _encoded(engine, reranker, every, said)
    states, usage = await embeddings_of(
        engine, ids, pooling="last", normalize=False, prompt_name="", **options
    )
    scores: list[npt.NDArray[np.float32]] = []
    for start in range(0, len(states), MAX_SCORED_AT_ONCE):
        await asyncio.sleep(0)
        scores.append(reranker.scores(states[start : start + MAX_SCORED_AT_ONCE]))
    return np.concatenate(scores), usage


def _conversation(
    reranker: Reranker, intake: Intake, pair: Any, instruction: str | None, place: str
) -> Conversation:
    """Make the messages of a pair. Raises `InvalidRequestError` unless it is a pair of texts."""
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


async def _encoded(
    engine: EngineLifecycle, reranker: Reranker, pairs: Sequence[Any], instruction: str | None
) -> list[Sequence[int]]:
    """Encode the prompts of all pairs, submitted in turns.

    An error or cancellation drops the prompts that still wait for a thread.
    """
    futures: list[asyncio.Future[Sequence[int]]] = []
    encodings: list[Encoding] = []
    try:
        for index, pair in enumerate(pairs):
            await engine.turns.take()
            intake = engine.usable().intake
            conversation = _conversation(reranker, intake, pair, instruction, f"pairs[{index}]")
            intake.encoder.check_room(conversation.num_chars)
            futures.append(asyncio.get_running_loop().create_future())
            prompt, then = Framed(conversation, reranker.template), partial(resolve, futures[-1])
            encodings.append(intake.encoder.submit(prompt, conversation.num_chars, then))
        return [await future for future in futures]
    finally:
        for future, encoding in zip(futures, encodings, strict=False):
            encoding.cancel()
            if future.done() and not future.cancelled():
                future.exception()  # only the first of several errors is raised
