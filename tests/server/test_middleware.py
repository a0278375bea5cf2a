"""Calls that end in any way: their counts are consistent, and each ends once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from aioserve.server.app_state import Calls
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError
from aioserve.server.middleware import CallMiddleware, Listener
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.request_checks import Arrival

Way = Literal["answers", "raises", "raises_midway", "refused", "cancelled", "left_midway"]
WAYS: tuple[Way, ...] = (
    "answers",
    "raises",
    "raises_midway",
    "refused",
    "cancelled",
    "left_midway",
)
OUTCOMES = {
    "answers": (200, True),
    "raises": (500, True),
    "raises_midway": (200, False),
    "refused": (403, True),
    "cancelled": (None, False),
    "left_midway": (200, False),
}
"""Status, and true if all of the answer was sent."""


class Ears(Listener):
    """Listener that fails now and then."""

    def __init__(self, *, broken: bool) -> None:
        self.began_ids: list[str] = []
        self.ended_records: list[CallLog] = []
        self._broken = broken

    def began(self, arrival: Arrival) -> None:
        self.began_ids.append(arrival.call_log.call_id)
        if self._broken:
            raise RuntimeError("a broken listener")

    def ended(self, call_log: CallLog) -> None:
        self.ended_records.append(call_log)
        if self._broken:
            raise RuntimeError("a broken listener")


class Refuses:
    def check(self, arrival: Arrival) -> None:
        if arrival.path == "/refused":
            raise ApiError(403, "not here")


@dataclass
class Client:
    way: Way
    method: str
    sent: list[Any] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_in(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


async def app(scope: Any, receive: Any, send: Any) -> None:
    client: Client = scope["client"]
    await client.go_on.wait()
    if client.way == "raises":
        raise RuntimeError("a bug")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    if client.way == "raises_midway":
        raise RuntimeError("a bug in the middle")
    if client.way == "left_midway":
        raise asyncio.CancelledError
    await send({"type": "http.response.body", "body": b"b"})


async def ask(middleware: CallMiddleware, client: Client) -> None:
    async def send(message: Any) -> None:
        client.sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    path = "/refused" if client.way == "refused" else "/any"
    scope = {"type": "http", "method": client.method, "path": path, "headers": []}
    scope |= {"query_string": b"", "client": client}
    await middleware(scope, receive, send)


calls = st.tuples(st.sampled_from(WAYS), st.sampled_from(["POST", "GET"]))


@given(st.lists(st.one_of(calls, st.integers(0, 20)), max_size=25), st.integers(1, 4))
def test_calls_that_end_in_any_way_and_order_leave_nothing_in_progress(
    moves: list[tuple[Way, str] | int], limit: int
) -> None:
    async def run() -> None:
        ears = [Ears(broken=True), Ears(broken=False)]
        calls = Calls()
        middleware = CallMiddleware(
            app,
            checks=[Refuses()],
            listeners=ears,
            shape_of=lambda path: OPENAI_ERRORS,
            routes={},
            calls=calls,
            max_calls=limit,
        )
        inside: list[Client] = []
        expected: list[tuple[int | None, bool]] = []
        for move in moves:
            if isinstance(move, int):
                if inside:
                    expected.append(await end(inside.pop(move % len(inside))))
                continue
            client = Client(*move)
            posts = sum(other.method == "POST" for other in inside)
            client.task = asyncio.create_task(ask(middleware, client))
            for _ in range(3):
                await asyncio.sleep(0)
            if client.way == "refused":
                expected.append(OUTCOMES["refused"])
            elif client.method == "POST" and posts == limit:
                assert client.status == 503
                expected.append((503, True))
            else:
                assert client.is_in
                inside.append(client)
            assert calls.num_requests == len(inside)
            assert calls.num_posted == sum(other.method == "POST" for other in inside)
        while inside:
            expected.append(await end(inside.pop()))
        for each in ears:
            ended = [record.call_id for record in each.ended_records]
            assert sorted(ended) == sorted(each.began_ids)
            assert len(set(ended)) == len(ended)
        told = [(record.status, record.is_whole) for record in ears[0].ended_records]
        assert told == expected
        assert calls.num_requests == calls.num_posted == calls.num_running == 0
        await calls.wait_none()

    asyncio.run(run())


async def end(client: Client) -> tuple[int | None, bool]:
    assert client.task is not None
    if client.way == "cancelled":
        client.task.cancel()
    client.go_on.set()
    with contextlib.suppress(RuntimeError, asyncio.CancelledError):
        await client.task
    return OUTCOMES[client.way]
