"""`/v1/completions`: prompts of text or token ids, continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from aioserve.engine.stream import TokenStream
from aioserve.request import FinishReason, Usage
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.usage import StreamOptions, UsageBody, usage_of
from aioserve.server.sampling import SamplingFields
from aioserve.server.served import Call

__all__ = ["COMPLETIONS", "Completion", "CompletionChoice", "CompletionRequest"]

DONE = b"data: [DONE]\n\n"


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    model: str
    prompt: str | list[int]
    max_tokens: int | None = 16
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


async def completions(call: Call, body: CompletionRequest) -> Completion | Events:
    call.served.check_model(body.model)
    params = body.params(call.engine.default_params, max_tokens=body.max_tokens)
    options = call.options(priority=body.priority)
    about = Completion(
        id=f"cmpl-{call.request_id}",
        created=call.created_seconds,
        model=body.model,
        choices=[],
    )
    if not body.stream:
        whole = await call.engine.generate(body.prompt, params, **options)
        call.told.answers_with(whole)
        choices = [
            CompletionChoice(index=i, text=sample.text, finish_reason=sample.finish_reason)
            for i, sample in enumerate(whole.samples)
        ]
        return msgspec.structs.replace(about, choices=choices, usage=usage_of(whole.usage))
    stream = call.engine.stream(body.prompt, params, **options)
    try:
        await stream.started()
    except BaseException:
        stream.close()
        raise
    return Events(_events(stream, about, body.stream_options or StreamOptions()), stream)


async def _events(
    stream: TokenStream, about: Completion, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    async for token in stream:
        choice = CompletionChoice(index=token.sample, text=token.text)
        yield _event(about, [choice], stream.usage if options.continuous_usage_stats else None)
    for index, reason in enumerate(stream.finish_reasons):
        yield _event(about, [CompletionChoice(index=index, text="", finish_reason=reason)], None)
    if options.include_usage:
        yield _event(about, [], stream.usage)
    yield DONE


def _event(about: Completion, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
    counts = None if usage is None else usage_of(usage)
    chunk = msgspec.structs.replace(about, choices=choices, usage=counts)
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions",
    completions,
    OPENAI_ERRORS,
    kind=CompletionRequest,
    answer=Completion,
    summary="Continue a prompt",
)
