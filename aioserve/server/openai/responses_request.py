"""The body of a request for a response, and what it asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from aioserve.request import SamplingParams
from aioserve.server.answering import Asked
from aioserve.server.errors import ApiError
from aioserve.server.openai.responses_items import Item, Message, add_item, item_of, with_id
from aioserve.server.sampling import SamplingFields
from aioserve.server.served import Call
from aioserve.server.turns import Turns
from aioserve.structured_output import StructuredOutput

__all__ = [
    "FunctionChoice",
    "FunctionTool",
    "ResponseRequest",
    "TextConfig",
    "TextFormat",
    "asked_of",
    "checked",
    "context_of",
]

MAX_NAME_CHARS = 256
"""Of what a caller's own records know it by: `user`, `safety_identifier`, `prompt_cache_key`."""

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "structured_output": "text.format",
    "json_schema": "text.format.schema",
}

NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values, beside none, with which these fields ask for nothing that isn't done anyway."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FunctionTool(_Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(_Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str


class _Format(_Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class PlainFormat(_Format, frozen=True, kw_only=True, tag="text"):
    pass


class ObjectFormat(_Format, frozen=True, kw_only=True, tag="json_object"):
    pass


class SchemaFormat(_Format, frozen=True, kw_only=True, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    """The answer keeps to the schema either way."""


TextFormat = PlainFormat | ObjectFormat | SchemaFormat


class TextConfig(_Strict, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Others aren't supported; this is the default."""


class ResponseRequest(SamplingFields, frozen=True, kw_only=True):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Prompts are cached by what they say, with a key or without."""
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    service_tier: Any = None
    stream_options: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    @property
    def form(self) -> StructuredOutput | None:
        """That the answer must have."""
        match None if self.text is None else self.text.format:
            case ObjectFormat():
                return StructuredOutput(json_object=True)
            case SchemaFormat() as given:
                return StructuredOutput(json_schema=given.schema)
            case _:
                return None


def checked(call: Call, body: ResponseRequest) -> None:
    """Raises `ApiError` for what isn't supported, or is too much."""
    call.served.check_model(body.model)
    for field, values in NOTHING.items():
        value = getattr(body, field)
        if isinstance(value, dict):
            value = {name: entry for name, entry in value.items() if entry is not None}
        # 0 == False: what asks for nothing must have the type too.
        if value is not None and not any(type(v) is type(value) and v == value for v in values):
            raise _unsupported(field)
    if body.n not in (None, 1):
        raise _unsupported("n")
    if body.structured_outputs is not None and body.form is not None:
        raise ApiError(
            400, "structured_outputs can't go with text.format", param="structured_outputs"
        )
    for field in ("user", "safety_identifier", "prompt_cache_key"):
        _check_chars(field, getattr(body, field) or "", MAX_NAME_CHARS)
    settings = call.settings
    metadata = body.metadata or {}
    if len(metadata) > settings.max_metadata:
        raise ApiError(
            400,
            f"metadata must have at most {settings.max_metadata} entries, got {len(metadata)}",
            param="metadata",
        )
    for key, value in metadata.items():
        _check_chars("a key of metadata", key, settings.max_metadata_key_chars, "metadata")
        where = f"metadata.{key}"
        _check_chars(where, value, settings.max_metadata_value_chars, where)


def _check_chars(what: str, text: str, most: int, param: str | None = None) -> None:
    if len(text) > most:
        raise ApiError(
            400,
            f"{what} must have at most {most} characters, got {len(text)}",
            param=what if param is None else param,
        )


def _unsupported(field: str) -> ApiError:
    return ApiError(400, f"{field} isn't supported", param=field, code="unsupported_parameter")


def context_of(call: Call, body: ResponseRequest) -> tuple[list[Item], list[Item]]:
    """The items of earlier responses, and those that come with this request. Raises `ApiError`."""
    before: list[Item] = []
    if body.previous_response_id is not None:
        stored = call.served.responses.get(call.tenant, body.previous_response_id)
        if stored is None:
            raise ApiError(
                404,
                f"there is no response {body.previous_response_id!r:.300}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        before = msgspec.json.decode(stored.before, type=list[Item])
        before += msgspec.json.decode(stored.body, type=_Output).output
    most = call.settings.max_items
    num_given = 1 if isinstance(body.input, str) else len(body.input)
    if len(before) + num_given > most:
        raise ApiError(
            400,
            f"input must have at most {most} items, those of earlier responses included, "
            f"got {len(before) + num_given}",
            param="input",
        )
    if isinstance(body.input, str):
        return before, [with_id(Message(role="user", content=body.input))]
    if not body.input:
        raise ApiError(400, "input must not be empty", param="input")
    return before, [
        with_id(item_of(given, f"input[{index}]")) for index, given in enumerate(body.input)
    ]


class _Output(msgspec.Struct):
    output: list[Item]


def asked_of(
    call: Call, body: ResponseRequest, before: Sequence[Item], given: Sequence[Item]
) -> Asked:
    """Raises `ApiError`, and `InvalidSamplingError`."""
    turns = Turns()
    if body.instructions is not None:
        turns.system(body.instructions, "instructions")
    for item in before:
        add_item(turns, item, "previous_response_id")
    for index, item in enumerate(given):
        add_item(turns, item, "input" if isinstance(body.input, str) else f"input[{index}]")
    return Asked(
        turns,
        params_of(call, body),
        tools_of(body),
        one_call=body.parallel_tool_calls is False,
        options=call.options(priority=body.priority),
        names=NAMES,
    )


def params_of(call: Call, body: ResponseRequest) -> SamplingParams:
    more: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    if (form := body.form) is not None:
        more["structured_output"] = form
    return body.params(call.engine.default_params, **more)


def tools_of(body: ResponseRequest) -> list[dict[str, Any]] | None:
    """As the engine takes them."""
    if not body.tools or body.tool_choice == "none":
        return None
    tools: list[dict[str, Any]] = []
    for tool in body.tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.parameters is not None:
            function["parameters"] = tool.parameters
        tools.append({"type": "function", "function": function})
    return tools
