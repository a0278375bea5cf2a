"""Bodies of `/api/chat` and `/api/generate`, and the requests to the engine that they ask for.

Calls of earlier turns have no ids there, and results name at most the function. A result belongs to
the first open call before it. Unknown fields of messages are dropped, as in all APIs.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aioserve.request import SamplingParams
from aioserve.sampling_params import PARAMETERS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict, converted
from aioserve.server.chat_parts.answering import ChatInput
from aioserve.server.chat_parts.plan import (
    AnswerPlan,
    ResponseFormat,
    Tool,
    fitted,
    json_object,
    json_schema,
    planned,
)
from aioserve.server.chat_parts.sampling import (
    FORM_ARGUMENTS,
    check_limits,
    check_messages,
    sampling_params,
    units_of,
    variables_of,
)
from aioserve.server.chat_parts.unknown_fields import KnownFields, UnknownFields
from aioserve.server.errors import as_named, refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import OF_OLLAMA, OF_OLLAMA_OPTIONS, Hints

__all__ = [
    "NAMES",
    "ChatBody",
    "GenerateBody",
    "chat_input_of",
    "check_generated",
    "options_of",
    "plan_of",
    "served_name",
]

LATEST = ":latest"
"""Ending that clients add to names without a tag."""
REPEAT_LAST_N = (-1, 64)
"""Values of `repeat_last_n` that match the engine's penalties."""
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NO_LIMIT = (-1, -2)
"""Values of `num_predict` for an answer without an end, or as long as the context."""


DRAWN = {name: row for name, row in PARAMETERS.items() if row.ollama is not None}
"""Sampling parameters that are among Ollama's options."""
if TYPE_CHECKING:
    Drawn = Strict
else:
    Drawn = msgspec.defstruct(
        "Drawn",
        [(row.ollama, row.body | None, None) for row in DRAWN.values()],
        bases=(Strict,),
        module=__name__,
        frozen=True,
        kw_only=True,
    )


class ModelOptions(Drawn, frozen=True, kw_only=True):
    """Options for drawing an answer. Missing ones have the defaults of the model's makers."""

    hints: ClassVar[Hints] = OF_OLLAMA_OPTIONS
    limits: ClassVar[Mapping[str, str]] = {"stop": "max_stops"}

    num_predict: int | None = None
    num_ctx: int | None = None
    """Has no effect: the context is the model's."""
    repeat_last_n: int | None = None
    """Tokens that penalties count. 0 turns penalties off. -1 and 64, the default, count the whole
    context."""


class _Body(Strict, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_OLLAMA

    model: str
    format: str | dict[str, Any] | None = None
    options: ModelOptions | None = None
    stream: bool | None = None
    """True by default."""
    think: bool | str | None = None
    keep_alive: float | str | None = None
    """Has no effect: the model is there as long as the server is."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: Function


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_name: str | None = None


_MESSAGE = KnownFields(Message, "message", places={"tool_calls": "tool_call"})


class ChatBody(_Body, frozen=True, kw_only=True):
    limits: ClassVar[Mapping[str, str]] = {"tools": "max_tools"}

    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None


class GenerateBody(_Body, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """True if the prompt is used unchanged, without the model's template."""
    suffix: str | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None


NAMES = {
    "prompt": "messages",
    "max_tokens": "options.num_predict",
    **{name: f"options.{row.ollama}" for name, row in DRAWN.items()},
    **dict.fromkeys(FORM_ARGUMENTS, "format"),
}
"""Names that the API has for arguments of the engine."""


def served_name(call: Call, name: str) -> str:
    """Return the name under which a model is served. Raises `ApiError`."""
    if name not in call.app_state.model_names:
        name = name.removesuffix(LATEST)
    call.app_state.check_model(name)
    return name


def options_of(call: Call, body: ChatBody | GenerateBody, plan: AnswerPlan) -> SamplingParams:
    """Sampling parameters of the answer. Raises `ApiError`."""
    given = body.options or ModelOptions()
    check_limits(given, call.settings)
    if (given.num_ctx or 0) > call.facts.limits.max_model_len:
        let_through(call.call_log, "options.num_ctx")
    if given.repeat_last_n not in (None, *REPEAT_LAST_N, 0):
        raise refuse(
            "options.repeat_last_n",
            "must be -1 or 64 for penalties over all of the context, or 0 for no penalties, "
            f"got {given.repeat_last_n}",
            "unsupported_parameter",
        )
    if given.repeat_last_n in REPEAT_LAST_N:
        let_through(call.call_log, "options.repeat_last_n")
    if body.logprobs or body.top_logprobs:
        raise refuse("logprobs", "isn't supported here; it is in /v1", "unsupported_parameter")
    drawn = {name: getattr(given, row.ollama or name) for name, row in DRAWN.items()}
    return sampling_params(
        call.facts.default_params,
        {
            **drawn,
            "seed": None if drawn["seed"] == -1 else drawn["seed"],
            **(NO_PENALTIES if given.repeat_last_n == 0 else {}),
            "max_tokens": None if given.num_predict in NO_LIMIT else given.num_predict,
            "structured_output": plan.form,
        },
    )


def plan_of(call: Call, body: ChatBody | GenerateBody) -> AnswerPlan:
    """Plan of the answer. Raises `ApiError`."""
    with as_named(NAMES):
        plan = planned(
            call.settings,
            tools=(body.tools or ()) if isinstance(body, ChatBody) else (),
            choice="auto",
            one_call=False,
            form=_form(body.format),
            names={"response_format": "format"},
        )
        return fitted(call.facts, plan)


async def chat_input_of(call: Call, body: ChatBody | GenerateBody) -> ChatInput:
    """Return the request to the engine. Raises `ApiError`."""
    with as_named(NAMES):
        plan = plan_of(call, body)
        if isinstance(body, ChatBody):
            check_limits(body, call.settings)
            check_messages(body.messages or ())
            messages = await _messages(call, body.messages or ())
        else:
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt or ""}]
        params = options_of(call, body, plan)
        variables = _thinking(call, body.think)
    return ChatInput(messages, params, plan, call.options(chat_template_kwargs=variables), NAMES)


