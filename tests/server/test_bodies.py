"""Bodies that are made to harm, before anybody looks at what they ask."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from aioserve.server.bodies import MAX_FIELD_CHARS, parse
from aioserve.server.errors import ApiError
from aioserve.server.openai.completions_request import CompletionRequest

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
    assert len(found) <= 4  # of one or two collections, begin and end
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
