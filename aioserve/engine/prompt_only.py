"""Requests that generate nothing: scores of continuations, pooled hidden states, and token ids.

Scores and hidden states pass through the engine like all requests. They sample one token, which is
never delivered. Its finite logits show that the computation before it is sound.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import (
    boolean,
    brief,
    check,
    choice,
    counted,
    integer,
    optional,
    plain_str,
    quoted,
    shown,
    text,
)
from aioserve.arguments import name as name_rule
from aioserve.engine.encoding import BareText
from aioserve.engine.intake import Intake, PromptFields
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.options import MESSAGE_DEFAULTS, Pooling
from aioserve.engine.prompts import (
    ContinuedPrompt,
    Prompt,
    check_single,
    checked_continuation,
    holds_prompts,
    kind_of,
    listed,
)
from aioserve.engine.stream import TokenStream
from aioserve.engine.truncation import TruncatedPrompt
from aioserve.errors import (
    AioserveError,
    InvalidPromptError,
    InvalidRequestError,
    RequestFailedError,
)
from aioserve.execution.loop_callbacks import resolve
from aioserve.models.retrieval import Retrieval
from aioserve.request import Logprobs, SamplingParams, Usage
from aioserve.sampling_params import MAX_LOGPROBS
from aioserve.timings import Timings

__all__ = [
    "Score",
    "embeddings_of",
    "noting_place",
    "request_ids_of",
    "scores_of",
    "token_ids_of",
]

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Score(msgspec.Struct, frozen=True):
    """Likelihood of one continuation of a prompt."""

    request_id: str
    token_ids: tuple[int, ...]
    """Token ids of the continuation."""
    logprobs: tuple[Logprobs, ...]
    """Log-probabilities of each of `token_ids`."""
    usage: Usage
    """`prompt_tokens` counts prompt and continuation together; nothing is generated."""
    timings: Timings

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability of the whole continuation: the sum over its
        tokens."""
        return math.fsum(one.logprob for one in self.logprobs)

    def __repr__(self) -> str:
        num_tokens = counted(len(self.token_ids), "token")
        return brief(self, quoted(self.request_id), num_tokens, logprob=self.logprob)


async def scores_of(
    engine: EngineLifecycle,
    prompt: Prompt,
    continuations: Sequence[Any],
    *,
    several: str | None,
    top_logprobs: int,
    request_id: str | None = None,
    **options: Any,
) -> list[Score]:
    """Score each of `continuations` after the same prompt.

    `several` names the argument if it is a list. The first continuation is computed with the
    prompt. The others follow and find the prompt's KV in the prefix cache; in parallel, each would
    compute it.
    """
    live = engine.usable()
    limits, encoder = live.model.limits, live.intake.encoder
    live.intake.check_generates()
    if several is not None:
        continuations = listed(several, continuations, live.config.max_waiting)
    top = check(InvalidRequestError, "top_logprobs", top_logprobs, integer(0, MAX_LOGPROBS))
    if top > limits.vocab_size:
        raise InvalidRequestError(
            f"top_logprobs must be at most the vocabulary size {limits.vocab_size}, got {top}",
            argument="top_logprobs",
            value=top,
            limit=limits.vocab_size,
        )
    prompts: list[ContinuedPrompt] = []
    for index, part in enumerate(continuations):
        with noting_place(several, index):
            check_text = partial(encoder.check_text, "continuation")
            prompts.append(ContinuedPrompt(None, checked_continuation(part, limits, check_text)))
    prompts[0].prompt = live.intake.checked_prompt(prompt, {})
    params = msgspec.structs.replace(ONE_TOKEN, prompt_logprobs=top)
    ids = request_ids_of(request_id, len(prompts) if several else None)
    requests = [(one, ids[index], one.request_fields) for index, one in enumerate(prompts)]
    async with _ended(engine, requests[:1], params, options, several) as mailboxes:
        scores = [_score(prompts[0], mailbox) for mailbox in mailboxes]
    for continued in prompts[1:]:
        continued.prompt = prompts[0].prompt_ids
    async with _ended(engine, requests[1:], params, options, several, first=1) as mailboxes:
        return scores + [_score(*one) for one in zip(prompts[1:], mailboxes, strict=True)]


