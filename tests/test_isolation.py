"""Faults of a plugin are reported as the plugin's, in words, and harm nothing else."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import PluginError
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault, blamed, shown
from tests.plugin_system.hostile import ERRORS, TOUCHES, HostileText, contained, hostile

logger = logging.getLogger(__name__)
LABEL = "observer it (some-dist 1.2)"


def calls(clock: Callable[[], float] | None = None) -> PluginCalls:
    return PluginCalls(LABEL, "it is left out", logger, clock)


touches = st.sets(st.sampled_from(TOUCHES)) | st.just(set(TOUCHES))
errors = st.sampled_from(ERRORS)


def doubt(answer: Any) -> None:
    raise NotAnAnswer(answer, "not a number")


EXAMINED = (
    doubt,
    operator.index,
    float,
    iter,
    next,
    list,
    bool,
    repr,
    lambda answer: isinstance(answer, int),
    lambda answer: answer == 1,
    lambda answer: answer.reason,
)


@given(touches, errors, st.sampled_from(EXAMINED))
@contained
@contained
def test_an_answer_that_raises_when_it_is_looked_at_is_a_fault(touches, error, examine):
    one, fault = calls(), None
    answer = hostile(touches, error)
    logger.disabled = True
    try:
        one.call("key", lambda: examine(answer))
    except PluginFault as caught:
        fault = str(caught)
    finally:
        logger.disabled = False
    assert (fault, one.faults_total) == (one.last_fault, int(fault is not None))
    assert fault is None or fault.startswith(f"{LABEL}: key ")


@given(touches, errors)
@contained
@contained
def test_an_exception_that_raises_when_it_is_looked_at_is_a_fault_and_is_logged(touches, error):
    one = calls()
    raised = hostile(touches, error, base=Exception)
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    def fail() -> None:
        raise raised

    handler = Handler()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with pytest.raises(PluginFault) as caught:
            one.call("finished", fail)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    assert caught.value.__cause__ is raised
    assert seen[0].startswith(f"{LABEL}: finished raised ")
    assert "; it is left out (fault 1)" in seen[0]


@given(touches, errors)
@contained
@contained
def test_anything_can_be_shown(touches, error):
    text = shown(hostile(touches, error))
    assert type(text) is str
    assert "Hostile" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (ValueError("planted"), "ValueError('planted')"),
        ([[1, [2, [3]]], "x" * 99], "[[1, [...]], 'xxxxxxxxxxxx...xxxxxxxxxxxxx']"),
    ],
)
def test_what_is_shown_is_short(value, text):
    assert shown(value) == text


def test_a_text_of_a_class_of_its_own_becomes_a_plain_one():
    class Odd:
        def __repr__(self):
            return HostileText("odd")

    class Text(str):
        pass

    class Plain:
        def __repr__(self):
            return Text("plain")

    text, plain = shown(Odd()), shown(Plain())
    assert (type(text), type(plain), plain) == (str, str, "plain")
    assert "Odd object" in text


def test_what_is_shown_has_a_bound():
    class Long:
        def __repr__(self):
            return "x" * 10**6

    assert len(shown(Long())) <= 1000
    assert len(shown([[Long()] * 6] * 6)) <= 1000


@contained
def test_an_answer_is_handed_on_as_it_is():
    one, answer = calls(), hostile(TOUCHES, SystemExit)
    assert one.call("key", lambda a, b: b, 1, answer) is answer
    assert (one.faults_total, one.last_fault) == (0, None)


def test_a_fault_without_a_cause_has_none():
    with pytest.raises(PluginFault, match="key answered 'x', not a number") as caught:
        calls().call("key", doubt, "x")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("base", [KeyboardInterrupt, type("Mine", (KeyboardInterrupt,), {})])
def test_an_interrupt_is_let_through_and_is_no_fault(base, caplog):
    def interrupted(*args):
        raise base

    one = calls()
    with pytest.raises(base):
        one.call("key", interrupted)
    assert (one.faults_total, caplog.records) == (0, [])
    unshowable = type("Unshowable", (), {"__repr__": interrupted})()
    with pytest.raises(base):
        one.call("key", doubt, unshowable)
    with pytest.raises(base), blamed("it"):
        interrupted()


def test_of_many_faults_few_are_logged(caplog):
    one = calls()
    for _ in range(100):
        with pytest.raises(PluginFault):
            one.call("key", doubt, None)
    numbers = [record.getMessage().split("(fault ")[1].rstrip(")") for record in caplog.records]
    assert numbers == [*map(str, range(1, 11)), "16", "32", "64"]
    assert one.faults_total == 100


def test_a_plugin_that_is_slow_within_one_step_is_named_once(caplog):
    seconds = iter([0.0, 0.06, 0.06, 0.12, 0.12, 0.18, 0.18, 9.0]).__next__
    one = calls(seconds)
    one.call("order", int)
    one.begin_step()
    one.call("order", int)
    assert not caplog.records
    with pytest.raises(PluginFault):
        one.call("admit", doubt, None)
    one.call("order", int)
    slow = [record.getMessage() for record in caplog.records if "slow" in record.getMessage()]
    (message,) = slow
    assert message.startswith(f"{LABEL} is slow: admit took 0.06 s, of 0.12 s in one step")


@pytest.mark.parametrize("error", ERRORS)
def test_who_is_to_blame_stands_before_what_was_raised(error):
    raised = error("planted")
    with pytest.raises(PluginError) as caught, blamed("policy it can't be made"):
        raise raised
    assert str(caught.value) == f"policy it can't be made: {error.__name__}('planted')"
    assert caught.value.__cause__ is raised


def test_an_error_that_has_its_words_already_is_let_through():
    with pytest.raises(ValueError, match=r"^planted$"), blamed("it", ValueError):
        raise ValueError("planted")
