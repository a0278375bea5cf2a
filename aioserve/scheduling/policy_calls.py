"""Calls to a policy. Every answer is checked, so that no policy can harm the mechanism.

From a policy's first fault in a step to the end of that step, first come, first served answers in
its place. In the next step the policy is asked again.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, SupportsIndex, TypeVar

from aioserve.arguments import plain_int
from aioserve.config import Preemption
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault, shown
from aioserve.scheduling.policy import (
    Preempt,
    Refusal,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
    Verdict,
)
from aioserve.scheduling.view import Pin, RequestView, SchedulerView

__all__ = ["PolicyCalls"]

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

FALLBACK = SchedulingPolicy()
DEFAULTS = vars(SchedulingPolicy)
END = object()
MOST_SEARCHES = 64
"""Requests named out of order that are found by bisection. If a policy names more, all go into a
dict."""
WAYS_TO_PREEMPT: tuple[Preemption, ...] = ("auto", "swap", "recompute")


class PolicyCalls(PluginCalls):
    """Stands between the scheduler and one policy. Its answers can be used as they are.

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
        """Name in logs and errors; by default the name of the policy's class."""
        self.preempts: bool = _overrides(policy, "preempt")
        self.orders_prefills: bool = _overrides(policy, "order_prefills")
        self.chooses_decodes: bool = _overrides(policy, "decode")
        self.sets_budgets: bool = _overrides(policy, "begin_step")
        self.reserves: bool = _overrides(policy, "reserve")
        self.limits_drafts: bool = _overrides(policy, "draft")
        self.drops: bool = _overrides(policy, "drop")
        self.pins: bool = _overrides(policy, "pin")
        self.victim_of_any_age: bool = bool(policy.victim_of_any_age)
        self.limits_decodes: bool = self.chooses_decodes or self.sets_budgets
        """True if a sequence that is ready for its next token may have to sit a step out."""
        self.acts_on_running: bool = self.preempts or self.drops or self.pins
        # Look nothing up in the policy itself, since that may raise.
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
        """True if a policy overrides this method, which is always called. It may also be an
        attribute that was set just now."""
        return method in self._attributes or _overrides(self.policy, method)

    def _may_have_own(self, method: str) -> bool:
        """True if a policy overrides this method, or looks its attributes up in a way of its
        own."""
        kind = type(self.policy)  # several times a step: no further calls
        return (
            getattr(kind, method) is not DEFAULTS[method]
            or method in self._attributes
            or kind.__getattribute__ is not object.__getattribute__
        )

    def begin_step(self) -> None:
        """Trust the policy again."""
        super().begin_step()
        self._failed = False

    def step_budget(
        self, view: SchedulerView, most_tokens: int, is_known: Callable[[RequestView], bool]
    ) -> StepBudget | None:
        """Ask for the budget of a step. Return shares as tuples, with at most `most_tokens` tokens
        in all and each request in one of them. None means no limits, also after a fault."""
        return self._ask("begin_step", partial(_budget, most_tokens, is_known), view)

    def order(self, waiting: tuple[RequestView, ...], view: SchedulerView) -> Iterator[RequestView]:
        """Yield waiting requests to start, one by one. Each is in `waiting`, and none comes twice.
        After a fault the remaining ones follow in order of arrival."""
        # A tuple, so that the policy can't change what is checked.
        named = _Named(waiting)
        answer = self._ask("order", iter, waiting, view)
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
        if not self._may_have_own("admit"):
            return Verdict.NOW
        return self._ask("admit", _verdict, request, view) or Verdict.NOW

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not self._may_have_own("chunk"):
            return budget_tokens
        check = partial(_index, 0, budget_tokens)
        tokens = self._ask("chunk", check, request, budget_tokens, view)
        return budget_tokens if tokens is None else tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        running = tuple(running)
        check = partial(_take, _by_id(running))
        chosen = self._ask("victim", check, running, need_pages, view)
        return FALLBACK.victim(running, need_pages, view) if chosen is None else chosen

    def precedence(self, request: RequestView) -> int:
        return (self._may_have_own("precedence") and self._ask("precedence", _int, request)) or 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Requests of `running` to displace, without repeats. Empty after a fault."""
        running = tuple(running)
        return self._ask("displaces", partial(_some_of, running), request, running, view) or ()

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[Preempt]:
        """Requests of `running` to take off the device, without repeats. Empty after a fault."""
        running = tuple(running)
        return self._ask("preempt", partial(_preemptions, running), running, view) or ()

    def order_prefills(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Requests of `running` that go on with their prompts, without repeats. All after a
        fault."""
        running = tuple(running)
        named = self._ask("order_prefills", partial(_some_of, running), running, view)
        return running if named is None else named

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        """Requests of `running` that get a token, without repeats. All after a fault."""
        running = tuple(running)
        named = self._ask("decode", partial(_some_of, running), running, view)
        return running if named is None else named

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        """Draft tokens of a request in this step, 0 to `limit`. After a fault `limit`."""
        answer = self._ask("draft", partial(_index, 0, limit), request, limit, view)
        return limit if answer is None else answer

    def reserve(self, request: RequestView, most_pages: int, view: SchedulerView) -> int | None:
        """Pages to leave, at most `most_pages`. None for the engine's own reserve, also after a
        fault."""
        check = partial(_index_or_none, 0, most_pages)
        return self._ask("reserve", check, request, view)

    def drop(self, request: RequestView, view: SchedulerView) -> Refusal | None:
        return self._ask("drop", _refusal_or_none, request, view)

    def pin(self, request: RequestView, most_tokens: int) -> int:
        """Leading tokens to keep, at most `most_tokens`. 0 after a fault."""
        return self._ask("pin", partial(_index, 0, most_tokens), request) or 0

    def unpin(self, pins: Sequence[Pin], view: SchedulerView) -> Sequence[Pin]:
        """Pins of `pins` to end, without repeats. Empty after a fault."""
        return self._ask("unpin", partial(_some_pins, pins), pins, view) or ()

    def arrived(self, requests: Sequence[RequestView]) -> None:
        if self._may_have_own("arrived"):
            self._tell("arrived", requests)

    def step_finished(self, step: int, tokens: int) -> None:
        if self._may_have_own("step_finished"):
            self._tell("step_finished", step, tokens)

    def finished(self, requests: Sequence[RequestView]) -> None:
        if self._may_have_own("finished"):
            self._tell("finished", requests)

    def _ask(self, question: str, check: Callable[[Any], T], *args: Any) -> T | None:
        """Return what `check` makes of the policy's answer; None after a fault."""
        if self._failed:
            return None
        try:
            return self.call(question, self._checked, question, check, args)
        except PluginFault:
            return None

    def _checked(self, question: str, check: Callable[[Any], T], args: tuple[Any, ...]) -> T:
        return check(getattr(self.policy, question)(*args))

    def _tell(self, notification: str, *args: Any) -> None:
        """Notify the policy, even after a fault: a policy that keeps counts must hear of the end of
        every request."""
        with suppress(PluginFault):
            self.call(notification, self._checked, notification, _ignored, args)

    def fault(self, what: str, said: str, error: BaseException | None = None) -> PluginFault:
        if self._failed:
            return PluginFault(said)
        self._failed = True
        return super().fault(what, said, error)


