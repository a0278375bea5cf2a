"""The requests of an engine: one table, in which each has one state.

    enter ──► ENCODING ──► ASKED ──► QUEUED ──► RUNNING ──────────────► ENDED
                  │          │          │          └────► LEAVING ────────▲
                  └──────────┴──────────┴─────────────────────────────────┘

LEAVING: the reader is gone, but the scheduler doesn't know yet.

The id of a request is free again once its reader is gone or the request has ended. All questions
about an engine's requests, like their number or their ids, are answered here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

from aioserve.engine.compiling import Compiling
from aioserve.engine.constrained import ConstrainedCompletion
from aioserve.engine.encoding import Encoding
from aioserve.engine.mailbox import Mailbox, ReaderEvent
from aioserve.engine.measures import EndedRequests, Waiting
from aioserve.grammars.matcher import Grammar, Matcher
from aioserve.request import Request
from aioserve.text.assembler import TextAssembler

__all__ = ["LiveRequest", "LiveSample", "RequestState", "RequestTable"]

MAX_HANDLED_AT_ONCE = 256
"""Requests that enter or leave before the event loop gets its turn. One takes about 10 µs."""


class RequestState(Enum):
    ENCODING = "encoding"
    """A thread turns the prompt into token ids, or compiles the structured output."""
    ASKED = "asked"
    """Admission plugins are deciding."""
    QUEUED = "queued"
    """Enters the scheduler before the next step is planned."""
    RUNNING = "running"
    """The scheduler has it, waiting or running."""
    LEAVING = "leaving"
    """Its reader is gone. It leaves the scheduler before the next step is planned."""
    ENDED = "ended"


class LiveSample:
    """One completion of a request: a sequence of the scheduler, and its text."""

    __slots__ = (
        "assembler",
        "constrained",
        "index",
        "mailbox",
        "matcher",
        "num_delivered",
        "request",
        "sequence_id",
    )

    def __init__(
        self, request: LiveRequest, index: int, sequence_id: int, assembler: TextAssembler
    ) -> None:
        self.request: LiveRequest = request
        self.mailbox: Mailbox = request.mailbox
        """The request's mailbox, copied here because every token goes there."""
        self.index: int = index
        self.sequence_id: int = sequence_id
        self.assembler: TextAssembler = assembler
        self.num_delivered: int = 0
        self.matcher: Matcher | None = None
        """Grammar state. Only the thread of `GrammarGuides` uses it."""
        self.constrained: ConstrainedCompletion | None = None
        """Guides of the completion, from that thread."""


class LiveRequest:
    """One request on its way through an engine.

    `tell` is called with it and with events of its reader. It holds no stream, so that a dropped
    stream is collected.
    """

    __slots__ = (
        "assemblers",
        "deadline_timer",
        "encoding",
        "grammar",
        "mailbox",
        "request",
        "samples",
        "stall_timer",
        "state",
        "waiting_tokens",
    )

    def __init__(
        self,
        request_id: str,
        tell: Callable[[LiveRequest, ReaderEvent], None],
        *,
        capacity: int,
        num_samples: int,
        ended_requests: EndedRequests | None = None,
    ) -> None:
        loop, tell_of_it = asyncio.get_running_loop(), partial(tell, self)
        self.mailbox: Mailbox = Mailbox(
            request_id, loop, tell_of_it, capacity, num_samples, ended_requests
        )
        self.state: RequestState = RequestState.ENCODING
        self.encoding: Encoding | Compiling | None = None
        """Thread work on the prompt or its structured output, while there is any."""
        self.grammar: Grammar | None = None
        """Grammar of its completions, for structured output or a reasoning budget."""
        self.request: Request | None = None
        """Set once the prompt is encoded."""
        self.assemblers: tuple[TextAssembler, ...] = ()
        """Assembler of each sample, once the prompt is encoded."""
        self.samples: list[LiveSample] = []
        """Samples that go on."""
        self.stall_timer: asyncio.TimerHandle | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.waiting_tokens: int = 0
        """Tokens of its prompt, until its completion begins."""

    @property
    def request_id(self) -> str:
        return self.mailbox.request_id

    def ends_with(self, token_id: int) -> bool:
        """True if this id ends a completion."""
        return self.request is not None and token_id in self.request.end_ids

    def names_stop(self, token_id: int) -> bool:
        """True if `stop_token_ids` of its parameters has this id."""
        return self.request is not None and token_id in self.request.params.stop_token_ids

    def __repr__(self) -> str:
        return f"request {self.request_id!r} ({self.state.value})"


