"""Long answers are made in parts, which together equal one encoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.server.endpoint import WHOLE_BYTES
from aioserve.server.json_parts import (
    PART_BYTES,
    LongJson,
    gathered,
    inner_json,
    long_ids,
    parts_of,
    sliced,
)
from aioserve.server.openai import completions
from aioserve.server.pace import Pace
from aioserve.testing.fake_model import FakeModel
from tests.waits import until

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | st.just("\0"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


class Said(msgspec.Struct, omit_defaults=True):
    text: Any
    rest: Any = None


def long_of(value: Any, made: list[Any]) -> Any:
    """`value`, with each list replaced by one that is made in parts. `made` collects the parts."""
    if isinstance(value, dict):
        return {name: long_of(one, made) for name, one in value.items()}
    if not isinstance(value, list):
        return value

    async def entries() -> AsyncGenerator[object, None]:
        for one in value:
            made.append(one)
            yield long_of(one, made)

    return LongJson.of_list(entries)


async def written(value: object) -> bytes:
    return b"".join([part async for part in parts_of(value)])


@given(plain, plain)
@pytest.mark.asyncio
async def test_parts_are_what_one_encoding_is(first: Any, second: Any) -> None:
    whole = msgspec.json.encode(Said(first, second))
    made: list[Any] = []
    long = Said(long_of(first, made), long_of(second, made))
    assert await written(long) == whole
    assert await written(long) == whole  # a second time


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
@pytest.mark.asyncio
async def test_a_list_may_be_put_together_of_pieces(pieces: list[list[int]]) -> None:
    filled = [piece for piece in pieces if piece]
    long = LongJson.of_inner([inner_json(piece) for piece in filled])
    assert msgspec.json.decode(await written([long])) == [[one for each in pieces for one in each]]
    assert msgspec.json.decode(await written(await long_ids([1, 2, 3] * 9000, Pace()))) == (
        [1, 2, 3] * 9000
    )


@pytest.mark.asyncio
async def test_what_is_no_json_is_refused_before_the_first_part() -> None:
    made: list[Any] = []
    with pytest.raises(NotImplementedError, match="object can't be written"):
        await anext(parts_of([long_of([1], made), object()]))
    assert not made


@given(st.lists(st.integers(0, 3 * PART_BYTES), max_size=8), st.integers(1, 5 * PART_BYTES))
@pytest.mark.asyncio
async def test_gathered_parts_are_as_long_as_they_may_be(lengths: list[int], first: int) -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        for number, length in enumerate(lengths):
            yield b"%d" % number * length

    given_ = b"".join([part async for part in parts()])
    found = [part async for part in gathered(parts(), Pace(), first)]
    assert b"".join(found) == given_
    most = max(lengths, default=0)
    for part, least in zip(found, [first] + [PART_BYTES] * len(found), strict=False):
        assert len(part) < least + most
        assert len(part) >= least or part is found[-1]
    assert b"".join([part async for part in sliced(given_, Pace())]) == given_
    assert all([len(part) <= PART_BYTES async for part in sliced(given_, Pace())])


# -- over HTTP

HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
BODY = {
    "model": "fake",
    "prompt": [7] * 500,
    "n": 16,
    "echo": False,
    "prompt_logprobs": 20,
    "max_tokens": 1,
    "seed": 1,
}


class Sent:
    """One request to an app. Its reader takes a limited number of messages."""

    def __init__(
        self, app: Any, body: dict[str, Any], *, version: str = "1.1", takes: int = 1_000_000
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._app, self._body, self._version, self._takes = app, body, version, takes

    async def __call__(self) -> bytes:
        path = "/v1/completions"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": self._version,
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": HEADERS,
        }
        waits: list[Any] = [
            {"type": "http.request", "body": msgspec.json.encode(self._body), "more_body": False}
        ]

        async def receive() -> Any:
            if not waits:
                await asyncio.Event().wait()
            return waits.pop()

        async def send(message: Any) -> None:
            self.messages.append(message)
            if len(self.messages) == self._takes:
                await asyncio.Event().wait()

        await self._app(scope, receive, send)
        return b"".join([message.get("body", b"") for message in self.messages])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


@pytest.mark.asyncio
async def test_a_long_answer_is_sent_in_parts_and_says_the_same() -> None:
    async with Engine(FakeModel(num_pages=256, max_model_len=1024)) as engine:
        app = create_app(engine, ServerSettings(served_model_names=["fake"]))
        long = Sent(app, BODY)
        whole = await long()
        assert long.messages[0]["status"] == 200, whole
        lengths = [len(message["body"]) for message in long.messages[1:]]
        assert len(whole) > 2 * WHOLE_BYTES
        assert b"content-length" not in long.headers
        assert max(lengths[1:]) < 8 * PART_BYTES
        assert len(lengths) > len(whole) // (8 * PART_BYTES)
        old = Sent(app, BODY, version="1.0")
        assert msgspec.json.decode(await old())["choices"] == msgspec.json.decode(whole)["choices"]
        assert old.headers[b"content-length"] == b"%d" % len(old.messages[1]["body"])
        short = Sent(app, BODY | {"prompt_logprobs": None})
        assert short.headers[b"content-length"] if await short() else None


@pytest.mark.asyncio
async def test_what_a_client_does_not_read_is_not_made() -> None:
    """Only the first few of sixteen choices are made. The call counts for all of them until the
    client has gone."""
    made: list[int] = []
    choice = completions.PromptChoices._whole

    async def noted(self: Any, number: int, *arguments: Any) -> Any:
        made.append(number)
        return await choice(self, number, *arguments)

    async with Engine(FakeModel(num_pages=256, max_model_len=1024)) as engine:
        app = create_app(engine, ServerSettings(served_model_names=["fake"]))
        unsent = app.state.app_state.unsent
        with mock.patch.object(completions.PromptChoices, "_whole", noted):
            slow = Sent(app, BODY, takes=2)
            call = asyncio.create_task(slow())
            await until(lambda: len(slow.messages) == 2)
            for _ in range(100):
                await asyncio.sleep(0)
            assert made == [0, 1]  # sent at once: WHOLE_BYTES and a little more
            assert unsent.num_bytes > 16 * 500 * 21 * 60
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert unsent.num_bytes == 0
