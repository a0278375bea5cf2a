"""Null fields of bodies equal absent ones: clients send either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from aioserve.server.app import ENDPOINTS
from aioserve.server.openai.responses_api.items import OutputText, ReasoningItem
from tests.server.talking import scripted

BODIES = [each.kind for each in ENDPOINTS if each.reads_body]
PARTS_OF_ANSWERS = {(OutputText, "annotations"), (ReasoningItem, "summary")}
"""Fields that are lists in the API's answers."""
TURNS = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": TURNS, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"prompt": "hi"},
}
OF_EACH_ANSWER = ("id", "created", "created_at", "completed_at", "output")


def structs_of(kind: inspect.Type, seen: set[type]) -> Iterator[inspect.StructType]:
    match kind:
        case inspect.StructType() if kind.cls not in seen:
            seen.add(kind.cls)
            yield kind
            for field in kind.fields:
                yield from structs_of(field.type, seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from structs_of(one, seen)
        case inspect.ListType():
            yield from structs_of(kind.item_type, seen)
        case _:
            pass


@pytest.mark.parametrize("kind", BODIES)
def test_whatever_may_be_left_out_may_be_null(kind: type) -> None:
    for struct in structs_of(inspect.type_info(kind), set()):
        for field in struct.fields:
            if field.required or (struct.cls, field.name) in PARTS_OF_ANSWERS:
                continue
            kinds = field.type.types if isinstance(field.type, inspect.UnionType) else [field.type]
            takes_null = any(isinstance(one, inspect.NoneType | inspect.AnyType) for one in kinds)
            assert takes_null, f"{struct.cls.__name__}.{field.name}"


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ASKED)
async def test_null_says_the_same_as_nothing(path: str) -> None:
    (kind,) = (each.kind for each in ENDPOINTS if each.path == path)
    assert kind is not None
    body = {"model": "scripted", **ASKED[path]}
    nulls = dict.fromkeys(field.encode_name for field in msgspec.structs.fields(kind))
    async with scripted("Rain.") as (_, client):
        plain = await client.post(path, json=body)
        answer = await client.post(path, json=nulls | body)
    assert answer.status_code == plain.status_code == 200, answer.text
    first, second = plain.json(), answer.json()
    for name in (*OF_EACH_ANSWER, "usage"):
        first.pop(name, None)
        second.pop(name, None)
    assert first == second
