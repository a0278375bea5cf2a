"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from aioserve.engine.chat import ChatStream
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.plan import AnswerPlan, check_tools, planned
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.openai.chat_api.choices import ChatChoice, ChatChoices
from aioserve.server.openai.chat_api.messages import messages_of
from aioserve.server.openai.chat_api.request import ChatRequest
from aioserve.server.openai.chunks import Chunks
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import answer_options_of
from aioserve.server.openai.names import as_named
from aioserve.server.openai.usage import UsageBody, usage_of

__all__ = ["CHAT", "ChatCompletion", "ChatRequest"]


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class AboutChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk says."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str


async def chat(call: Call, body: ChatRequest) -> ChatCompletion | Events:
    body.check(call)
    with as_named(body.names):
        plan = planned(
            call.settings,
            tools=body.tools or (),
            choice=body.tool_choice or "auto",
            one_call=body.parallel_tool_calls is False,
            form=body.response_format,
            structured_outputs=body.structured_outputs,
        )
        check_tools(call.engine, plan)
        stream = _submitted(call, body, plan)
        try:
            if not body.stream:
                return await _whole(call, body, plan, stream)
            await stream.started()
        except BaseException:
            stream.close()
            raise
    return Events(_events(call, body, plan, stream), stream)


def _submitted(call: Call, body: ChatRequest, plan: AnswerPlan) -> ChatStream:
    params = body.params(
        call.engine.default_params,
        max_tokens=body.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_output=plan.form,
    )
    stream = call.engine.chat(
        messages_of(body.messages, call),
        params,
        **plan.options,
        chat_template_kwargs=body.variables(call.engine),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        **answer_options_of(call, body, metadata=body.metadata),
    )
    call.call_log.answers_with(stream)
    return stream


async def _whole(
    call: Call, body: ChatRequest, plan: AnswerPlan, stream: ChatStream
) -> ChatCompletion:
    done = await stream.completion()
    return ChatCompletion(
        id=_id(call),
        created=call.created_seconds,
        model=body.model,
        choices=await ChatChoices(call.engine, body, plan).whole(done.answers, stream),
        usage=usage_of(done.usage),
    )


async def _events(
    call: Call, body: ChatRequest, plan: AnswerPlan, stream: ChatStream
) -> AsyncGenerator[bytes, None]:
    about = AboutChunk(id=_id(call), created=call.created_seconds, model=body.model)
    chunks = Chunks(about, body.stream_options)
    choices = ChatChoices(call.engine, body, plan)
    pieces = choices.first()
    interval, goes_on = call.settings.stream_interval, True
    while goes_on:
        deltas = await stream.batch(interval)
        goes_on = bool(deltas)
        pieces += choices.pieces(deltas, stream)
        usage = stream.usage if chunks.counts_always else None
        if len(pieces) == 1:
            yield chunks.chunk(pieces[0], usage)
        elif pieces:
            yield b"".join([chunks.chunk(piece, usage) for piece in pieces])
        pieces.clear()
    yield chunks.end(stream.usage)


def _id(call: Call) -> str:
    return f"chatcmpl-{call.request_id}"


CHAT: Endpoint[ChatRequest] = Endpoint(
    "/v1/chat/completions",
    chat,
    OPENAI_ERRORS,
    kind=ChatRequest,
    answer=ChatCompletion,
    summary="Answer a conversation",
)
