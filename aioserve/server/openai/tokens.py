"""`/tokenize` and `/detokenize`, in the shape that vLLM gave them: prompts as token ids, and back.

Prompts are encoded like those of requests, so their limits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from aioserve.server.app_state import Call
from aioserve.server.chat_parts.sampling import (
    check_at_most,
    check_limits,
    template_variables,
    units_of,
)
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import ApiError, as_named, refuse
from aioserve.server.openai.chat_request import Tool, messages_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.logprobs import TokenTexts

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenize", "tokenize"]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body with `prompt`, or with `messages` and what goes with them."""

    limits: ClassVar[Mapping[str, str]] = {"tools": "max_tools"}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Frame a text as the model expects; true by default. Messages are framed by their template."""
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True by default."""
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    """Text of the tokens, with special tokens by name."""


_OF_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


@endpoint(OPENAI_ERRORS, "/tokenize", "The token ids of a prompt", method="POST")
async def tokenize(call: Call, body: TokenizeRequest) -> Tokens:
    texts, engine = _checked(call, body.model), call.engine
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "or messages must be given, and not both")
    given = {name: getattr(body, name) for name in _OF_MESSAGES}
    given = {name: value for name, value in given.items() if value is not None}
    if body.messages is None:
        if given:
            raise refuse(min(given), "goes with messages alone")
        framed = body.add_special_tokens is not False
        prompt: Any = body.prompt
        ids = await engine.encode(prompt, add_special_tokens=framed)
    else:
        if body.add_special_tokens:
            raise refuse("add_special_tokens", "goes with prompt alone")
        check_limits(body, call.settings)
        if body.tools is not None:
            given["tools"] = [tool.as_dict for tool in body.tools]
        if body.chat_template_kwargs is not None:
            given["chat_template_kwargs"] = template_variables(call, body.chat_template_kwargs)
        with as_named({"prompt": "messages"}):
            messages = await messages_of(body.messages, call)
            if not messages:
                raise refuse("messages", "must not be empty")
            await call.pace.before(units_of(messages))
            ids = await engine.encode(messages, **given)
    strs = None
    if body.return_token_strs:
        await call.pace.before(len(ids))
        strs = [texts.written(one)[0] for one in ids]
    return Tokens(
        count=len(ids),
        max_model_len=call.facts.limits.max_model_len,
        tokens=ids,
        token_strs=strs,
    )


@endpoint(OPENAI_ERRORS, "/detokenize", "The text of token ids", method="POST")
async def detokenize(call: Call, body: DetokenizeRequest) -> Detokenized:
    texts, limits = _checked(call, body.model), call.facts.limits
    check_at_most("tokens", "have at most {} ids", len(body.tokens), limits.max_model_len)
    wrong = next((one for one in body.tokens if not 0 <= one < limits.vocab_size), None)
    if wrong is not None:
        raise refuse("tokens", f"must be ids in [0, {limits.vocab_size}), got {wrong}")
    return Detokenized(prompt=texts.joined(body.tokens))


def _checked(call: Call, model: str | None) -> TokenTexts:
    """Return the texts of tokens. Raises `ApiError` for another model, and for one without a
    tokenizer."""
    if model is not None:
        call.app_state.check_model(model)
    if call.facts.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", code="no_tokenizer")
    return TokenTexts(call.facts)
