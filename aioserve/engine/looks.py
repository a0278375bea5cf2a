"""Requests that look at a prompt and want no answer: how they are queued, and how they end.

They take the way of all requests, and are drawn one token, of which nobody hears: that its logits
are numbers shows that what was computed before it is right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypedDict

from aioserve.arguments import check, name
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.stream import TokenStream
from aioserve.engine.submission_turns import SubmissionTurns
from aioserve.errors import AioserveError, InvalidRequestError

__all__ = ["Look", "LookOptions", "check_options", "ids_of", "looked_at", "placed"]


class Look(Protocol):
    """What is wanted of a prompt, where no answer is."""

    def fields(self, prompt_tokens: int) -> dict[str, Any]:
        """Of the `Request` that it becomes, once its prompt is known to have so many tokens."""
        ...


class LookOptions(TypedDict, total=False):
    """What such calls of an engine take by name, as `Engine.stream` does."""

    request_id: str | None
    cache_salt: str | None
    tenant: str | None
    priority: int
    ttft_target_seconds: float | None
    deadline_seconds: float | None
    metadata: Mapping[str, str] | None
    session_id: str | None


def check_options(call: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError, as for any call, for a name that is none of `LookOptions`."""
    if unknown := options.keys() - LookOptions.__annotations__.keys():
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def ids_of(request_id: Any, count: int | None) -> list[Any]:
    """The id of a request, or ids of `count`: what the caller gives, and the place behind it."""
    if count is None or request_id is None:
        return [request_id] * (count or 1)
    given = check(InvalidRequestError, "request_id", request_id, name)
    return [f"{given}-{index}" for index in range(count)]


@asynccontextmanager
async def looked_at(
    submits: Sequence[Callable[[], Mailbox]],
    turns: SubmissionTurns,
    several: str | None = None,
    *,
    first: int = 0,
) -> AsyncIterator[list[Mailbox]]:
    """Submit requests in their `turns`, wait for the ends of all, and give their mailboxes. Raises
    what ended the first that an error ended, with a note of its place, from `first` on, where
    `several` is the argument that they come from; and then, or when it is cancelled, ends the
    others."""
    mailboxes: list[Mailbox] = []
    streams: list[TokenStream] = []
    try:
        for index, submit in enumerate(submits, first):
            await turns.take()
            with placed(several, index):
                mailboxes.append(submit())
            streams.append(TokenStream(mailboxes[-1]))
        for index, stream in enumerate(streams, first):
            with placed(several, index):
                await stream.started()
        yield mailboxes
    finally:
        for stream in streams:
            stream.close()


@contextmanager
def placed(several: str | None, index: int) -> Iterator[None]:
    """Notes of what is raised inside which of several prompts it is about."""
    try:
        yield
    except AioserveError as error:
        if several is not None:
            error.add_note(f"of {several}[{index}]")
        raise
