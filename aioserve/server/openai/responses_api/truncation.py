"""`truncation: "auto"`: what stays of a conversation that is too long for the model.

    system ─ user ─┊ dropped ┊─ user ─┊ dropped ┊─ call ─ result ─ ... the newest item

Items go from the beginning of the conversation on, until a message of the user begins the rest. The
system's and the developer's messages that it begins with stay, and so does the user's last one:
behind it items go one by one. A result goes with its call. Must not know how long items are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aioserve.server.openai.responses_api.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
)

__all__ = ["Placed", "shortened"]

Placed = tuple[str, Item]
"""An item, and where in a body it stands."""


async def shortened(
    items: Sequence[Placed], fits: Callable[[Sequence[Placed]], Awaitable[bool]]
) -> list[Placed]:
    """As many of `items` as fit, which fewer do rather than more; the fewest where none do."""
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
    """`items` without those before `cut` that may go."""
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
