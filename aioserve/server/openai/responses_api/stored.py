"""`/v1/responses/{response_id}`: responses that were stored, read and forgotten."""

from __future__ import annotations

from typing import Literal

import msgspec

from aioserve.server.app_state import Call
from aioserve.server.endpoint import Endpoint
from aioserve.server.errors import ApiError
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.responses_api.items import Item
from aioserve.server.openai.responses_api.response import Response
from aioserve.server.openai.responses_api.store import Stored

__all__ = ["DELETE_RESPONSE", "GET_RESPONSE", "INPUT_ITEMS", "DeletedResponse", "ItemList"]

MAX_LISTED = 100
"""Items of one list."""


class ResponsePath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    response_id: str


class ListPath(ResponsePath, frozen=True, kw_only=True):
    after: str | None = None
    """The id behind which the list begins."""
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


async def response(call: Call, path: ResponsePath) -> object:
    return msgspec.Raw(_found(call, path.response_id).body)


async def delete_response(call: Call, path: ResponsePath) -> DeletedResponse:
    if not call.app_state.responses.delete(call.tenant, path.response_id):
        raise _missing(path.response_id)
    return DeletedResponse(id=path.response_id)


async def input_items(call: Call, path: ListPath) -> ItemList:
    """Those that came with the request, the last first."""
    if not 1 <= path.limit <= MAX_LISTED:
        raise ApiError(400, f"limit must be in [1, {MAX_LISTED}], got {path.limit}", param="limit")
    stored = _found(call, path.response_id)
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


def _found(call: Call, response_id: str) -> Stored:
    stored = call.app_state.responses.get(call.tenant, response_id)
    if stored is None:
        raise _missing(response_id)
    return stored


def _missing(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id!r:.300}",
        param="response_id",
        code="response_not_found",
    )


GET_RESPONSE: Endpoint[ResponsePath] = Endpoint(
    "/v1/responses/{response_id}",
    response,
    OPENAI_ERRORS,
    kind=ResponsePath,
    bodiless="GET",
    answer=Response,
    summary="A stored response",
)
DELETE_RESPONSE: Endpoint[ResponsePath] = Endpoint(
    "/v1/responses/{response_id}",
    delete_response,
    OPENAI_ERRORS,
    kind=ResponsePath,
    bodiless="DELETE",
    answer=DeletedResponse,
    summary="Forget a stored response",
)
INPUT_ITEMS: Endpoint[ListPath] = Endpoint(
    "/v1/responses/{response_id}/input_items",
    input_items,
    OPENAI_ERRORS,
    kind=ListPath,
    bodiless="GET",
    answer=ItemList,
    summary="What a stored response answered",
)
