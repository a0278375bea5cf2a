"""Asks a policy and checks what it answers, so that no policy can harm the mechanism.

From a policy's first fault in a step to the end of that step, first come, first served answers in
its place. In the next step the policy is asked again.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import SupportsIndex, TypeVar

from aioserve.arguments import plain_int
from aioserve.config import Preemption
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault, shown
from aioserve.scheduling.policy import Preempt, Refusal, SchedulingPolicy, Verdict
from aioserve.scheduling.view import Pin, RequestView, SchedulerView

__all__ = ["PolicyCalls"]

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

FALLBACK = SchedulingPolicy()
END = object()
MOST_SEARCHES = 64
"""For requests that a policy names out of order: where it names more, all are put into a dict."""
WAYS_TO_PREEMPT: tuple[Preemption, ...] = ("auto", "swap", "recompute")


class PolicyCalls(PluginCalls):
    """Stands between the scheduler and one policy; its answers can be used as they are.

    A policy has at most one fault a step: `faults_total` counts steps in which it had one.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        clock: Callable[[], float] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.policy = policy
        self.name: str = name or type(policy).__name__
        """For logs and errors; that of the class unless given."""
        self.preempts: bool = _overrides(policy, "preempt")
        self.orders_prefills: bool = _overrides(policy, "order_prefills")
        self.chooses_decodes: bool = _overrides(policy, "decode")
        self.reserves: bool = _overrides(policy, "reserve")
        self.drops: bool = _overrides(policy, "drop")
        self.pins: bool = _overrides(policy, "pin")
        self.victim_of_any_age: bool = bool(policy.victim_of_any_age)
        self.acts_on_running: bool = self.preempts or self.drops or self.pins
        # Looked up by nothing of the policy's own, which may raise.
        self._attributes: Mapping[str, object] = object.__getattribute__(policy, "__dict__")
        self._failed = False
        after = "first come, first served decides this step"
        super().__init__(f"scheduling policy {self.name}", after, logger, clock)

    @property
    def orders(self) -> bool:
        return self._has_own("order")

    @property
    def chooses_who_starts(self) -> bool:
        return self.orders or self._has_own("admit")

    @property
    def hears_of_steps(self) -> bool:
        return self._has_own("step_finished")

    @property
    def hears_of_arrivals(self) -> bool:
        return self._has_own("arrived") or self._has_own("precedence")

    def _has_own(self, method: str) -> bool:
        """Whether a policy has its own of what it is always asked or told, be it an attribute that
        it was given just now."""
        return method in self._attributes or _overrides(self.policy, method)

    def begin_step(self) -> None:
        """Trust the policy again."""
        super().begin_step()
        self._failed = False

    def order(self, waiting: Iterable[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        """Waiting requests to start, one by one: each is in `waiting`, none comes twice. After a
        fault come those that are left, in order of arrival."""
        if not self.orders:  # of thousands only those that start are looked at
            yield from waiting
            return
        # A tuple: what the policy does with it can't change what is checked.
        named = _Named(tuple(waiting))
        answer = self._ask("order", lambda: iter(self.policy.order(named.waiting, view)))
        while answer is not None:
            try:
                request = self.call("order", next, answer, END)
                if request is END:
                    return
                checked = self.call("order", named.take, request)
            except PluginFault:
                break
            if checked is None:
                self.fault("order", f"named {shown(request)}, which doesn't wait or came before")
                break
            yield checked
        yield from named.left()

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        def ask() -> Verdict | Refusal:
            answer = self.policy.admit(request, view)
            if type(answer) is Verdict:
                return answer
            if isinstance(answer, Refusal):  # of any class, and its reason of any class of str
                return Refusal.plain(answer)
            raise NotAnAnswer(answer, "not a Verdict or a Refusal")

        verdict = self._ask("admit", ask)
        return Verdict.NOW if verdict is None else verdict

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        def ask() -> int:
            return _index(self.policy.chunk(request, budget_tokens, view), 0, budget_tokens)

        tokens = self._ask("chunk", ask)
        return budget_tokens if tokens is None else tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        running = tuple(running)

        def ask() -> RequestView:
            answer = self.policy.victim(running, need_pages, view)
            for request in running:
                if request is answer:
                    return request
            raise NotAnAnswer(answer, "not one of the running requests")

        chosen = self._ask("victim", ask)
        return FALLBACK.victim(running, need_pages, view) if chosen is None else chosen

    def precedence(self, request: RequestView) -> int:
        def ask() -> int:
            answer = self.policy.precedence(request)
            precedence = plain_int(answer)
            if precedence is None:
                raise NotAnAnswer(answer, "not an int")
            return precedence

        return self._ask("precedence", ask) or 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Requests of `running` that are to give way, none twice; after a fault none."""
        running = tuple(running)
        named = self._ask(
            "displaces", lambda: _some_of(running, self.policy.displaces(request, running, view))
        )
        return named or ()

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[Preempt]:
        """Requests of `running` to take off the device, none twice; after a fault none."""
        running = tuple(running)

        def ask() -> list[Preempt]:
            left = _by_id(running)
            named: list[Preempt] = []
            for answer in self.policy.preempt(running, view):
                if isinstance(answer, Preempt):
                    named.append(Preempt(_take(left, answer.request), _way(answer.how)))
                else:
                    named.append(Preempt(_take(left, answer)))
            return named

        return self._ask("preempt", ask) or ()

    def order_prefills(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Requests of `running` that go on with their prompts, none twice; after a fault all."""
        running = tuple(running)
        named = self._ask(
            "order_prefills", lambda: _some_of(running, self.policy.order_prefills(running, view))
        )
        return running if named is None else named

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        """Requests of `running` that get a token, none twice; after a fault all."""
        running = tuple(running)
        named = self._ask("decode", lambda: _some_of(running, self.policy.decode(running, view)))
        return running if named is None else named

    def reserve(self, request: RequestView, most_pages: int, view: SchedulerView) -> int | None:
        """Pages to leave, at most `most_pages`; None, also after a fault, for the engine's own."""

        def ask() -> int | None:
            answer = self.policy.reserve(request, view)
            return None if answer is None else _index(answer, 0, most_pages)

        return self._ask("reserve", ask)

    def drop(self, request: RequestView, view: SchedulerView) -> Refusal | None:
        def ask() -> Refusal | None:
            answer = self.policy.drop(request, view)
            if answer is None or isinstance(answer, Refusal):
                return None if answer is None else Refusal.plain(answer)
            raise NotAnAnswer(answer, "not a Refusal or None")

        return self._ask("drop", ask)

    def pin(self, request: RequestView, most_tokens: int) -> int:
        """Leading tokens to keep, at most `most_tokens`; after a fault none."""
        return self._ask("pin", lambda: _index(self.policy.pin(request), 0, most_tokens)) or 0

    def unpin(self, pins: Sequence[Pin], view: SchedulerView) -> Sequence[Pin]:
        """Pins of `pins` to end, none twice; after a fault none."""

        def ask() -> list[Pin]:
            left = {pin.number: pin for pin in pins}
            named: list[Pin] = []
            for answer in self.policy.unpin(pins, view):
                pin = left.pop(answer.number, None) if type(answer) is Pin else None
                if pin is None:
                    raise NotAnAnswer(answer, "not one of the pins, or came before")
                named.append(pin)
            return named

        return self._ask("unpin", ask) or ()

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._tell("arrived", lambda: self.policy.arrived(requests))

    def step_finished(self, step: int, tokens: int) -> None:
        self._tell("step_finished", lambda: self.policy.step_finished(step, tokens))

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._tell("finished", lambda: self.policy.finished(requests))

    def _ask(self, question: str, ask: Callable[[], T]) -> T | None:
        if self._failed:
            return None
        try:
            return self.call(question, ask)
        except PluginFault:
            return None

    def _tell(self, notification: str, tell: Callable[[], None]) -> None:
        """Also after a fault: a policy that keeps books must hear of every request's end."""
        try:
            self.call(notification, tell)
        except PluginFault:
            return

    def fault(self, what: str, said: str, error: BaseException | None = None) -> PluginFault:
        if self._failed:
            return PluginFault(said)
        self._failed = True
        return super().fault(what, said, error)


class _Named:
    """Which of those that wait were named: `num_first` from the first on, and those at `later`.

    Thousands may wait of which a few can start. So as long as few are named they are found by
    bisection, and not in a dict of all."""

    def __init__(self, waiting: tuple[RequestView, ...]) -> None:
        self.waiting = waiting
        self._num_first = 0
        self._later: set[int] = set()
        self._num_searches = 0
        self._places: dict[int, int] = {}

    def take(self, answer: object) -> RequestView | None:
        """The request that this is, named for the first time; None for anything else."""
        waiting, first = self.waiting, self._num_first
        in_turn = first < len(waiting) and answer is waiting[first]
        place = first if in_turn else self._place(answer)
        if place < first or place in self._later:
            return None
        self._later.add(place)
        while self._num_first in self._later:
            self._later.remove(self._num_first)
            self._num_first += 1
        return waiting[place]

    def _place(self, answer: object) -> int:
        """Where it waits; -1 for one that doesn't."""
        self._num_searches += 1
        if self._num_searches > MOST_SEARCHES:
            if not self._places:
                self._places = {id(request): i for i, request in enumerate(self.waiting)}
            return self._places.get(id(answer), -1)
        if type(answer) is not RequestView:
            return -1
        place = bisect_left(self.waiting, answer.arrival_index, key=_by_arrival)
        is_there = place < len(self.waiting) and self.waiting[place] is answer
        return place if is_there else -1

    def left(self) -> Iterator[RequestView]:
        """Requests that weren't named, in order of arrival."""
        for place in range(self._num_first, len(self.waiting)):
            if place not in self._later:
                yield self.waiting[place]


def _overrides(policy: SchedulingPolicy, method: str) -> bool:
    """Whether the class of a policy has an answer of its own: the others need not be asked. An
    attribute of the object doesn't count, which may be an option of that name."""
    return getattr(type(policy), method) is not vars(SchedulingPolicy)[method]


def _index(answer: SupportsIndex, least: int, most: int) -> int:
    try:
        number = operator.index(answer)
    except TypeError:
        number = least - 1
    if least <= number <= most:
        return number
    raise NotAnAnswer(answer, f"not an int in [{least}, {most}]")


def _by_arrival(request: RequestView) -> int:
    return request.arrival_index


def _way(answer: object) -> Preemption | None:
    """A plain str, of any class of str."""
    if answer is None:
        return None
    if isinstance(answer, str):
        named = str.__str__(answer)
        for way in WAYS_TO_PREEMPT:
            if way == named:
                return way
    raise NotAnAnswer(answer, f"not None and not one of {WAYS_TO_PREEMPT}")


def _some_of(running: Sequence[RequestView], answers: Iterable[object]) -> list[RequestView]:
    left = _by_id(running)
    return [_take(left, answer) for answer in answers]


def _by_id(requests: Sequence[RequestView]) -> dict[int, RequestView]:
    return dict(zip(map(id, requests), requests, strict=True))


def _take(left: dict[int, RequestView], answer: object) -> RequestView:
    """Out of those left, so that answers without end come to one."""
    if id(answer) not in left:
        raise NotAnAnswer(answer, "not one of the running requests, or came before")
    return left.pop(id(answer))
