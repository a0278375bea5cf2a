"""The body of a request for a response, and what it asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from aioserve.errors import PromptTooLongError
from aioserve.hints import MAX_TENANT_CHARS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.answering import Asked
from aioserve.server.chat_parts.plan import (
    AnswerPlan,
    fitted,
    json_object,
    json_schema,
    named_tool,
    planned,
    tool,
)
from aioserve.server.chat_parts.sampling import (
    FORM_ARGUMENTS,
    Effort,
    check_at_most,
    check_chars,
    check_metadata,
    variables_of,
)
from aioserve.server.chat_parts.turns import Turns, is_cut_off
from aioserve.server.chat_parts.unknown_fields import UnknownFields
from aioserve.server.errors import ApiError, as_named, refuse
from aioserve.server.openai.fields import NO_OPS, AnswerFields
from aioserve.server.openai.responses_api.items import (
    FunctionCall,
    Item,
    Message,
    Placed,
    add_item,
    item_of,
    kept,
    shortened,
    without_logprobs,
)
from aioserve.server.openai.responses_api.store import Stored

__all__ = [
    "FunctionTool",
    "ResponseFunctionChoice",
    "ResponseRequest",
    "TextConfig",
    "TextFormat",
    "asked_of",
    "context_of",
    "missing",
    "stored_of",
]

MAX_NAME_CHARS = MAX_TENANT_CHARS
"""Length of names in a caller's own records: `user`, `safety_identifier`, `prompt_cache_key`. They
come back, so one that is no tenant has a bound too."""

NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "tenant": "user",
    "strict_tools": "tools",
    "required_tools": "tools",
}

Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
]
"""What there may be more of in answers: log-probabilities. Of all else there is nothing, as there
are neither such tools nor images, and reasoning is told whole, as text that may come back."""


class ReasoningConfig(Strict, frozen=True, kw_only=True):
    effort: Effort | None = None
    """As far as the model's template reads one."""
    summary: Literal["auto"] | None = None
    """Reasoning is told whole: there is no summary of it to choose."""


