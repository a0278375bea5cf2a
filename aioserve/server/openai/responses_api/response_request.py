"""Body of a request for a response, and the request to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from anyio.lowlevel import checkpoint

from aioserve.errors import PromptTooLongError
from aioserve.hints import MAX_TENANT_CHARS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.answering import ChatInput
from aioserve.server.chat_parts.plan import (
    AnswerPlan,
    Choice,
    allowed_tools,
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
    num_entries,
    units_of,
    variables_of,
)
from aioserve.server.chat_parts.turns import Turns
from aioserve.server.chat_parts.unknown_fields import UnknownFields
from aioserve.server.errors import ApiError, as_named, refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import (
    OF_REASONING,
    OF_RESPONSE_OPTIONS,
    OF_RESPONSE_TOOLS,
    OF_RESPONSES,
    Hints,
)
from aioserve.server.openai.fields import AnswerFields, refuse_unsupported
from aioserve.server.openai.responses_api.items import (
    Item,
    ItemReference,
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
    "ResponseRequest",
    "TextConfig",
    "TextFormat",
    "ToolChoice",
    "chat_input_of",
    "context_of",
    "missing",
    "stored_of",
]

MAX_NAME_CHARS = MAX_TENANT_CHARS
"""Most characters of names in a caller's own records: `user`, `safety_identifier`,
`prompt_cache_key`. They are returned, so each has a bound."""

NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "tenant": "user",
    "strict_tools": "tools",
    "required_tools": "tools",
}

ITEM_UNITS = 2
"""Units of work to make an item part of the conversation."""

Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
]
"""Values of `include`. Only log-probabilities add to an answer. The server has none of the tools
and images behind the others, and reasoning is always returned whole, as text."""


class ReasoningConfig(Strict, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_REASONING

    effort: Effort | None = None
    """Effort of reasoning, if the model's template reads one."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Summary of reasoning. A model that reasons takes only "auto": its reasoning is returned
    whole."""

    def check(self, call: Call) -> None:
        """Raise `ApiError` for a summary other than "auto", if the model reasons."""
        if self.summary in (None, "auto"):
            return
        if call.facts.reasons:
            why = 'isn\'t supported by a model that reasons; only "auto" is'
            raise refuse("reasoning.summary", why, "unsupported_parameter")
        let_through(call.call_log, "reasoning.summary")


class ResponseStreamOptions(Strict, frozen=True, kw_only=True):
    """Options of a stream, without any effect."""

    hints: ClassVar[Hints] = OF_RESPONSE_OPTIONS


class FunctionTool(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    hints: ClassVar[Hints] = OF_RESPONSE_TOOLS

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True if arguments must follow the schema. By default they must, if the engine can enforce the
    schemas of all tools."""