class _Named:
    """Marks waiting requests as named: the first `_num_first`, and those at the places in `_later`.

    Thousands may wait, and a few of them can start. While few are named, bisection finds them
    without a dict of all.
    """

    def __init__(self, waiting: tuple[RequestView, ...]) -> None:
        self.waiting = waiting
        self._num_first = 0
        self._later: set[int] = set()
        self._num_searches = 0
        self._places: dict[int, int] = {}

    def take(self, answer: object) -> RequestView | None:
        """Return `answer` if it is a waiting request named for the first time, else None."""
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
        """Index of `answer` in `waiting`; -1 if it isn't there."""
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
        """Yield the requests that weren't named, in order of arrival."""
        for place in range(self._num_first, len(self.waiting)):
            if place not in self._later:
                yield self.waiting[place]


def _overrides(policy: SchedulingPolicy, method: str) -> bool:
    """True if the class of a policy overrides `method`. Attributes of the object don't count: one
    may be an option of that name."""
    return getattr(type(policy), method) is not DEFAULTS[method]


def _ignored(answer: object) -> None:
    """Accept any answer."""


def _index(least: int, most: int, answer: SupportsIndex) -> int:
    try:
        number = operator.index(answer)
    except TypeError:
        number = least - 1
    if least <= number <= most:
        return number
    raise NotAnAnswer(answer, f"not an int in [{least}, {most}]")