class FunctionTool(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Where it isn't said: if the schemas of all tools can be kept."""


class ResponseFunctionChoice(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str


class _Format(Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class PlainFormat(_Format, frozen=True, kw_only=True, tag="text"):
    pass


class ObjectFormat(_Format, frozen=True, kw_only=True, tag="json_object"):
    pass


class SchemaFormat(_Format, frozen=True, kw_only=True, tag="json_schema"):
    name: str
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    """The answer keeps to the schema either way."""


TextFormat = PlainFormat | ObjectFormat | SchemaFormat


class TextConfig(Strict, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Others aren't supported; this is the default."""


class ResponseRequest(AnswerFields, frozen=True, kw_only=True):
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_OPS,
        "add_special_tokens": (False,),
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
        "prompt_cache_retention": ("in_memory",),
        "stream_options": (
            {},
            {"include_obfuscation": False},
            {"include_usage": True},
            {"include_usage": True, "include_obfuscation": False},
        ),
        "n": (1,),
    }
    limits: ClassVar[Mapping[str, str]] = {
        **AnswerFields.limits,
        "tools": "max_tools",
        "metadata": "max_metadata",
        "top_logprobs": "max_top_logprobs",
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseFunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    """Comes back with the response, and scheduling policies see it."""
    reasoning: ReasoningConfig | None = None
    include: list[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for this request alone. A response that continues it has its
    own."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Prompts are cached by what they say, with a key or without."""
    background: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    top_logprobs: int | None = None
    """How many of the most likely tokens are told at each place of a message's text."""

    def check(self, call: Call) -> None:
        super().check(call)
        for field in ("user", "safety_identifier", "prompt_cache_key"):
            check_chars(field, getattr(self, field) or "", MAX_NAME_CHARS)
        check_metadata(self.metadata, call.settings)
        if (self.top_logprobs or 0) < 0:
            raise refuse("top_logprobs", f"must be at least 0, got {self.top_logprobs}")
        if self.top_logprobs and not self.tells_logprobs:
            raise refuse("top_logprobs", "goes with include message.output_text.logprobs alone")

    @property
    def tells_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def stored_of(call: Call, response_id: str, previous: str = "") -> Stored:
    """Raises `ApiError`."""
    stored = call.app_state.responses.get(call.tenant, response_id)
    if stored is None:
        raise missing(response_id, previous)
    return stored


def missing(response_id: str, previous: str = "") -> ApiError:
    """`previous` stands before the names of field and error where the response is gone on from."""
    return ApiError(
        404,
        f"there is no response {response_id!r:.300}",
        param=f"{previous}response_id",
        code=f"{previous}response_not_found",
    )


def context_of(call: Call, body: ResponseRequest) -> tuple[list[Item], list[Item]]:
    """The items of earlier responses, and those that come with this request. Raises `ApiError`."""
    before: list[Item] = []
    if body.previous_response_id is not None:
        stored = stored_of(call, body.previous_response_id, "previous_")
        before = msgspec.json.decode(stored.before, type=list[Item])
        earlier = msgspec.json.decode(stored.body, type=_Earlier)
        _check_whole(earlier, body.previous_response_id)
        before += map(without_logprobs, earlier.output)
    num_items = len(before) + (1 if isinstance(body.input, str) else len(body.input))
    must = "have at most {} items, those of earlier responses included"
    check_at_most("input", must, num_items, call.settings.max_items)
    if isinstance(body.input, str):
        return before, [kept(Message(role="user", content=body.input))]
    if not body.input:
        raise ApiError(400, "input must not be empty", param="input")
    unknown = UnknownFields()
    items = [
        kept(item_of(given, f"input[{index}]", unknown)) for index, given in enumerate(body.input)
    ]
    unknown.tell(call.call_log)
    return before, items


class _Earlier(msgspec.Struct):
    """A stored response, as far as another goes on from it."""

    status: str
    output: list[Item]


def _check_whole(earlier: _Earlier, response_id: str) -> None:
    """Raises `ApiError` for a response that nothing can follow."""
    broken = "failed" if earlier.status == "failed" else None
    for item in earlier.output:
        if not isinstance(item, FunctionCall):
            continue
        try:
            msgspec.json.decode(item.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            if not is_cut_off(item.arguments):
                broken = f"has a call of {item.name!r:.300} whose arguments are no JSON object"
    if broken is not None:
        raise ApiError(
            400,
            f"previous_response_id: the response {response_id!r:.300} {broken}, so nothing can "
            "follow it: go on from the one before it",
            param="previous_response_id",
        )


async def asked_of(
    call: Call, body: ResponseRequest, before: Sequence[Item], given: Sequence[Item]
) -> Asked:
    """Raises `ApiError`."""
    plan = plan_of(call, body)
    plan = fitted(call.engine, plan)
    effort = None if body.reasoning is None else body.reasoning.effort
    given_ones = body.chat_template_kwargs
    variables = variables_of(call.engine, effort, "reasoning.effort", given_ones) or None
    is_text = isinstance(body.input, str)
    items: list[Placed] = [
        *[("previous_response_id", item) for item in before],
        *[("input" if is_text else f"input[{index}]", item) for index, item in enumerate(given)],
    ]
    if body.truncation == "auto":
        items = await _truncated(call, body, items, plan, variables)
    turns = _turns_of(call, body, items)
    turns.check_results()
    form = "text.format"
    if plan.function is not None or plan.reads_list:
        form = "tools"
    elif body.asked_form is not None:
        form = body.asked_form.field
    names = NAMES | dict.fromkeys(FORM_ARGUMENTS, form)
    with as_named(names, turns.placed):
        params = body.params(
            call.default_params,
            max_tokens=body.max_output_tokens,
            structured_output=plan.form,
            logprobs=(body.top_logprobs or 0) if body.tells_logprobs else None,
        )
    options = body.options(call, chat_template_kwargs=variables)
    return Asked(turns.messages, params, plan, options, names, turns.placed)


def _turns_of(call: Call, body: ResponseRequest, items: Sequence[Placed]) -> Turns:
    turns = Turns(knows_developer=call.engine.template_reads("developer"))
    if body.instructions is not None:
        turns.system(body.instructions, "instructions")
    for place, item in items:
        add_item(turns, item, place)
    return turns


async def _truncated(
    call: Call,
    body: ResponseRequest,
    items: list[Placed],
    plan: AnswerPlan,
    variables: dict[str, Any] | None,
) -> list[Placed]:
    """All of them where they fit; otherwise as many as leave room for an answer."""
    context = call.engine.limits.max_model_len

    async def num_tokens(some: Sequence[Placed]) -> int:
        turns = _turns_of(call, body, some)
        with as_named(NAMES, turns.placed):
            try:
                ids = await call.engine.encode(
                    turns.messages, tools=plan.tools, chat_template_kwargs=variables
                )
            except PromptTooLongError:
                return context
        return len(ids)

    if await num_tokens(items) < context:
        return items
    room = min(body.max_output_tokens or context, context // 2)

    async def fits(some: Sequence[Placed]) -> bool:
        return await num_tokens(some) <= context - room

    return await shortened(items, fits)


def plan_of(call: Call, body: ResponseRequest) -> AnswerPlan:
    match None if body.text is None else body.text.format:
        case ObjectFormat():
            form = json_object()
        case SchemaFormat() as given:
            form = json_schema(given.schema)
        case _:
            form = None
    choice = body.tool_choice or "auto"
    return planned(
        call.settings,
        tools=[
            tool(each.name, each.description, each.parameters, strict=each.strict is not False)
            for each in body.tools or ()
        ],
        choice=named_tool(choice.name) if isinstance(choice, ResponseFunctionChoice) else choice,
        one_call=body.parallel_tool_calls is False,
        form=form,
        asked_form=body.asked_form,
        names={"response_format": "text.format", "function.": ""},
    )
