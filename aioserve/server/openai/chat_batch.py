"""`/v1/chat/completions/batch`: the next message of each of several conversations, as in vLLM.

All other fields are about each of them. There is one choice for each conversation, in order. An
error of one conversation ends them all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from aioserve.engine.chat_answers import ChatAnswer
from aioserve.server.app_state import Call
from aioserve.server.call_log import sum_of
from aioserve.server.chat_parts.answering import Answering
from aioserve.server.chat_parts.sampling import check_at_most, units_of
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import ApiError, refuse
from aioserve.server.json_parts import LongJson
from aioserve.server.openai.chat_completions import ChatChoice, ChatCompletion, ChatWriter, about_of
from aioserve.server.openai.chat_request import ChatFields, ChatRequest, chat_input_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import refuse_unsupported, usage_of
from aioserve.server.openai.multi_request import all_of

__all__ = ["BatchChatRequest", "chat_batch"]

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "tools": ([],),
}
"""Values, besides None, by which a field asks for nothing that a batch doesn't have."""


class BatchChatRequest(ChatFields, frozen=True, kw_only=True):
    messages: list[list[dict[str, Any]]]
    """Conversations, each a list of messages."""

    def check(self, call: Call) -> None:
        super().check(call)
        refuse_unsupported(self, _HARMLESS, " of batches")
        most = call.settings.max_prompts
        check_at_most("messages", "have at most {} conversations", len(self.messages), most)
        if not self.messages:
            raise refuse("messages", "must not be empty")

    def one(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """Request for the next message of one conversation."""
        fields = {name: getattr(self, name) for name in ChatFields.__struct_fields__}
        return ChatRequest(messages=messages, **fields)


@contextmanager
def _within(index: int) -> Iterator[None]:
    """Raise errors about the messages of a conversation with its place in the body."""
    try:
        yield
    except ApiError as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        place = f"messages[{index}]"
        raise ApiError(
            error.status,
            error.message.replace("messages", place, 1),
            param=error.param.replace("messages", place, 1),
            code=error.code,
        ) from error


@endpoint(
    OPENAI_ERRORS, "/v1/chat/completions/batch", "Answer several conversations", method="POST"
)
async def chat_batch(call: Call, body: BatchChatRequest) -> ChatCompletion:
    body.check(call)
    answerings: list[Answering] = []
    writers: list[ChatWriter] = []
    try:
        for index, messages in enumerate(body.messages):
            with _within(index):
                one = body.one(messages)
                await call.pace.before(units_of(messages))
                one.check(call)
                asked = await chat_input_of(call, one)
                begun = Answering.begun(call, asked, stream=False, prompts=len(body.messages))
                answerings.append(await begun)
            writers.append(ChatWriter(call, one, asked.plan, answerings[-1]))
        streams = [one.stream for one in answerings]
        call.call_log.streams = [*streams]

        async def answer(index: int) -> ChatAnswer:
            with _within(index), answerings[index].in_words():
                return (await writers[index].read())[0]

        answers = await all_of([partial(answer, index) for index in range(len(writers))])
        call.kept.made(sum([one.usage.completion_tokens for one in streams]))
    finally:
        for one in answerings:
            one.close()

    async def made() -> AsyncGenerator[ChatChoice, None]:
        for index, (writer, one) in enumerate(zip(writers, answers, strict=True)):
            yield await writer.only_choice(one, index)

    choices: Any = LongJson.of_list(made)
    return ChatCompletion(
        **about_of(call, body),
        choices=choices,
        usage=usage_of(
            sum_of([one.usage for one in streams]), sum([one.reasoning_tokens for one in streams])
        ),
    )
