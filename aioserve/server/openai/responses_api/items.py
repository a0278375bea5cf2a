"""Items of the Responses API, in requests and in answers. Answers may come back, whole or by id.

Items and parts of other types are refused by name. Unknown fields of known ones are dropped:
clients send back what they, or another server, added.

With `truncation: "auto"`, a conversation that is too long for the model is shortened.

    system ─ user ─┊ dropped ┊─ user ─┊ dropped ┊─ call ─ result ─ ... the newest item

Items are dropped from the beginning on, until a message of the user begins the rest. Messages of
system and developer at the beginning stay. The user's last message stays too: after it, items are
dropped one by one. A result goes with its call. This module doesn't know how long items are.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from aioserve.server.bodies import converted
from aioserve.server.chat_parts.turns import Turns
from aioserve.server.chat_parts.unknown_fields import KnownFields, UnknownFields
from aioserve.server.errors import refuse
from aioserve.server.openai.logprobs import TokenLogprob

__all__ = [
    "FunctionCall",
    "FunctionCallOutput",
    "InputText",
    "Item",
    "ItemReference",
    "Message",
    "OutputText",
    "Placed",
    "ReasoningItem",
    "ReasoningText",
    "Status",
    "add_item",
    "item_of",
    "kept",
    "new_id",
    "shortened",
    "without_logprobs",
]

Status = Literal["in_progress", "completed", "incomplete"]


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    pass


class InputText(_Part, frozen=True, kw_only=True, tag="input_text"):
    text: str


class OutputText(_Part, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[None] = []
    """Always empty."""
    logprobs: list[TokenLogprob] | None = []


class Refusal(_Part, frozen=True, kw_only=True, tag="refusal"):
    """Text by which a model of another server refused."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class SummaryText(_Part, frozen=True, kw_only=True, tag="summary_text"):
    text: str


class ReasoningText(_Part, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


class Message(_Part, frozen=True, kw_only=True, tag="message"):
    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]


class FunctionCall(_Part, frozen=True, kw_only=True, tag="function_call"):
    id: str | None = None
    status: Status | None = None
    call_id: str
    name: str
    arguments: str
    """JSON of an object."""


class FunctionCallOutput(_Part, frozen=True, kw_only=True, tag="function_call_output"):
    id: str | None = None
    status: Status | None = None
    call_id: str
    output: str | list[InputText]


class ItemReference(_Part, frozen=True, kw_only=True, tag="item_reference"):
    """Reference to a stored item."""

    id: str


class ReasoningItem(_Part, frozen=True, kw_only=True, tag="reasoning"):
    id: str | None = None
    status: Status | None = None
    summary: list[SummaryText] = []
    """Summary of reasoning, read if there is no content."""
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


Item = Message | FunctionCall | FunctionCallOutput | ReasoningItem

_PREFIXES = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    ReasoningItem: "rs",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def kept(item: Item) -> Item:
    """Return the item as it is stored and listed: with an id, and a message with its text in
    parts."""
    more: dict[str, Any] = {"status": item.status or "completed"}
    if item.id is None:
        more["id"] = new_id(_PREFIXES[type(item)])
    if isinstance(item, Message) and isinstance(item.content, str):
        part = OutputText if item.role == "assistant" else InputText
        more["content"] = [part(text=item.content)]
    return msgspec.structs.replace(item, **more)


def without_logprobs(item: Item) -> Item:
    """Return the item as another response continues it, without log-probabilities."""
    if not isinstance(item, Message) or isinstance(item.content, str):
        return item
    content = [
        msgspec.structs.replace(part, logprobs=[]) if isinstance(part, OutputText) else part
        for part in item.content
    ]
    return msgspec.structs.replace(item, content=content)


def item_of(given: dict[str, Any], place: str, unknown: UnknownFields) -> Item | ItemReference:
    """Convert `given`, at `place` in a body, to an item. Fields that aren't known go to `unknown`.
    Messages and references may lack their type. Raises `ApiError`."""
    kind = given.get("type")
    if kind is None and "role" in given:
        given = {**given, "type": "message"}
    elif kind == "item_reference" or (kind is None and "id" in given):
        given = {"type": "item_reference", "id": given.get("id")}
        return converted(given, ItemReference, place)
    elif not isinstance(kind, str) or kind not in _KINDS:
        why = f"must be one of {', '.join(_KINDS)}, got {kind!r:.100}"
        raise refuse(f"{place}.type", why, "unsupported_parameter")
    return converted(_KNOWN.of(given, unknown), Item, place)


_KNOWN = KnownFields(
    Item,
    "message",
    # Citations, log-probabilities and encrypted text of other servers mean nothing to this model.
    unread={OutputText: ("annotations", "logprobs"), ReasoningItem: ("encrypted_content",)},
    places=dict.fromkeys(("content", "output", "summary"), "part"),
)
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def add_item(turns: Turns, item: Item, place: str) -> None:
    """Add `item`, from `place` in a body, to the conversation. Raises `ApiError`."""
    match item:
        case Message(role="system"):
            turns.system(_text_of(item.content), place)
        case Message(role="developer"):
            turns.developer(_text_of(item.content), place)
        case Message(role="user"):
            turns.user(_text_of(item.content), place)
        case Message():
            turns.text(_text_of(item.content), place)
        case FunctionCall():
            turns.call(
                item.call_id,
                item.name,
                item.arguments,
                place,
                arguments_field="arguments",
                needs_result=item.status != "incomplete",
            )
        case FunctionCallOutput():
            turns.result(item.call_id, _text_of(item.output), place)
        case ReasoningItem():
            texts = item.content or item.summary
            if texts:
                turns.reasoning("\n".join([part.text for part in texts]), place)


def _text_of(content: str | list[InputText | OutputText | Refusal] | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.text for part in content])


Placed = tuple[str, Item]
"""Place in a body, and the item there."""


async def shortened(
    items: Sequence[Placed], fits: Callable[[Sequence[Placed]], Awaitable[bool]]
) -> list[Placed]:
    """Return the most of `items` that fit, or the fewest possible if none do. Fewer items must fit
    whenever more do."""
    head = 0
    while head < len(items) and _is_from(items[head], "system", "developer"):
        head += 1
    users = [index for index in range(head, len(items)) if _is_from(items[index], "user")]
    begin = users[-1] + 1 if users else head + 1
    behind = [
        index
        for index in range(begin, len(items))
        if not isinstance(items[index][1], FunctionCallOutput)
    ]
    cuts = [head, *[index for index in users if index > head], *behind]
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(_kept(items, head, users, cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return _kept(items, head, users, cuts[low])


def _kept(items: Sequence[Placed], head: int, users: Sequence[int], cut: int) -> list[Placed]:
    """Return `items` without those before `cut` that may be dropped."""
    kept = list(items[:head])
    if users and users[-1] < cut:
        kept.append(items[users[-1]])
    calls: set[str] = set()
    for place, item in items[cut:]:
        if isinstance(item, FunctionCall):
            calls.add(item.call_id)
        if not isinstance(item, FunctionCallOutput) or item.call_id in calls or cut == head:
            kept.append((place, item))
    return kept


def _is_from(placed: Placed, *roles: str) -> bool:
    return isinstance(placed[1], Message) and placed[1].role in roles