class ResponseFunctionChoice(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str


class ResponseAllowedTool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class ResponseAllowedTools(
    Strict, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """Choice of some of the tools. The model sees no others."""

    mode: Literal["auto", "required"]
    tools: list[ResponseAllowedTool]


ToolChoice = Literal["auto", "none", "required"] | ResponseFunctionChoice | ResponseAllowedTools


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
    """Has no effect: the answer always follows the schema."""


TextFormat = PlainFormat | ObjectFormat | SchemaFormat


class TextConfig(Strict, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect: no model here reads it."""


class ResponseRequest(AnswerFields, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_RESPONSES
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
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    """Metadata that is returned with the response, and that scheduling policies see."""
    reasoning: ReasoningConfig | None = None
    include: list[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for this request alone. A response that continues it has its
    own."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Has no effect: prompts are cached by their content."""
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = None
    """Number of most likely tokens listed at each place of a message's text."""

    def check(self, call: Call) -> None:
        super().check(call)
        for field in ("user", "safety_identifier", "prompt_cache_key"):
            check_chars(field, getattr(self, field) or "", MAX_NAME_CHARS)
        check_metadata(self.metadata, call.settings)
        refuse_unsupported(self, {"n": (1,)})
        if self.reasoning is not None:
            self.reasoning.check(call)
        if self.text is not None and self.text.verbosity is not None:
            let_through(call.call_log, "text.verbosity")
        if (self.top_logprobs or 0) < 0:
            raise refuse("top_logprobs", f"must be at least 0, got {self.top_logprobs}")
        if self.top_logprobs and not self.tells_logprobs:
            raise refuse("top_logprobs", "goes with include message.output_text.logprobs alone")

    @property
    def tells_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def stored_of(call: Call, response_id: str, previous: str = "") -> Stored:
    """Return a stored response of the caller. Raises `ApiError`."""
    stored = call.app_state.responses.get(call.tenant, response_id)
    if stored is None:
        raise missing(response_id, previous)
    return stored


def missing(response_id: str, previous: str = "") -> ApiError:
    """Return the error of an unknown response. If it was to be continued, `previous` stands before
    the names of field and error."""
    return ApiError(
        404,
        f"there is no response {response_id!r:.300}",
        param=f"{previous}response_id",
        code=f"{previous}response_not_found",
    )


async def context_of(call: Call, body: ResponseRequest) -> tuple[list[Item], list[Item]]:
    """Return the items of earlier responses, and those of this request. Raises `ApiError`."""
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
    return before, await _given_items(call, body.input)


async def _given_items(call: Call, given: Sequence[dict[str, Any]]) -> list[Item]:
    """Return the items of a request, with stored ones in place of references. Raises `ApiError`."""
    unknown = UnknownFields()
    must = "have at most {} parts in its items together"
    check_at_most("input", must, num_entries(given), call.settings.max_items)
    found: dict[str, dict[str, tuple[Item, int]]] = {}
    num_bytes, most = 0, call.settings.max_body_bytes
    items: list[Item] = []
    for index, each in enumerate(given):
        await call.pace.before(3 * units_of([each]))
        place = f"input[{index}]"
        item = item_of(each, place, unknown)
        if isinstance(item, ItemReference):
            item, size = await _referred(call, item.id, place, found)
            num_bytes += size  # a body of short references stands for no more than a whole one
            check_at_most("input", "refer to items of at most {} bytes together", num_bytes, most)
        items.append(kept(item))
    unknown.tell(call.call_log)
    return items


async def _referred(
    call: Call, item_id: str, place: str, found: dict[str, dict[str, tuple[Item, int]]]
) -> tuple[Item, int]:
    """Return the stored item of that id, and its bytes as JSON. Items of responses that were read
    for others are in `found`. Raises `ApiError`."""
    responses = call.app_state.responses
    response_id = responses.with_item(call.tenant, item_id)
    stored = None if response_id is None else responses.get(call.tenant, response_id)
    if response_id is None or stored is None:
        message = f"{place}: no item {item_id!r:.300} is stored: send it whole"
        raise ApiError(404, message, param=place, code="item_not_found")
    if response_id not in found:
        await checkpoint()  # others have a turn, as each response takes time to read
        given = msgspec.json.decode(stored.before, type=list[msgspec.Raw])[-stored.num_given :]
        items = [msgspec.json.decode(one, type=Item) for one in given]
        items += msgspec.json.decode(stored.body, type=_Earlier).output
        found[response_id] = {
            item.id: (bare := without_logprobs(item), len(msgspec.json.encode(bare)))
            for item in items
            if item.id is not None
        }
    return found[response_id][item_id]


class _Earlier(msgspec.Struct):
    """Parts of a stored response that the next one needs."""

    status: str
    output: list[Item]


def _check_whole(earlier: _Earlier, response_id: str) -> None:
    """Raise `ApiError` for a response that has failed: nothing can follow it."""
    if earlier.status == "failed":
        raise ApiError(
            400,
            f"previous_response_id: the response {response_id!r:.300} failed, so nothing can "
            "follow it: go on from the one before it",
            param="previous_response_id",
        )


async def chat_input_of(
    call: Call, body: ResponseRequest, before: Sequence[Item], given: Sequence[Item]
) -> ChatInput:
    """Return the request to the engine. Raises `ApiError`."""
    plan = plan_of(call, body)
    plan = fitted(call.facts, plan)
    effort = None if body.reasoning is None else body.reasoning.effort
    given_ones = body.chat_template_kwargs
    variables = variables_of(call, effort, "reasoning.effort", given_ones) or None
    is_text = isinstance(body.input, str)
    items: list[Placed] = [
        *[("previous_response_id", item) for item in before],
        *[("input" if is_text else f"input[{index}]", item) for index, item in enumerate(given)],
    ]
    if body.truncation == "auto":
        items = await _truncated(call, body, items, plan, variables)
    await call.pace.before(ITEM_UNITS * len(items))
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
    return ChatInput(turns.messages, params, plan, options, names, turns.placed)


def _turns_of(call: Call, body: ResponseRequest, items: Sequence[Placed]) -> Turns:
    turns = Turns(knows_developer=call.facts.reads("developer"))
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
    """Return all items if they fit, or else as many as leave room for an answer."""
    context = call.facts.limits.max_model_len

    async def num_tokens(some: Sequence[Placed]) -> int:
        await call.pace.before(ITEM_UNITS * len(some))
        turns = _turns_of(call, body, some)
        await call.pace.before(units_of(turns.messages))
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
    choice: Choice
    match body.tool_choice:
        case ResponseFunctionChoice(name=name):
            choice = named_tool(name)
        case ResponseAllowedTools(mode=mode, tools=allowed):
            choice = allowed_tools(mode, [one.name for one in allowed])
        case given:
            choice = given or "auto"
    return planned(
        call.settings,
        tools=[
            tool(each.name, each.description, each.parameters, strict=each.strict is not False)
            for each in body.tools or ()
        ],
        choice=choice,
        one_call=body.parallel_tool_calls is False,
        form=form,
        asked_form=body.asked_form,
        names={"response_format": "text.format", "function.": ""},
    )
