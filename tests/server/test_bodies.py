"""Harmful bodies, before anything reads what they ask for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from aioserve.engine.chat_stream import MAX_MESSAGES
from aioserve.server.bodies import MAX_FIELD_CHARS, MAX_FIELDS, parse
from aioserve.server.chat_parts.sampling import MAX_ENTRIES, check_messages
from aioserve.server.chat_parts.unknown_fields import MAX_UNKNOWN, UnknownFields
from aioserve.server.errors import ApiError
from aioserve.server.openai.completions_request import CompletionRequest
from aioserve.text.conversation import conversation_of

MANY_LISTS = b'{"model": "m", "prompt": [' + b"[]," * 20_000 + b"[]]}"


@pytest.mark.parametrize(("length", "told"), [(200, 200), (201, 200), (1_000_000, 200)])
def test_an_error_tells_so_much_of_the_name_of_a_field(length: int, told: int) -> None:
    body = msgspec.json.encode({"model": "m", "prompt": "a", "x" * length: 1})
    with pytest.raises(ApiError) as caught:
        parse(body, CompletionRequest)
    assert caught.value.param == "x" * told == "x" * MAX_FIELD_CHARS
    assert len(caught.value.message) < 300


@contextmanager
def collections() -> Iterator[list[Any]]:
    found: list[Any] = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append((phase, info))

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_no_body_has_the_whole_process_searched_for_garbage_again_and_again() -> None:
    assert gc.isenabled()
    with collections() as found:
        parse(MANY_LISTS, CompletionRequest)
    assert len(found) <= 4  # begin and end of one or two collections
    assert gc.isenabled()


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff", b'{"model": 1}'])
def test_garbage_is_collected_again_whatever_became_of_a_body(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(body, CompletionRequest)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ApiError):
            parse(body, CompletionRequest)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "a", "model": "n"}',
        b'{"model": "m", "prompt": "a", "\\u006dodel": "m"}',
        b'{"prompt": "a", "x": null, "model": "m", "model": "m"}',
        b'{"model": "m", "prompt": "a"' + b', "model": "m"' * 100_000 + b"}",
    ],
)
def test_a_field_is_given_once(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert caught.value.message == "model is given several times"


def test_a_body_has_so_many_fields_at_most_null_or_not() -> None:
    def with_fields(count: int, value: object) -> bytes:
        more = {f"a{number}": value for number in range(count - 2)}
        return msgspec.json.encode({"model": "m", "prompt": "a", **more})

    assert parse(with_fields(MAX_FIELDS, None), CompletionRequest).prompt == "a"
    for value in (None, 1):
        with pytest.raises(ApiError) as caught:
            parse(with_fields(MAX_FIELDS + 1, value), CompletionRequest)
        assert caught.value.code == "limit_exceeded"
        assert caught.value.message == f"the body must have at most {MAX_FIELDS} fields, got more"


@pytest.mark.parametrize("value", [None, 1])
def test_so_many_unknown_fields_of_messages_are_dropped(value: object) -> None:
    unknown = UnknownFields()
    for number in range(MAX_UNKNOWN):
        unknown.drop("message", f"a{number}", value)
    with pytest.raises(ApiError, match=f"at most {MAX_UNKNOWN} unknown fields"):
        unknown.drop("message", "one more", value)


MANY = [{"type": "text", "text": "a"}] * (MAX_ENTRIES + 1)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": MANY}],
        [{"role": "user", "content": MANY[:-1]}, {"role": "assistant", "tool_calls": MANY[:1]}],
        [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1),
    ],
)
def test_what_is_too_much_is_counted_before_it_is_converted(messages: list[object]) -> None:
    with pytest.raises(ApiError, match="messages must have at most") as caught:
        check_messages(messages)
    assert caught.value.code == "limit_exceeded"


def test_no_part_or_call_that_the_engine_takes_is_one_too_many() -> None:
    for messages in (
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ):
        conversation = conversation_of(messages).validated()
        assert conversation.num_values >= 3
    check_messages([{"role": "user", "content": MANY[:-1]}])