def _score(continued: ContinuedPrompt, mailbox: Mailbox) -> Score:
    return Score(
        request_id=mailbox.request_id,
        token_ids=continued.continuation_ids,
        logprobs=tuple([one for one in mailbox.prompt_logprobs if one is not None]),
        usage=mailbox.usage,
        timings=mailbox.timings,
    )


async def embeddings_of(
    engine: EngineLifecycle,
    prompts: Prompt | Sequence[Prompt],
    *,
    pooling: Pooling | None,
    normalize: bool | None,
    prompt_name: str | None,
    request_id: str | None = None,
    **options: Any,
) -> tuple[npt.NDArray[np.float32], Usage]:
    """Return vectors, float32 `[hidden]` or `[N, hidden]`, and the token counts of all prompts
    together.

    A hidden state is the input of the output layer: the last layer's output after the final norm.
    It is a row of `last_hidden_state` in transformers.
    """
    live = engine.usable()
    pooling, normalize = _wanted(live.model.retrieval, pooling, normalize)
    name = check(InvalidRequestError, "prompt_name", prompt_name, optional(text(0, 256)))
    if not live.model.pools:
        raise InvalidRequestError(
            f"embeddings can't be computed on {live.model.description.get('device')}: its runner "
            "gives no hidden states",
            argument="prompts",
        )
    several = "prompts" if holds_prompts(prompts) else None
    every: list[Any] = [prompts]
    if several is not None:
        every = listed(several, prompts, live.config.max_waiting)
        for index, prompt in enumerate(every):
            check_single(f"prompts[{index}]", prompt)
    every = [_with_prompt(live.model.retrieval, name, prompt) for prompt in every]

    def wanted(prompt_tokens: int) -> dict[str, Any]:
        return {"pooled": _pooled_positions(pooling, prompt_tokens), "answers": False}

    ids = request_ids_of(request_id, len(every) if several else None)
    requests = [(prompt, ids[index], wanted) for index, prompt in enumerate(every)]
    async with _ended(engine, requests, ONE_TOKEN, options, several) as mailboxes:
        vectors = [_vector(mailbox, pooling, normalize) for mailbox in mailboxes]
        counts = [mailbox.usage for mailbox in mailboxes]
    prompt_tokens = sum([each.prompt_tokens for each in counts])
    usage = Usage(prompt_tokens, 0, sum([each.cached_tokens for each in counts]))
    return (vectors[0] if several is None else np.stack(vectors)), usage


def _wanted(
    retrieval: Retrieval, pooling: Pooling | None, normalize: bool | None
) -> tuple[Pooling, bool]:
    """Return the given options, or else those of the model's files. Raises
    `InvalidRequestError`."""
    ways = choice("last", "mean", "cls")
    pooling = check(InvalidRequestError, "pooling", pooling, optional(ways))
    normalize = check(InvalidRequestError, "normalize", normalize, optional(boolean))
    if pooling is None and retrieval.problem is not None:
        raise InvalidRequestError(
            f"pooling must be one of last, mean and cls with this model: {retrieval.problem}",
            argument="pooling",
        )
    return pooling or retrieval.pooling, retrieval.normalize if normalize is None else normalize


def _with_prompt(retrieval: Retrieval, name: str | None, prompt: Any) -> Any:
    """Put one of the model's own prompts before the text.

    `name` names it; None means the model's default, if any, and "" means nothing. Raises
    `InvalidRequestError`.
    """
    wanted = retrieval.default_prompt if name is None else name
    if not wanted:
        return prompt
    if wanted not in retrieval.prompts:
        known = shown(sorted(retrieval.prompts)) if retrieval.prompts else "it has none"
        raise InvalidRequestError(
            f"prompt_name must be that of a prompt of the model ({known}), got {shown(wanted)}",
            argument="prompt_name",
            value=wanted,
        )
    if kind_of(prompt) == "text":
        return retrieval.prompts[wanted] + (plain_str(prompt) or "")
    if name is not None:
        raise InvalidRequestError(
            "prompt_name goes with text alone: token ids and messages have all of their prompt",
            argument="prompt_name",
            value=name,
        )
    return prompt


