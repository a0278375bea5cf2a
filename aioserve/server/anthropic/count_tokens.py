"""`/v1/messages/count_tokens`: how long a conversation would be, without an answer."""

from __future__ import annotations

import msgspec

from aioserve.server.anthropic.errors import ANTHROPIC_ERRORS
from aioserve.server.anthropic.request import (
    NAMES,
    Conversation,
    continues,
    conversation_of,
    plan_of,
    template_variables,
)
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.turns import renamed
from aioserve.server.endpoint import Endpoint

__all__ = ["COUNT_TOKENS", "TokenCount"]


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Cached or not."""


async def count_tokens(call: Call, body: Conversation) -> TokenCount:
    turns = conversation_of(call, body)
    goes_on = continues(turns, body)
    plan = plan_of(call, body)
    variables = template_variables(call, body)
    try:
        ids = await call.engine.encode(
            turns.messages,
            tools=plan.tools,
            chat_template_kwargs=variables,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )
    except Exception as error:
        raise renamed(error, NAMES, turns) from error
    return TokenCount(len(ids))


COUNT_TOKENS: Endpoint[Conversation] = Endpoint(
    "/v1/messages/count_tokens",
    count_tokens,
    ANTHROPIC_ERRORS,
    kind=Conversation,
    answer=TokenCount,
    summary="Count the tokens of a conversation",
)