def _index_or_none(least: int, most: int, answer: SupportsIndex | None) -> int | None:
    return None if answer is None else _index(least, most, answer)


def _int(answer: object) -> int:
    number = plain_int(answer)
    if number is None:
        raise NotAnAnswer(answer, "not an int")
    return number


def _verdict(answer: object) -> Verdict | Refusal:
    if type(answer) is Verdict:
        return answer
    if isinstance(answer, Refusal):  # of any class, and its reason of any class of str
        return Refusal.plain(answer)
    raise NotAnAnswer(answer, "not a Verdict or a Refusal")


def _refusal_or_none(answer: object) -> Refusal | None:
    if answer is None or isinstance(answer, Refusal):
        return None if answer is None else Refusal.plain(answer)
    raise NotAnAnswer(answer, "not a Refusal or None")


def _by_arrival(request: RequestView) -> int:
    return request.arrival_index


def _way(answer: object) -> Preemption | None:
    """Return the way to preempt as a plain str, from any subclass of str."""
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


def _preemptions(running: Sequence[RequestView], answers: Iterable[object]) -> list[Preempt]:
    left = _by_id(running)
    named: list[Preempt] = []
    for answer in answers:
        if isinstance(answer, Preempt):
            named.append(Preempt(_take(left, answer.request), _way(answer.how)))
        else:
            named.append(Preempt(_take(left, answer)))
    return named


def _budget(
    most_tokens: int, is_known: Callable[[RequestView], bool], answer: object
) -> StepBudget | None:
    if answer is None:
        return None
    if not isinstance(answer, StepBudget):
        raise NotAnAnswer(answer, "not a StepBudget or None")
    left = tokens = most_tokens if answer.tokens is None else _index(1, most_tokens, answer.tokens)
    named: set[int] = set()
    shares: list[TokenShare] = []
    for share in answer.shares:
        if not isinstance(share, TokenShare):
            raise NotAnAnswer(share, "not a TokenShare")
        kept = _index(0, tokens, share.tokens)
        left -= kept
        if left < 0:
            raise NotAnAnswer(answer, f"whose shares have {tokens - left} of {tokens} tokens")
        requests: list[RequestView] = []
        for request in share.requests:
            if type(request) is not RequestView or id(request) in named or not is_known(request):
                raise NotAnAnswer(request, "not a request that waits or runs, or came before")
            named.add(id(request))
            requests.append(request)
        shares.append(TokenShare(tuple(requests), kept))
    return StepBudget(tuple(shares), tokens)


def _some_pins(pins: Sequence[Pin], answers: Iterable[object]) -> list[Pin]:
    left = {pin.number: pin for pin in pins}
    named: list[Pin] = []
    for answer in answers:
        pin = left.pop(answer.number, None) if type(answer) is Pin else None
        if pin is None:
            raise NotAnAnswer(answer, "not one of the pins, or came before")
        named.append(pin)
    return named


def _by_id(requests: Sequence[RequestView]) -> dict[int, RequestView]:
    return dict(zip(map(id, requests), requests, strict=True))


def _take(left: dict[int, RequestView], answer: object) -> RequestView:
    """Take `answer` out of the requests left. Repeats fail, so even endless answers come to an
    end."""
    if id(answer) not in left:
        raise NotAnAnswer(answer, "not one of the running requests, or came before")
    return left.pop(id(answer))
