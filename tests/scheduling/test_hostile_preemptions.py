"""Policies harm no request by any answer about running ones. Nonsense is a fault, and endless ill
will only delays the requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.request import FinishReason
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import (
    Preempt,
    Refusal,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
    Verdict,
)
from aioserve.scheduling.view import Pin
from aioserve.testing.fake_device import expected_tokens
from tests.plugin_system.hostile import ERRORS, TOUCHES, HostileText, contained, hostile
from tests.scheduling.bench import Bench
from tests.scheduling.test_policy_calls import answering
from tests.tiers import examples

PROMPTS = [[20 * i + j for j in range(9)] for i in range(3)]
MAX_TOKENS = 7
PIN = Pin(1, "r", None, None, 4, 1)


def repeated(running, *args):
    return itertools.repeat(running[0])


def then_raising(running, *args):
    yield from running[:1]
    raise ValueError("planted")


NO_LIST = [
    (ValueError("planted"), "raised ValueError"),
    (SystemExit(3), "raised SystemExit"),
    (None, "raised TypeError"),
    (7, "raised TypeError"),
    (then_raising, "raised ValueError"),
    ([1], "answered 1, not one of"),
    ([None], "answered None, not one of"),
    (lambda running, view: itertools.count(), "answered 0, not one of"),
    (repeated, "or came before"),
    (lambda running, view: [*running, running[0]], "or came before"),
]
NO_NUMBER = [
    (ValueError("planted"), "raised ValueError"),
    (-1, "answered -1, not an int in"),
    (10**400, "not an int in"),
    (float("nan"), "answered nan, not an int in"),
    (1.0, "answered 1.0, not an int in"),
    ("all", "answered 'all', not an int in"),
]
NONSENSE = [
    *(
        (question, answer, said)
        for question in ("preempt", "order_prefills", "decode")
        for answer, said in NO_LIST
    ),
    *((question, answer, said) for question in ("reserve", "pin") for answer, said in NO_NUMBER),
    ("pin", None, "answered None, not an int in"),
    ("preempt", lambda running, view: [Preempt(running[0]), running[0]], "or came before"),
    ("preempt", lambda running, view: (Preempt(r) for r in repeated(running)), "or came before"),
    ("preempt", [Preempt("r")], "answered 'r', not one of"),  # pyright: ignore[reportArgumentType]
    ("preempt", lambda running, view: [Preempt(running[0], "drop")], "answered 'drop', not None"),  # pyright: ignore[reportArgumentType]
    ("preempt", lambda running, view: [Preempt(running[0], [])], "answered [], not None"),  # pyright: ignore[reportArgumentType]
    ("begin_step", ValueError("planted"), "raised ValueError"),
    ("begin_step", 7, "answered 7, not a StepBudget or None"),
    ("begin_step", StepBudget(tokens=0), "answered 0, not an int in [1, 16]"),
    ("begin_step", StepBudget(tokens=17), "answered 17, not an int in [1, 16]"),
    ("begin_step", StepBudget(tokens=1.0), "answered 1.0, not an int in [1, 16]"),  # pyright: ignore[reportArgumentType]
    ("begin_step", StepBudget(7), "raised TypeError"),  # pyright: ignore[reportArgumentType]
    ("begin_step", StepBudget([7]), "answered 7, not a TokenShare"),  # pyright: ignore[reportArgumentType]
    ("begin_step", StepBudget([TokenShare((), 5)], 4), "answered 5, not an int in [0, 4]"),
    ("begin_step", StepBudget([TokenShare((), -1)]), "answered -1, not an int in [0, 16]"),
    ("begin_step", StepBudget([TokenShare((), 9)] * 2), "whose shares have 18 of 16 tokens"),
    ("begin_step", StepBudget([TokenShare([None], 1)]), "answered None, not a request that"),  # pyright: ignore[reportArgumentType]
    ("begin_step", StepBudget([TokenShare(None, 1)]), "raised TypeError"),  # pyright: ignore[reportArgumentType]
    (
        "begin_step",
        lambda view: StepBudget([TokenShare(repeated((*view.running, *view.waiting)), 1)]),
        "or came before",
    ),
    (
        "begin_step",
        lambda view: StepBudget([TokenShare((*view.running, *view.waiting), 1)] * 2),
        "or came before",
    ),
    ("drop", ValueError("planted"), "raised ValueError"),
    ("drop", True, "answered True, not a Refusal or None"),
    ("drop", Verdict.NEVER, "not a Refusal or None"),
    ("drop", lambda request, view: Refusal(""), "raised ConfigError"),
]


def served(bench: Bench, prompts: list[list[int]] = PROMPTS) -> None:
    """Serve all prompts two steps ahead. Check that all get their tokens, and that nothing is
    left."""
    first = bench.submit(prompts[0], MAX_TOKENS)
    for prompt in prompts[1:]:
        bench.submit(prompt, MAX_TOKENS)
    received: dict[int, list[int]] = {first + i: [] for i in range(len(prompts))}
    pipeline = StepPipeline(bench.scheduler, lambda plan: plan, depth=2)
    for _ in range(5000):
        if not bench.sequences and not pipeline.num_in_flight:
            break
        pipeline.advance(0.0)
        bench.scheduler.sanity_check()
        if (plan := pipeline.due) is not None:
            for update in pipeline.finish(bench.device.execute(plan), 0.0):
                assert update.token_id is not None
                received[update.sequence_id].append(update.token_id)
    assert bench.scheduler.take_ended_unplanned() == []
    for prompt, tokens in zip(prompts, received.values(), strict=True):
        assert tokens == expected_tokens(prompt, MAX_TOKENS, 0)
    bench.scheduler.state.pins.end_all()
    assert bench.memory.num_available == bench.pool.num_pages


@pytest.mark.parametrize(("question", "answer", "said"), NONSENSE)
def test_nonsense_is_one_fault_a_step_and_everybody_is_served(question, answer, said, caplog):
    bench = Bench(policy=answering(question, answer), prefix_caching=True)
    with caplog.at_level(logging.ERROR):
        served(bench)
    policy_calls = bench.scheduler.policy_calls
    assert 1 <= policy_calls.faults_total <= bench.scheduler.counters.steps + 1
    assert f"scheduling policy Odd: {question} " in str(policy_calls.last_fault)
    assert said in str(policy_calls.last_fault)
    assert bench.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("pins", [None, [None], [PIN, PIN], [7], [Pin([], *[None] * 5)]])  # pyright: ignore[reportArgumentType]
def test_pins_stay_where_a_policy_names_them_in_nonsense(pins):
    policy = answering("pin", lambda request: request.computed_tokens)
    type(policy).unpin = lambda self, *_: pins  # pyright: ignore[reportAttributeAccessIssue]
    bench = Bench(policy=policy, prefix_caching=True)
    for _ in range(2):
        bench.submit(8, 1)
        bench.run()
    assert str(bench.scheduler.policy_calls.last_fault).startswith("scheduling policy Odd: unpin ")
    assert [pin.published for pin in bench.scheduler.state.pins.leases] == [2]


@pytest.mark.parametrize(
    ("touches", "error"),
    [*(([touch], ValueError) for touch in TOUCHES), *((TOUCHES, error) for error in ERRORS)],
)
@contained
def test_an_answer_that_raises_when_it_is_looked_at_harms_nobody(touches, error):
    answer = hostile(touches, error)
    asked: dict[str, Callable[..., Any]] = {
        "preempt": lambda running, view: [Preempt(r, answer) for r in running],
        "order_prefills": lambda running, view: [answer],
        "decode": lambda running, view: [answer],
        "begin_step": lambda view: StepBudget([TokenShare([answer], 1)]),
        "reserve": lambda request, view: answer,
        "drop": lambda request, view: answer,
        "pin": lambda request: answer,
    }
    for question, method in asked.items():
        bench = Bench(policy=answering(question, method), prefix_caching=True)
        served(bench)
        assert str(bench.scheduler.policy_calls.last_fault).startswith(
            f"scheduling policy Odd: {question} "
        )


def test_a_way_to_preempt_is_made_anew_of_a_plain_str():
    """The memory compares it again, and an exception there would not be caught."""
    way: Any = type(
        "Way",
        (HostileText,),
        dict.fromkeys(("__eq__", "__hash__", "__bool__"), lambda *args: 1 / 0),
    )("swap")
    policy = answering("preempt", lambda running, view: [Preempt(r, way) for r in running])
    bench = Bench(policy=policy, num_host_pages=32)
    served(bench)
    assert bench.scheduler.policy_calls.faults_total == 0
    assert bench.memory.usage().pages_swapped_out_total > 0


ILL_WILL: dict[str, list[Callable[..., Any]]] = {
    "order": [lambda waiting, view: (), lambda waiting, view: reversed(waiting)],
    "admit": [lambda request, view: Verdict.LATER],
    "chunk": [lambda request, budget, view: 0, lambda request, budget, view: min(budget, 1)],
    "victim": [lambda running, need, view: running[0], lambda running, need, view: running[-1]],
    "precedence": [lambda request: request.arrival_index, lambda request: -request.arrival_index],
    "displaces": [lambda request, running, view: (), lambda request, running, view: running],
    "preempt": [
        lambda running, view: running,
        lambda running, view: running[:1],
        lambda running, view: [Preempt(r, "swap") for r in running],
        lambda running, view: [Preempt(r, "recompute") for r in running[-1:]],
    ],
    "order_prefills": [lambda running, view: (), lambda running, view: reversed(running)],
    "decode": [
        lambda running, view: (),
        lambda running, view: running[-1:],
        lambda running, view: running[view.step % 2 :: 2],
    ],
    "begin_step": [
        lambda view: StepBudget(tokens=1),
        lambda view: StepBudget([TokenShare((), view.max_num_batched_tokens)]),
        lambda view: StepBudget([TokenShare(view.running[-1:], view.max_num_batched_tokens)]),
        lambda view: StepBudget([TokenShare(view.waiting, view.max_num_batched_tokens - 1)]),
    ],
    "reserve": [lambda request, view: view.pages_total, lambda request, view: 0],
    "pin": [lambda request: request.computed_tokens],
    "unpin": [lambda pins, view: pins],
}


@st.composite
def ill_willed(draw: st.DrawFn) -> SchedulingPolicy:
    """Draw a policy that answers each question in one way, for ever."""
    members: dict[str, Any] = {"victim_of_any_age": draw(st.booleans())}
    for question, answers in ILL_WILL.items():
        if (answer := draw(st.none() | st.sampled_from(answers))) is not None:
            members[question] = staticmethod(answer)
    return type("IllWilled", (SchedulingPolicy,), members)()


@settings(deadline=None, max_examples=examples(40))
@given(
    policy=ill_willed(),
    num_pages=st.sampled_from([4, 5, 8, 20]),
    num_host_pages=st.sampled_from([0, 3, 20]),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.sampled_from([1, 4, 16]),
    output_reserve_tokens=st.sampled_from([0, 8]),
    prefix_caching=st.booleans(),
)
def test_everybody_is_served_by_a_policy_of_ill_will(policy, **options):
    bench = Bench(policy=policy, **options)
    served(bench, [*PROMPTS, PROMPTS[0]])
    assert bench.scheduler.policy_calls.faults_total == 0


def test_one_is_dropped_once_whatever_else_is_wished_of_it():
    class Both(SchedulingPolicy):
        def preempt(self, running, view):
            return running

        def drop(self, request, view):
            return Refusal("enough") if request.generated_tokens else None

        def decode(self, running, view):
            return ()

    bench = Bench(policy=Both(), num_host_pages=8)
    ids = {bench.submit(prompt, MAX_TOKENS) for prompt in PROMPTS}
    ended = []
    for _ in range(200):
        plan = bench.scheduler.plan(0.0)
        bench.scheduler.sanity_check()
        ended += bench.scheduler.take_ended_unplanned()
        if plan is not None:
            bench.commit(plan)
        if not bench.sequences:
            break
    assert sorted(update.sequence_id for update in ended) == sorted(ids)
    assert {(u.rejected, u.error, u.finish_reason) for u in ended} == {
        (True, "enough", FinishReason.ERROR)
    }
    assert bench.pool.num_free == bench.pool.num_pages
    assert bench.host.num_held == 0
