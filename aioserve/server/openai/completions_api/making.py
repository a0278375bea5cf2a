"""`/v1/completions`: prompts of text or token ids, continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec

from aioserve.engine.answers import drawn_for, read_whole
from aioserve.request import Completion as EngineCompletion
from aioserve.server.app_state import Call
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.openai.chunks import Chunks
from aioserve.server.openai.completions_api.choices import CompletionChoice, PromptChoices
from aioserve.server.openai.completions_api.request import (
    COMPLETION_NAMES,
    CompletionRequest,
    prompts_of,
)
from aioserve.server.openai.completions_api.together import Merged, all_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import answer_options_of
from aioserve.server.openai.names import as_named
from aioserve.server.openai.usage import UsageBody, usage_of

__all__ = ["COMPLETIONS", "Completion", "CompletionRequest"]


class AboutCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk says."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str


class Completion(AboutCompletion, frozen=True, kw_only=True):
    choices: list[CompletionChoice]
    usage: UsageBody


async def completions(call: Call, body: CompletionRequest) -> Completion | Events:
    body.check(call)
    prompts = prompts_of(body.prompt, call.settings.max_prompts)
    with as_named(COMPLETION_NAMES):
        params = body.params_of(call.engine.default_params)
        # Whatever is the matter with a prompt is seen before any of them is answered.
        merged = _submitted(call, body, prompts, drawn_for(params))
        try:
            if not body.stream:
                return await _whole(call, body, merged, prompts, params)
            await merged.started()
        except BaseException:
            merged.close()
            raise
    return Events(_events(call, body, merged, prompts), merged)


def _submitted(call: Call, body: CompletionRequest, prompts: Sequence[Any], params: Any) -> Merged:
    merged = Merged([], call.settings.stream_interval)
    try:
        for prompt in prompts:
            stream = call.engine.stream(prompt, params, **answer_options_of(call, body))
            merged.streams.append(stream)
            call.call_log.answers_with(stream)
    except BaseException:
        merged.close()
        raise
    return merged


def _choices_of(call: Call, body: CompletionRequest, prompts: Sequence[Any]) -> list[PromptChoices]:
    n = body.n or call.engine.default_params.n
    return [PromptChoices(call.engine, body, *one) for one in _numbered(prompts, n)]


def _numbered(prompts: Sequence[Any], n: int) -> list[tuple[Any, int]]:
    return [(prompt, place * n) for place, prompt in enumerate(prompts)]


async def _whole(
    call: Call, body: CompletionRequest, merged: Merged, prompts: Sequence[Any], params: Any
) -> Completion:
    answers: list[EngineCompletion] = await all_of(
        [partial(read_whole, stream, params) for stream in merged.streams]
    )
    makers = _choices_of(call, body, prompts)
    choices = [
        choice
        for maker, answer, stream in zip(makers, answers, merged.streams, strict=True)
        for choice in await maker.whole(answer.samples, stream)
    ]
    usage = usage_of(makers[0].counted(merged.usage))
    about = msgspec.structs.asdict(_about(call, body))
    return Completion(**about, choices=choices, usage=usage)


async def _events(
    call: Call, body: CompletionRequest, merged: Merged, prompts: Sequence[Any]
) -> AsyncGenerator[bytes, None]:
    chunks = Chunks(_about(call, body), body.stream_options)
    makers = _choices_of(call, body, prompts)
    begun: set[int] = set()
    with as_named(COMPLETION_NAMES):
        async with aclosing(merged.batches()) as batches:
            async for place, batch in batches:
                maker = makers[place]
                if place not in begun:
                    begun.add(place)
                    await maker.begin(merged.streams[place])
                pieces = maker.pieces(batch, merged.streams[place])
                usage = maker.counted(merged.given_usage) if chunks.counts_always else None
                if len(pieces) == 1:
                    yield chunks.chunk(pieces[0], usage)
                elif pieces:
                    yield b"".join([chunks.chunk(piece, usage) for piece in pieces])
    yield chunks.end(makers[0].counted(merged.usage))


def _about(call: Call, body: CompletionRequest) -> AboutCompletion:
    return AboutCompletion(
        id=f"cmpl-{call.request_id}", created=call.created_seconds, model=body.model
    )


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions",
    completions,
    OPENAI_ERRORS,
    kind=CompletionRequest,
    answer=Completion,
    summary="Continue prompts",
)