def check_generated(call: Call, body: GenerateBody) -> bool:
    """Return true if the prompt is used unchanged, without a template.

    That holds for a raw prompt, for a gap to fill in, and for a model without a template. Raises
    `ApiError` for fields that aren't supported, that the model can't use, or that can't go
    together.
    """
    for field in ("images", "template", "context"):
        if getattr(body, field):
            raise refuse(field, "isn't supported", "unsupported_parameter")
    for field in ("raw", "suffix"):
        if getattr(body, field) and (body.system or body.think is not None):
            raise refuse(field, "goes with neither system nor think: the prompt is all there is")
    if call.facts.has_chat_template:
        return bool(body.raw or body.suffix)
    if body.system:
        raise refuse("system", "needs a model with a chat template, and this one has none")
    _thinking(call, body.think)  # refuses what no template reads
    return True


def _form(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if isinstance(given, dict):
        return json_schema(given)
    if given == "json":
        return json_object()
    if given:
        raise refuse("format", f"must be 'json' or a schema, got {given!r:.100}")
    return None


def _thinking(call: Call, think: bool | str | None) -> dict[str, Any] | None:
    """Variables of the template. A switch that it doesn't have is ignored, and an effort that it
    doesn't read is refused."""
    if think is None:
        return None
    if isinstance(think, str):
        return variables_of(call, think, "think")
    if call.facts.reads("enable_thinking"):
        return {"enable_thinking": think}
    let_through(call.call_log, "think")
    return None


async def _messages(call: Call, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    unknown = UnknownFields()
    messages: list[dict[str, Any]] = []
    open_calls: OrderedDict[str, str] = OrderedDict()
    """Names of functions, by the ids of calls that have no result yet."""
    by_name: defaultdict[str | None, deque[str]] = defaultdict(deque)
    num_calls = 0
    for index, each in enumerate(given):
        place = f"messages[{index}]"
        await call.pace.before(2 * units_of([each]))
        message: Message = converted(_MESSAGE.of(each, unknown), Message, place)
        if message.images:
            raise refuse(f"{place}.images", "aren't supported", "unsupported_parameter")
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            plain["tool_calls"] = []
        for one in message.tool_calls or ():
            num_calls += 1
            call_id = f"call{num_calls:05}"  # an id that every template takes
            open_calls[call_id] = one.function.name
            by_name[one.function.name].append(call_id)
            function = {"name": one.function.name, "arguments": one.function.arguments}
            plain["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if message.role == "tool":
            if not open_calls:
                raise refuse(place, "must have a call before it that has no result yet")
            named = by_name[message.tool_name] or by_name[next(iter(open_calls.values()))]
            plain["tool_call_id"] = named.popleft()
            plain["name"] = open_calls.pop(plain["tool_call_id"])
        messages.append(plain)
    unknown.tell(call.call_log)
    return messages
