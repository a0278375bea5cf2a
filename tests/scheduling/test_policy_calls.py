"""A policy can be slow or unfair; it can't break anything."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.scheduling import policy_calls as guard_module
from aioserve.scheduling.policy import Refusal, SchedulingPolicy, Verdict
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.view import RequestView
from tests.plugin_system.hostile import ERRORS, TOUCHES, HostileText, contained, hostile
from tests.scheduling.test_scheduler import Bench, work


def answering(question: str, answer) -> SchedulingPolicy:
    def method(self, *args):
        if isinstance(answer, BaseException):
            raise answer
        return answer(*args) if callable(answer) else answer

    return type("Odd", (SchedulingPolicy,), {question: method})()


NO_REQUEST: Any = RequestView(_sequence=None, _memory=None)  # pyright: ignore[reportArgumentType]
NONSENSE = [
    ("order", ValueError("planted"), "raised ValueError"),
    ("order", asyncio.CancelledError(), "raised CancelledError"),
    ("order", lambda waiting, view: map(sys.exit, waiting), "raised SystemExit"),
    ("order", None, "raised TypeError"),
    ("order", [1, 2], "named 1, which doesn't wait"),
    ("order", [None], "named None, which doesn't wait"),
    ("order", lambda waiting, view: [waiting[0], waiting[0]], "came before"),
    ("order", lambda waiting, view: [NO_REQUEST], "raised AttributeError"),
    ("admit", ValueError("planted"), "raised ValueError"),
    ("admit", SystemExit(3), "raised SystemExit"),
    ("admit", GeneratorExit(), "raised GeneratorExit"),
    ("admit", True, "answered True, not a Verdict or a Refusal"),
    ("admit", lambda request, view: Refusal(""), "raised ConfigError"),
    ("admit", lambda request, view: Refusal(None), "raised ConfigError"),  # pyright: ignore[reportArgumentType]
    ("admit", lambda request, view: Refusal("x" * 1001), "raised ConfigError"),
    ("chunk", ValueError("planted"), "raised ValueError"),
    ("chunk", 99, "answered 99, not an int in"),
    ("chunk", -1, "answered -1"),
    ("chunk", "all", "answered 'all'"),
    ("precedence", ValueError("planted"), "precedence raised ValueError"),
    ("precedence", None, "answered None, not an int"),
    ("precedence", True, "answered True, not an int"),
    ("precedence", 1.0, "answered 1.0, not an int"),
    ("arrived", ValueError("planted"), "arrived raised ValueError"),
    ("arrived", asyncio.CancelledError(), "arrived raised CancelledError"),
]


@pytest.mark.parametrize(("question", "answer", "message"), NONSENSE)
def test_nonsense_is_logged_once_and_first_come_first_served_decides(
    question, answer, message, caplog
):
    bench = Bench(policy=answering(question, answer))
    a, b = bench.submit(3), bench.submit(3)

    with caplog.at_level(logging.ERROR):
        plan = bench.plan()

    assert work(plan) == [(a, 0, 3), (b, 0, 3)]
    (record,) = caplog.records
    assert "Odd" in record.getMessage()
    assert message in record.getMessage()
    assert bench.scheduler.policy_calls.faults_total == 1


def test_a_policy_that_failed_is_asked_again_in_the_next_step(caplog):
    asked = []

    def failing_once(waiting, view):
        asked.append(len(waiting))
        if len(asked) == 1:
            raise ValueError("planted")
        return reversed(waiting)

    bench = Bench(policy=answering("order", failing_once), max_num_batched_tokens=3)
    a, _, c = bench.submit(3), bench.submit(3), bench.submit(3)

    assert work(bench.plan()) == [(a, 0, 3)]
    bench.scheduler.finish(a)
    assert work(bench.plan()) == [(c, 0, 3)]
    assert bench.scheduler.policy_calls.faults_total == 1


def test_a_policy_that_always_fails_does_not_fill_the_log(caplog):
    bench = Bench(policy=answering("order", ValueError("planted")))
    bench.submit(2, 200)
    for _ in range(100):
        bench.submit(2, 1)
        bench.step()
    assert bench.scheduler.policy_calls.faults_total == 100
    numbers = [record.getMessage().split("(fault ")[1].rstrip(")") for record in caplog.records]
    assert numbers == [*map(str, range(1, 11)), "16", "32", "64"]


@pytest.mark.parametrize("answer", [ValueError("planted"), None, "b"])
def test_a_nonsense_victim_is_replaced_by_the_default_one(answer, caplog):
    bench = Bench(num_pages=4, policy=answering("victim", answer))
    bench.submit(7, 9)
    b = bench.submit(7, 9)
    bench.step()
    bench.step()

    assert bench.plan().preempted == (b,)
    assert "victim" in caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ValueError("planted"), "displaces raised ValueError"),
        (SystemExit(3), "displaces raised SystemExit"),
        (None, "displaces raised TypeError"),
        (lambda request, running, view: [request], "not one of the running requests"),
        (lambda request, running, view: [*running, running[0]], "or came before"),
        (lambda request, running, view: itertools.repeat(running[0]), "or came before"),
        (lambda request, running, view: [None], "answered None, not one of the running"),
    ],
)
def test_nobody_gives_way_where_a_policy_says_nonsense(answer, message, caplog):
    policy = answering("displaces", answer)
    policy.precedence = lambda request: request.priority
    bench = Bench(policy=policy, max_num_seqs=1)
    bench.submit(3, 9)
    bench.step()
    bench.submit(3, priority=1)
    for _ in range(3):
        assert bench.step()
    assert bench.scheduler.counters.preemptions == 0
    assert message in caplog.text
    assert bench.scheduler.policy_calls.faults_total == 2
    bench.run()


def test_a_policy_cannot_change_what_its_answers_are_checked_against(caplog):
    class Grabbing(SchedulingPolicy):
        def order(self, waiting, view):
            waiting.append(waiting[0])  # pyright: ignore[reportAttributeAccessIssue]

        def victim(self, running, need_pages, view):
            return running.pop()  # pyright: ignore[reportAttributeAccessIssue]

    bench = Bench(policy=Grabbing())
    a, b = bench.submit(3), bench.submit(3)
    assert work(bench.plan()) == [(a, 0, 3), (b, 0, 3)]
    bench = Bench(num_pages=4, policy=Grabbing())
    bench.submit(7, 9)
    b = bench.submit(7, 9)
    bench.step()
    bench.step()
    assert bench.plan().preempted == (b,)


def test_an_answer_that_cannot_even_be_shown_is_nonsense_like_any_other(caplog):
    class Unshowable:
        def __repr__(self):
            raise ValueError("planted")

    bench = Bench(policy=answering("chunk", Unshowable()))
    a = bench.submit(3)
    assert work(bench.plan()) == [(a, 0, 3)]
    assert "answered <Unshowable instance" in caplog.text


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("touches", [[touch] for touch in TOUCHES] + [TOUCHES], ids="+".join)
@contained
def test_an_answer_that_raises_when_it_is_looked_at_is_one_fault(touches, error, caplog):
    answer = hostile(touches, error)
    for question in ("order", "admit", "chunk", "victim"):
        bench = Bench(num_pages=4, policy=answering(question, lambda *args: answer))
        a, b = bench.submit(7, 9), bench.submit(7, 9)
        plan = bench.plan()
        assert work(plan) == [(a, 0, 7), (b, 0, 7)]
        bench.commit(plan)
        bench.step()
        assert bench.plan().preempted == (b,)
        guard = bench.scheduler.policy_calls
        assert guard.faults_total == 1
        assert str(guard.last_fault).startswith(f"scheduling policy Odd: {question} ")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "question", ["order", "admit", "chunk", "precedence", "step_finished", "finished"]
)
@contained
def test_an_exception_that_raises_when_it_is_looked_at_is_one_fault(question, error):
    raised = hostile(TOUCHES, error, base=Exception)
    bench = Bench(policy=answering(question, lambda *args: raise_it(raised)))
    bench.submit(3, max_tokens=1)
    (end,) = bench.step()
    assert end.finish_reason is not None
    assert bench.scheduler.policy_calls.faults_total == 1


def raise_it(error):
    raise error


def test_a_refusal_is_made_anew_of_plain_values():
    class Mine(Refusal, frozen=True):
        def __post_init__(self):
            pass

        @property
        def reason(self):
            return HostileText("closed")

    guard = PolicyCalls(answering("admit", Mine("open")))
    answer = guard.admit(None, None)  # pyright: ignore[reportArgumentType]
    kind, kind_of_reason = type(answer), type(answer.reason)  # pyright: ignore[reportAttributeAccessIssue]
    assert (kind, kind_of_reason) == (Refusal, str)
    assert answer == Refusal("closed")


def test_an_object_that_only_says_that_it_is_a_verdict_is_none():
    class Lie:
        __class__ = Verdict  # pyright: ignore[reportAssignmentType]

    guard = PolicyCalls(answering("admit", Lie()))
    assert guard.admit(None, None) is Verdict.NOW  # pyright: ignore[reportArgumentType]
    assert guard.faults_total == 1


def test_a_policy_whose_attributes_come_to_raise_is_replaced_in_each_step():
    class Broken(SchedulingPolicy):
        def __getattribute__(self, name):
            if broken:
                raise ValueError("planted")
            return super().__getattribute__(name)

    broken = False
    bench = Bench(policy=Broken())
    broken = True
    ids = [bench.submit(4, 4) for _ in range(2)]
    assert list(bench.run()) == ids
    assert bench.scheduler.policy_calls.faults_total == bench.scheduler.counters.steps


def test_a_policy_that_failed_still_hears_of_every_end():
    ended = []

    class Bookkeeping(SchedulingPolicy):
        def order(self, waiting, view):
            raise ValueError("planted")

        def finished(self, requests):
            ended.extend(request.arrival_index for request in requests)

    bench = Bench(policy=Bookkeeping())
    a = bench.submit(3, max_tokens=1)
    bench.step()
    assert ended == [a]


@pytest.mark.parametrize("question", ["arrived", "order", "admit", "chunk"])
def test_an_interrupt_is_no_answer_of_the_policys(question, caplog):
    def interrupted(*args):
        raise KeyboardInterrupt

    bench = Bench(policy=answering(question, interrupted))
    bench.submit(3)
    with pytest.raises(KeyboardInterrupt):
        bench.plan()
    assert bench.scheduler.policy_calls.faults_total == 0
    assert not caplog.records


def test_an_interrupt_between_two_answers_is_let_through_too():
    def interrupted(waiting, view):
        yield waiting[0]
        raise KeyboardInterrupt

    bench = Bench(policy=answering("order", interrupted))
    bench.submit(3)
    bench.submit(3)
    with pytest.raises(KeyboardInterrupt):
        bench.plan()


@pytest.mark.parametrize("notification", ["step_finished", "finished"])
def test_a_notification_that_raises_harms_nobody(notification, caplog):
    bench = Bench(policy=answering(notification, ValueError("planted")))
    bench.submit(3, max_tokens=1)

    (end,) = bench.step()

    assert end.finish_reason is not None
    assert notification in caplog.text


def test_an_order_that_never_ends_is_cut_at_its_first_repetition(caplog):
    def forever(waiting, view):
        while True:
            yield waiting[0]

    bench = Bench(policy=answering("order", forever))
    a, b = bench.submit(3), bench.submit(3)

    assert work(bench.plan()) == [(a, 0, 3), (b, 0, 3)]


def request_view(arrival_index: int) -> RequestView:
    """View of which the guard sees only its place in the order of arrival."""
    sequence: Any = SimpleNamespace(sequence_id=arrival_index)
    memory: Any = None
    return RequestView(_sequence=sequence, _memory=memory)


@pytest.mark.parametrize("most_searches", [0, 2, 64])
@given(num_waiting=st.integers(0, 5), answer=st.lists(st.integers(0, 6), max_size=8))
def test_an_order_holds_up_to_its_first_fault_and_the_rest_follows_by_arrival(
    most_searches, num_waiting, answer
):
    requests = [request_view(index) for index in range(7)]
    expected: list[int] = []
    faults = 0
    for index in answer:
        if index >= num_waiting or index in expected:
            faults = 1
            expected += [other for other in range(num_waiting) if other not in expected]
            break
        expected.append(index)

    guard = PolicyCalls(answering("order", [requests[index] for index in answer]))
    with mock.patch.object(guard_module, "MOST_SEARCHES", most_searches):
        order = guard.order(requests[:num_waiting], None)  # pyright: ignore[reportArgumentType]
        assert [requests.index(request) for request in order] == expected
    assert guard.faults_total == faults


def test_a_policy_orders_sizes_and_admits():
    class Backwards(SchedulingPolicy):
        def order(self, waiting, view):
            return reversed(waiting)

        def admit(self, request, view):
            return Verdict.LATER if request.prompt_tokens == 4 else Verdict.NOW

        def chunk(self, request, budget_tokens, view):
            return min(2, budget_tokens)

    bench = Bench(policy=Backwards())
    a, b, c = bench.submit(3), bench.submit(4), bench.submit(5)
    del b

    assert work(bench.plan()) == [(c, 0, 2), (a, 0, 2)]


def test_the_default_victim_is_the_one_that_loses_least_among_those_that_suffice():
    class View:
        def __init__(self, pages, lost_tokens, arrival_index, in_flight=True):
            self.reclaimable_pages, self.lost_tokens = pages, lost_tokens
            self.arrival_index, self.in_flight = arrival_index, in_flight

    small, enough, large = View(1, 4, 3), View(3, 12, 2), View(9, 36, 1)
    idle = View(3, 12, 0, in_flight=False)
    victim = SchedulingPolicy().victim
    assert victim([large, enough, small], 2, None) is enough  # pyright: ignore[reportArgumentType]
    assert victim([enough, idle], 2, None) is idle  # pyright: ignore[reportArgumentType]
    assert victim([large, enough, small], 20, None) is large  # pyright: ignore[reportArgumentType]


def test_a_policy_that_looks_up_its_methods_itself_is_asked_and_told():
    """A proxy of another policy has no methods in its own class."""
    heard: list[str] = []

    class Proxy(SchedulingPolicy):
        def __getattribute__(self, name: str) -> object:
            if name in ("admit", "chunk", "precedence", "arrived", "step_finished", "finished"):
                heard.append(name)
            return super().__getattribute__(name)

    bench = Bench(policy=Proxy())
    bench.submit([1, 2, 3], max_tokens=1)
    bench.run()
    assert {"admit", "chunk", "precedence", "step_finished", "finished"} <= set(heard)


def test_a_method_that_the_class_is_given_later_is_told():
    class Plain(SchedulingPolicy):
        pass

    ended: list[int] = []
    bench = Bench(policy=Plain())
    Plain.finished = lambda self, requests: ended.append(len(requests))
    bench.submit([1, 2, 3], max_tokens=1)
    bench.run()
    assert ended == [1]
