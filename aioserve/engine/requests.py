"""The requests of an engine: one table, in which each has one state.

    enter ──► ENCODING ──► ASKED ──► QUEUED ──► RUNNING ──────────────► ENDED
                  │          │          │          └────► LEAVING ────────▲
                  └──────────┴──────────┴─────────────────────────────────┘

LEAVING: the reader is gone, and the scheduler has yet to hear of it.

The id of a request is free again as soon as its reader is gone or it has ended. Whatever is asked
about the requests of an engine, how many wait or which ids are taken, is answered from here.
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
from aioserve.engine.measures import Waiting
from aioserve.grammars.matcher import Grammar, Matcher
from aioserve.request import Request
from aioserve.text.assembler import TextAssembler

__all__ = ["LiveRequest", "LiveSample", "RequestState", "RequestTable"]

MAX_HANDLED_AT_ONCE = 256
"""Requests that come or go, before the event loop gets its turn. One takes some 10 µs."""


class RequestState(Enum):
    ENCODING = "encoding"
    """A thread turns the prompt into token ids, or structured output into a grammar."""
    ASKED = "asked"
    """Plugins are asked whether it may enter."""
    QUEUED = "queued"
    """Enters the scheduler before the next step is planned."""
    RUNNING = "running"
    """The scheduler knows it, be it waiting or running there."""
    LEAVING = "leaving"
    """Its reader is gone; it leaves the scheduler before the next step is planned."""
    ENDED = "ended"


class LiveSample:
    """One completion of a request: a sequence of the scheduler's, and its text."""

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
        """Here too: each token goes there, and seldom needs anything else of the request."""
        self.index: int = index
        self.sequence_id: int = sequence_id
        self.assembler: TextAssembler = assembler
        self.num_delivered: int = 0
        self.matcher: Matcher | None = None
        """What may come next, for the thread of `GrammarGuides` alone."""
        self.constrained: ConstrainedCompletion | None = None
        """What is known of that."""


class LiveRequest:
    """One request on its way through an engine: whose it is, where it is, and what is left of it.

    `tell` is called with it and what its reader does. Holds no stream, so that a stream which
    is dropped is collected.
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
    ) -> None:
        loop, tell_of_it = asyncio.get_running_loop(), partial(tell, self)
        self.mailbox: Mailbox = Mailbox(request_id, loop, tell_of_it, capacity, num_samples)
        self.state: RequestState = RequestState.ENCODING
        self.encoding: Encoding | Compiling | None = None
        """While a thread is to encode the prompt, or to compile its structured output."""
        self.grammar: Grammar | None = None
        """What holds its completions: structured output, a budget of reasoning."""
        self.request: Request | None = None
        """Once the prompt is encoded."""
        self.assemblers: tuple[TextAssembler, ...] = ()
        """One for each sample, once the prompt is encoded."""
        self.samples: list[LiveSample] = []
        """Samples that go on."""
        self.stall_timer: asyncio.TimerHandle | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.waiting_tokens: int = 0
        """Tokens of its prompt, as long as its completion hasn't begun."""

    @property
    def request_id(self) -> str:
        return self.mailbox.request_id

    def ends_with(self, token_id: int) -> bool:
        """Whether a completion ends with this id."""
        return self.request is not None and token_id in self.request.end_ids

    def names_stop(self, token_id: int) -> bool:
        """Whether its parameters name this id as one that ends a completion."""
        return self.request is not None and token_id in self.request.params.stop_token_ids

    def __repr__(self) -> str:
        return f"request {self.request_id!r} ({self.state.value})"


class RequestTable:
    """Every request that hasn't ended. Bound to no loop.

    `leave` may be called in the middle of anything, by the garbage collector.
    """

    def __init__(self) -> None:
        self.waiting: Waiting = Waiting()
        self._by_id: dict[str, LiveRequest] = {}
        self.queued: deque[LiveRequest] = deque()
        """Requests that will enter the scheduler. Some of them may have left meanwhile."""
        self.leaving: deque[LiveRequest] = deque()
        """Requests that will leave the scheduler. Some of them may have ended meanwhile."""
        self._counts = dict.fromkeys(RequestState, 0)
        self.samples: dict[int, LiveSample] = {}
        """Samples that the scheduler computes, by the id of their sequence."""

    def __iter__(self) -> Iterator[LiveRequest]:
        """In order of arrival, those that are leaving last."""
        yield from list(self._by_id.values())
        yield from [r for r in self.leaving if r.state is RequestState.LEAVING]

    def is_taken(self, request_id: str) -> bool:
        """Whether a request of that id is being encoded, queued or running."""
        return request_id in self._by_id

    def count(self, *states: RequestState) -> int:
        """Requests in any of `states`."""
        return sum([self._counts[state] for state in states])

    # -- along the arrows

    def enter(self, request: LiveRequest, prompt_tokens: int) -> None:
        """A request whose prompt is to be encoded, of so many tokens or about that."""
        request.waiting_tokens = prompt_tokens
        self.waiting.came(prompt_tokens)
        self._by_id[request.request_id] = request
        self._counts[request.state] += 1

    def ask(self, request: LiveRequest, prompt_tokens: int) -> None:
        """Its prompt is encoded. Nothing happens if its reader has left meanwhile."""
        if request.state is RequestState.ENCODING:
            self.waiting.came(prompt_tokens - request.waiting_tokens)
            request.waiting_tokens = prompt_tokens
            self._move(request, RequestState.ASKED)

    def queue(self, request: LiveRequest) -> None:
        """It may enter. Nothing happens if its reader has left meanwhile."""
        if request.state is RequestState.ASKED:
            self._move(request, RequestState.QUEUED)
            self.queued.append(request)

    def next_queued(self) -> LiveRequest | None:
        """The request that is to enter the scheduler next, in order of arrival."""
        while self.queued and self.queued[0].state is not RequestState.QUEUED:
            self.queued.popleft()
        return self.queued[0] if self.queued else None

    def run(self, request: LiveRequest, samples: list[LiveSample]) -> bool:
        """The scheduler knows it, as these sequences. False if its reader has left meanwhile."""
        if request.state is not RequestState.QUEUED:
            return False
        self._move(request, RequestState.RUNNING)
        request.samples = samples
        for sample in samples:
            self.samples[sample.sequence_id] = sample
        return True

    def leave(self, request: LiveRequest) -> None:
        """The reader is gone. Of one that runs the scheduler must still be told."""
        if request.state is RequestState.RUNNING:
            self._free_id(request)
            self._move(request, RequestState.LEAVING)
            self.leaving.append(request)
        elif request.state is not RequestState.LEAVING:
            self.end(request)

    def next_leaving(self) -> LiveRequest | None:
        """A request that is to leave the scheduler now."""
        while self.leaving and self.leaving[0].state is not RequestState.LEAVING:
            self.leaving.popleft()
        return self.leaving[0] if self.leaving else None

    def begin(self, request: LiveRequest) -> None:
        """The first of its completions begins."""
        if request.waiting_tokens:
            self.waiting.began(request.waiting_tokens)
            request.waiting_tokens = 0

    def end_sample(self, sample: LiveSample) -> bool:
        """A sample has come to its own end; whether it was the last of its request."""
        del self.samples[sample.sequence_id]
        sample.request.samples.remove(sample)
        return not sample.request.samples

    def end(self, request: LiveRequest) -> None:
        """Nothing is left to do for a request; of one that has ended already nothing changes."""
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