def _pooled_positions(pooling: Pooling, prompt_tokens: int) -> range:
    """Positions of the tokens whose hidden states are summed."""
    first = prompt_tokens - 1 if pooling == "last" else 0
    return range(first, 1 if pooling == "cls" else prompt_tokens)


def _vector(mailbox: Mailbox, pooling: Pooling, normalize: bool) -> npt.NDArray[np.float32]:
    """Return the vector of a finished request, float32 `[hidden]`."""
    total = mailbox.pooled
    if total is None or not np.isfinite(total).all():
        raise RequestFailedError(
            f"request {mailbox.request_id!r}: its hidden states are not finite"
        )
    vector = total / len(_pooled_positions(pooling, mailbox.prompt_tokens))
    if normalize:
        length = np.linalg.norm(vector)
        vector = vector / length if length > 0 else vector
    return vector.astype(np.float32)


async def token_ids_of(
    intake: Intake, prompt: Prompt, options: Mapping[str, Any], *, add_special_tokens: bool
) -> list[int]:
    """Encode a prompt as a request would, without queueing one.

    Raises what `Engine.stream` does for a prompt, `QueueFullError`, and `EngineClosedError` if the
    engine is closed meanwhile. Cancelling drops a prompt that waits for a thread.
    """
    check(InvalidPromptError, "add_special_tokens", add_special_tokens, boolean)
    chat = {name: value for name, value in options.items() if name in MESSAGE_DEFAULTS}
    truncation = intake.truncation_of(options, ONE_TOKEN)
    checked = intake.checked_prompt(prompt, chat, truncation)
    if not isinstance(checked, str) and not add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens=False goes with text alone: messages are framed by their template",
            argument="add_special_tokens",
            value=False,
        )
    if isinstance(checked, np.ndarray):
        return checked.tolist()
    num_chars = len(checked) if isinstance(checked, str) else checked.num_chars
    intake.encoder.check_room(num_chars)
    encoded: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    if isinstance(checked, str) and not add_special_tokens:
        checked = BareText(checked)
    if truncation is not None:
        checked = TruncatedPrompt(checked, truncation)
    encoding = intake.encoder.submit(checked, num_chars, partial(resolve, encoded))
    try:
        return list(await encoded)
    finally:
        encoding.cancel()


# -- several requests of one call


def request_ids_of(request_id: Any, count: int | None) -> list[Any]:
    """Return the id of one request, or `count` ids: the given id and an index."""
    if count is None or request_id is None:
        return [request_id] * (count or 1)
    given = check(InvalidRequestError, "request_id", request_id, name_rule)
    return [f"{given}-{index}" for index in range(count)]


@asynccontextmanager
async def _ended(
    engine: EngineLifecycle,
    requests: Sequence[tuple[Any, str | None, PromptFields]],
    params: SamplingParams,
    options: Mapping[str, Any],
    several: str | None,
    *,
    first: int = 0,
) -> AsyncIterator[list[Mailbox]]:
    """Submit requests in turns, wait for all ends, and yield their mailboxes.

    Each request has a prompt, an id, and `PromptFields`. Raises the error of the first request that
    failed, and ends the others, also when cancelled. If `several` names the argument of the
    requests, a note tells the index, counted from `first`.
    """
    mailboxes: list[Mailbox] = []
    streams: list[TokenStream] = []
    try:
        for index, (prompt, request_id, wanted) in enumerate(requests, first):
            await engine.turns.take()
            with noting_place(several, index):
                mailbox = engine.usable().intake.submit(
                    prompt, params, request_id, prompt_fields=wanted, **options
                )
            mailboxes.append(mailbox)
            streams.append(TokenStream(mailbox))
        for index, stream in enumerate(streams, first):
            with noting_place(several, index):
                await stream.started()
        yield mailboxes
    finally:
        for stream in streams:
            stream.close()


@contextmanager
def noting_place(several: str | None, index: int) -> Iterator[None]:
    """Add the index among several prompts as a note to exceptions raised inside."""
    try:
        yield
    except AioserveError as error:
        if several is not None:
            error.add_note(f"of {several}[{index}]")
        raise