class RequestTable:
    """Every request that hasn't ended. Independent of the event loop.

    The garbage collector may call `leave` at any moment.
    """

    def __init__(self) -> None:
        self.waiting: Waiting = Waiting()
        self.ended_requests: EndedRequests = EndedRequests()
        """Ends of requests. Their mailboxes count them."""
        self._by_id: dict[str, LiveRequest] = {}
        self.queued: deque[LiveRequest] = deque()
        """Requests that will enter the scheduler. Some may have left meanwhile."""
        self.leaving: deque[LiveRequest] = deque()
        """Requests that will leave the scheduler. Some may have ended meanwhile."""
        self._counts = dict.fromkeys(RequestState, 0)
        self.samples: dict[int, LiveSample] = {}
        """Samples that the scheduler computes, by sequence id."""

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate in order of arrival, leaving requests last."""
        yield from list(self._by_id.values())
        yield from [r for r in self.leaving if r.state is RequestState.LEAVING]

    def is_taken(self, request_id: str) -> bool:
        """True if a request with that id is encoding, asked, queued or running."""
        return request_id in self._by_id

    def count(self, *states: RequestState) -> int:
        """Requests in any of `states`."""
        return sum([self._counts[state] for state in states])

    def served(self) -> list[tuple[str | None, float]]:
        """Tenant and device seconds of each request whose reader is there."""
        mailboxes = [request.mailbox for request in list(self._by_id.values())]
        return [
            (mailbox.tenant, mailbox.account.device_seconds)
            for mailbox in mailboxes
            if mailbox.finish_reason is None
        ]

    # -- changes of state

    def enter(self, request: LiveRequest, prompt_tokens: int) -> None:
        """Add a request whose prompt of about `prompt_tokens` tokens will be encoded."""
        request.waiting_tokens = prompt_tokens
        self.waiting.came(prompt_tokens)
        self._by_id[request.request_id] = request
        self._counts[request.state] += 1

    def ask(self, request: LiveRequest, prompt_tokens: int) -> None:
        """Mark a request as encoded. Does nothing if its reader has left meanwhile."""
        if request.state is RequestState.ENCODING:
            self.waiting.came(prompt_tokens - request.waiting_tokens)
            request.waiting_tokens = prompt_tokens
            self._move(request, RequestState.ASKED)

    def queue(self, request: LiveRequest) -> None:
        """Let a request enter. Does nothing if its reader has left meanwhile."""
        if request.state is RequestState.ASKED:
            self._move(request, RequestState.QUEUED)
            self.queued.append(request)

    def next_queued(self) -> LiveRequest | None:
        """Return the oldest request that is to enter the scheduler."""
        while self.queued and self.queued[0].state is not RequestState.QUEUED:
            self.queued.popleft()
        return self.queued[0] if self.queued else None

    def run(self, request: LiveRequest, samples: list[LiveSample]) -> bool:
        """Note the sequences of a request in the scheduler. False if its reader has left
        meanwhile."""
        if request.state is not RequestState.QUEUED:
            return False
        self._move(request, RequestState.RUNNING)
        request.samples = samples
        for sample in samples:
            self.samples[sample.sequence_id] = sample
        return True

    def leave(self, request: LiveRequest) -> None:
        """Remove a request whose reader is gone. If it runs, the scheduler is told later."""
        if request.state is RequestState.RUNNING:
            self._free_id(request)
            self._move(request, RequestState.LEAVING)
            self.leaving.append(request)
        elif request.state is not RequestState.LEAVING:
            self.end(request)

    def next_leaving(self) -> LiveRequest | None:
        """Return a request that must leave the scheduler now."""
        while self.leaving and self.leaving[0].state is not RequestState.LEAVING:
            self.leaving.popleft()
        return self.leaving[0] if self.leaving else None

    def begin(self, request: LiveRequest) -> None:
        """Note that the first completion of a request begins."""
        if request.waiting_tokens:
            self.waiting.began(request.waiting_tokens)
            request.waiting_tokens = 0

    def end_sample(self, sample: LiveSample) -> bool:
        """Remove a sample that ended by itself. True if it was the last of its request."""
        del self.samples[sample.sequence_id]
        sample.request.samples.remove(sample)
        return not sample.request.samples

    def end(self, request: LiveRequest) -> None:
        """Remove a request for good. Does nothing if it has ended already."""
        if request.state is RequestState.ENDED:
            return
        for sample in request.samples:
            del self.samples[sample.sequence_id]
        request.samples = []
        self.waiting.left(request.waiting_tokens)
        request.waiting_tokens = 0
        self._free_id(request)
        self._move(request, RequestState.ENDED)
        if request.encoding is not None:
            request.encoding.cancel()
        for timer in (request.stall_timer, request.deadline_timer):
            if timer is not None:
                timer.cancel()

    def _move(self, request: LiveRequest, state: RequestState) -> None:
        self._counts[request.state] -= 1
        self._counts[state] += 1
        request.state = state

    def _free_id(self, request: LiveRequest) -> None:
        # The id may be another request's by now.
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
