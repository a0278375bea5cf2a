"""`/v1/responses`: answers in items, which can be stored, continued, read again and deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from aioserve.errors import QueueFullError
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import (
    Answering,
    ChatInput,
    Event,
    Piece,
    Writer,
    answered,
    first_of,
)
from aioserve.server.endpoint import endpoint, named_event
from aioserve.server.errors import ApiError, api_error_of, called
from aioserve.server.json_parts import LongJson
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.logprobs import GatheredLogprobs, TokenTexts
from aioserve.server.openai.responses_api.items import Item, new_id
from aioserve.server.openai.responses_api.response import (
    IncompleteDetails,
    InputTokensDetails,
    ItemWriter,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from aioserve.server.openai.responses_api.response_request import (
    FunctionTool,
    PlainFormat,
    ReasoningConfig,
    ResponseRequest,
    TextConfig,
    chat_input_of,
    context_of,
    missing,
    stored_of,
)
from aioserve.server.openai.responses_api.store import Stored

__all__ = [
    "DeletedResponse",
    "ItemList",
    "cancel_response",
    "delete_response",
    "input_items",
    "response",
    "responses",
]

logger: logging.Logger = logging.getLogger(__name__)

COPIES = 4
"""Number of times that the last events of a stream repeat the content: as a text, a part, an item
and a response."""
MAX_LISTED = 100
"""Most items of one list."""


class ResponsePath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    response_id: str


class ListPath(ResponsePath, frozen=True, kw_only=True):
    after: str | None = None
    """Id of the item after which the list begins."""
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


@endpoint(OPENAI_ERRORS, "/v1/responses/{response_id}", "A stored response", answer=Response)
async def response(call: Call, path: ResponsePath) -> object:
    return LongJson.of_json(stored_of(call, path.response_id).body)


@endpoint(OPENAI_ERRORS, "/v1/responses/{response_id}", "Forget a stored response", method="DELETE")
async def delete_response(call: Call, path: ResponsePath) -> DeletedResponse:
    if not call.app_state.responses.delete(call.tenant, path.response_id):
        raise missing(path.response_id)
    return DeletedResponse(id=path.response_id)


@endpoint(
    OPENAI_ERRORS,
    "/v1/responses/{response_id}/cancel",
    "End a response in the background",
    method="POST",
    answer=Response,
    has_body=False,
)
async def cancel_response(call: Call, path: ResponsePath) -> object:
    """Refuse a cancellation: no response is in the background."""
    stored_of(call, path.response_id)
    raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id")


@endpoint(
    OPENAI_ERRORS, "/v1/responses/{response_id}/input_items", "What a stored response answered"
)
async def input_items(call: Call, path: ListPath) -> ItemList:
    """List the items that came with the request, by default the last first."""
    if not 1 <= path.limit <= MAX_LISTED:
        raise ApiError(400, f"limit must be in [1, {MAX_LISTED}], got {path.limit}", param="limit")
    stored = stored_of(call, path.response_id)
    items = msgspec.json.decode(stored.before, type=list[Item])[-stored.num_given :]
    if path.order == "desc":
        items.reverse()
    if path.after is not None:
        places = [index for index, item in enumerate(items) if item.id == path.after]
        if not places:
            raise ApiError(400, f"after: no item has the id {path.after!r:.300}", param="after")
        items = items[places[0] + 1 :]
    data = items[: path.limit]
    return ItemList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(items) > len(data),
    )


class ResponseWriter(Writer[list[Piece]]):
    """Writer of one response."""

    def __init__(
        self,
        call: Call,
        response: Response,
        answering: Answering,
        context: tuple[list[Item], list[Item]],
        *,
        tells_logprobs: bool,
    ) -> None:
        super().__init__(answering.batches)
        self._call = call
        self._response = response
        self._answering = answering
        self._context = context
        logprobs = None
        if tells_logprobs:
            logprobs = GatheredLogprobs(TokenTexts(call.facts), response.top_logprobs)
        self._items = ItemWriter(logprobs)
        self._num_events = 0

    async def whole(self) -> Response:
        await self._items.write_all(self._answering)
        return self._finished()[1]

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._encoded([{"type": kind, "response": self._response} for kind in kinds])

    async def written(self, batch: list[Piece]) -> AsyncGenerator[bytes, None]:
        await self._call.pace.before(len(batch) * (1 + self._response.top_logprobs))
        yield self._encoded([event for piece in batch for event in self._items.write(piece)])

    def end(self) -> bytes:
        events, response = self._finished()
        return self._last(events, response)

    def failed(self, error: Exception) -> bytes:
        return self._last([], self._failed(error))

    def _last(self, events: list[Event], response: Response) -> bytes:
        """Encode the last events, of which the final one has the status of the response."""
        event = {"type": f"response.{response.status}", "response": response}
        return self._encoded([*events, event])

    def _encoded(self, events: list[Event]) -> bytes:
        """Encode events, each with its number."""
        encoded: list[bytes] = []
        for event in events:
            data = {**event, "sequence_number": self._num_events}
            encoded.append(named_event(event["type"], data))
            self._num_events += 1
        return b"".join(encoded)

    def _finished(self) -> tuple[list[Event], Response]:
        is_cut_off = self._answering.is_cut_off
        status = "incomplete" if is_cut_off else "completed"
        stopped = self._answering.stop_string is not None and self._items.is_within_call
        events = self._items.finish("incomplete" if stopped else status)
        response = msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=None if is_cut_off else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut_off else None,
            output=self._items.parts,
            usage=self._usage(),
        )
        return events, self._stored(response)

    def _failed(self, error: Exception) -> Response:
        refused, record = api_error_of(error), self._call.call_log
        record.error = called(error)
        if refused.is_fault:
            logger.error("call %s failed", record.request_id, exc_info=error)
        code = "server_error" if refused.status >= 500 else "invalid_prompt"
        response = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError(
                "rate_limit_exceeded" if refused.status == 429 else code, refused.message
            ),
            output=self._items.parts,
            usage=self._usage(),
        )
        return self._stored(response)

    def _usage(self) -> ResponseUsage:
        stream = self._answering.stream
        usage = stream.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(stream.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _stored(self, response: Response) -> Response:
        """Store the response if its `store` is true, and return it. If it is too large, its `store`
        becomes false."""
        if not response.store:
            return response
        before, given = self._context
        ids = tuple({item.id: None for item in (*given, *response.output) if item.id is not None})
        before = msgspec.json.encode([*before, *given])
        stored = Stored(msgspec.json.encode(response), before, len(given), ids)
        if self._call.app_state.responses.put(self._call.tenant, response.id, stored):
            return response
        return msgspec.structs.replace(response, store=False)


@endpoint(
    OPENAI_ERRORS,
    "/v1/responses",
    "Answer a conversation in items",
    method="POST",
    answer=Response,
    streams="if asked",
)
async def responses(call: Call, body: ResponseRequest) -> object:
    body.check(call)
    before, given = await context_of(call, body)
    asked = await chat_input_of(call, body, before, given)
    answering, strict = await _begun(call, body, asked)
    response = Response(
        id=new_id("resp"),
        created_at=call.created_seconds,
        frequency_penalty=asked.params.frequency_penalty,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=call.app_state.served_name(body.model),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=asked.params.presence_penalty,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        store=body.store is not False and call.app_state.responses.fits(0),
        reasoning=body.reasoning or ReasoningConfig(),
        temperature=asked.params.temperature,
        text=TextConfig(
            format=(body.text and body.text.format) or PlainFormat(), verbosity="medium"
        ),
        tool_choice=body.tool_choice or "auto",
        tools=[_shown_tool(tool, strict) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=asked.params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    writer = ResponseWriter(
        call, response, answering, (before, given), tells_logprobs=body.tells_logprobs
    )
    return await answered(call, answering, writer, stream=body.stream)


async def _begun(call: Call, body: ResponseRequest, asked: ChatInput) -> tuple[Answering, bool]:
    """Return the answer, and the value of `strict` for tools without one. It is true if the engine
    can hold all tools to their schemas."""
    try:
        return await _started(call, asked), True
    except (ApiError, QueueFullError) as error:
        stated = tuple([tool.name for tool in body.tools or () if tool.strict])
        if not _is_about_strictness(error) or len(stated) >= len(asked.plan.strict):
            raise
    plan = msgspec.structs.replace(asked.plan, strict=stated)
    return await _started(call, msgspec.structs.replace(asked, plan=plan)), False


async def _started(call: Call, asked: ChatInput) -> Answering:
    # The end of a stream repeats all of it, so it is kept until then.
    copies = COPIES if call.call_log.stream else 1
    answering = await Answering.begun(call, asked, stream=False, copies=copies)
    await first_of(call, answering, answering.started())
    return answering


def _is_about_strictness(error: ApiError | QueueFullError) -> bool:
    """Return true if the tools can't be strict, or can't be now, as no thread compiles their
    form."""
    if isinstance(error, QueueFullError):
        return error.unit == "grammars"
    return error.status == 400 and error.param == "tools"


def _shown_tool(tool: FunctionTool, strict: bool) -> FunctionTool:
    """Return the tool with its effective `strict`."""
    return tool if tool.strict is not None else msgspec.structs.replace(tool, strict=strict)
