"""Plugins that say which requests may enter; a check that breaks lets nobody in."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aioserve import (
    Engine,
    Refusal,
    RequestInfo,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    hookimpl,
)
from aioserve.plugins import PluginRegistry
from aioserve.testing import FakeModel, check_invariants, run_simulated
from tests.plugin_system.hostile import ERRORS, TOUCHES, contained, hostile
from tests.plugin_system.planted import entry_point

INFO = RequestInfo(
    request_id="r", prompt_tokens=3, max_tokens=5, num_samples=1, arrival_seconds=0.0
)
ANSWER = SamplingParams(max_tokens=5, seed=0)


class Check:
    """Answers what it is told to answer, and keeps what it was asked."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked: list[RequestInfo] = []

    @hookimpl
    def aioserve_admit(self, request):
        self.asked.append(request)
        return self.answer(request)


def fail(request):
    raise LookupError("planted")


class Unshowable(Exception):
    def __repr__(self):
        raise ValueError("planted")

    __str__ = __repr__


def raise_unshowable(request):
    raise Unshowable


def look_at_a_cancelled_task(request):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


@pytest.mark.asyncio
async def test_a_request_is_asked_about_once_and_the_reason_is_told():
    plugin = Check(lambda request: Refusal("no gold left") if request.tenant == "gold" else None)
    model = FakeModel(num_pages=128, max_model_len=2048)
    async with Engine(model, policy=SchedulingPolicy(), plugins=[plugin]) as engine:
        await engine.generate("hey", ANSWER, tenant="free", tpot_target_seconds=1.5)
        for prompt in ([1, 2], "hi", "long " * 200):
            stream = engine.stream(prompt, ANSWER, request_id="mine", tenant="gold")
            with pytest.raises(RequestRejectedError) as caught:
                async for _ in stream:
                    pass
            assert str(caught.value) == (
                "plugin Check (given to the engine) refused request 'mine': no gold left"
            )
        assert engine.stats().num_waiting == 0
        check_invariants(engine)
    assert [request.prompt_tokens for request in plugin.asked] == [3, 2, 2, 1000]
    first = plugin.asked[0]
    assert (first.tenant, first.max_tokens, first.num_samples) == ("free", 5, 1)
    assert (first.ttft_target_seconds, first.tpot_target_seconds) == (None, 1.5)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (fail, r"raised LookupError\('planted'\)"),
        (raise_unshowable, "raised <Unshowable instance"),
        (look_at_a_cancelled_task, "raised CancelledError"),
        (lambda request: sys.exit(3), r"raised SystemExit\(3\)"),
        (lambda request: True, "answered True, neither a Refusal nor None"),
        (lambda request: False, "answered False, neither a Refusal nor None"),
        (lambda request: "no", "answered 'no', neither a Refusal nor None"),
        (lambda request: Refusal, "neither a Refusal nor None"),
        (lambda request: Refusal(""), "raised ConfigError"),
        (lambda request: setattr(request, "tenant", "x"), "raised AttributeError"),
    ],
)
@pytest.mark.asyncio
async def test_a_check_that_breaks_refuses_and_names_its_plugin(answer, what, installed, caplog):
    installed.append(entry_point("quota", lambda: Check(answer)))
    async with Engine(FakeModel(), policy=SchedulingPolicy()) as engine:
        with pytest.raises(
            RequestRejectedError, match=rf"plugin quota \(some-dist 1.2\): aioserve_admit .*{what}"
        ) as caught:
            await engine.generate([1], ANSWER)
        assert (caught.value.__cause__ is not None) is ("raised" in what)
        check_invariants(engine)
    assert "plugin quota (some-dist 1.2): aioserve_admit" in caplog.text


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("touches", [["__class__"], ["__repr__"], TOUCHES])
@pytest.mark.parametrize("base", [object, Exception])
@contained
def test_an_answer_or_an_exception_that_raises_when_it_is_looked_at_refuses(base, touches, error):
    answer = hostile(touches, error, base=base)

    def ask(request):
        if base is Exception:
            raise answer
        return answer

    with pytest.raises(RequestRejectedError, match=r"plugin Check .*: aioserve_admit ") as caught:
        PluginRegistry([Check(ask)]).admission().check(INFO)
    assert type(str(caught.value)) is str


def test_a_check_that_always_breaks_does_not_fill_the_log(caplog):
    admission = PluginRegistry([Check(fail)]).admission()
    for _ in range(100):
        with pytest.raises(RequestRejectedError, match="LookupError"):
            admission.check(INFO)
    assert len(caplog.records) == 13


def test_an_interrupt_is_no_refusal(caplog):
    def interrupted(request):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PluginRegistry([Check(interrupted)]).admission().check(INFO)
    assert not caplog.records


def test_the_first_refusal_decides_and_the_others_are_not_asked(installed):
    class Late(Check):
        @hookimpl(trylast=True)
        def aioserve_admit(self, request):
            return super().aioserve_admit(request)

    class Early(Check):
        @hookimpl(tryfirst=True)
        def aioserve_admit(self, request):
            return super().aioserve_admit(request)

    asked = []

    def note(name, refuses=False):
        def answer(request):
            asked.append(name)
            return Refusal(name) if refuses else None

        return answer

    installed += [
        entry_point("a", lambda: Late(note("a"))),
        entry_point("b", lambda: Check(note("b"))),
        entry_point("c", lambda: Early(note("c"))),
        entry_point("d", lambda: Check(note("d", refuses=True))),
        entry_point("e", lambda: Check(note("e"))),
    ]
    admission = PluginRegistry([Check(note("given"))]).admission()
    with pytest.raises(RequestRejectedError, match=r"plugin d .* refused request 'r': d"):
        admission.check(INFO)
    assert asked == ["c", "given", "b", "d"]


def test_one_object_is_asked_once_however_often_it_is_found(installed):
    plugin = Check(lambda request: None)
    installed.append(entry_point("quota", lambda: plugin))
    PluginRegistry([plugin, plugin]).admission().check(INFO)
    assert plugin.asked == [INFO]


def test_a_check_may_leave_out_the_request(installed):
    class Closed:
        @hookimpl
        def aioserve_admit(self):
            return Refusal("closed")

    with pytest.raises(RequestRejectedError, match="closed"):
        PluginRegistry([Closed()]).admission().check(INFO)


def test_an_async_check_is_a_broken_plugin_and_not_an_open_door(installed):
    class Waiting:
        @hookimpl
        async def aioserve_admit(self, request):
            return None

    installed.append(entry_point("quota", Waiting))
    registry = PluginRegistry()
    assert "must be a plain function, got an async one" in str(registry.broken[0])


def test_a_request_that_is_refused_frees_its_id_and_holds_nothing():
    plugin = Check(lambda request: Refusal("closed") if request.prompt_tokens > 2 else None)

    async def main() -> None:
        async with Engine(
            FakeModel(), policy=SchedulingPolicy(), plugins=[plugin], max_waiting=1
        ) as engine:
            for _ in range(5):
                refused = engine.stream([1, 2, 3], ANSWER, request_id="one")
                served = engine.stream([1, 2], ANSWER, request_id="one")
                assert len([token async for token in served]) == 5
                with pytest.raises(RequestRejectedError):
                    await refused.started()
            await asyncio.sleep(1)
            check_invariants(engine)
            assert engine.stats().num_waiting == 0

    run_simulated(main)


@pytest.mark.parametrize("prompt", [[1, 2], "hi", "long " * 200])
def test_a_check_cannot_submit_to_the_engine_that_asks_it(prompt):
    """The request that it is asked about isn't counted yet, and its id not taken."""
    engines: list[Engine] = []
    others = []

    def submit_two(request):
        if request.request_id == "one":
            others.append(engines[1].stream([1, 2], ANSWER, request_id="other"))
            engines[0].stream([1, 2], ANSWER, request_id="one")

    plugin = Check(submit_two)
    model = FakeModel(num_pages=128, max_model_len=2048)

    async def main() -> None:
        async with (
            Engine(model, policy=SchedulingPolicy(), plugins=[plugin]) as engine,
            Engine(FakeModel(), policy=SchedulingPolicy(), plugins=[plugin]) as other,
        ):
            engines.extend([engine, other])
            with pytest.raises(
                RequestRejectedError, match=r"raised EngineError\(.aioserve_admit can't submit"
            ):
                await engine.generate(prompt, ANSWER, request_id="one")
            assert len([token async for token in others[0]]) == 5
            assert len((await engine.generate(prompt, ANSWER)).token_ids) == 5
            check_invariants(engine)

    run_simulated(main)
    assert [request.request_id for request in plugin.asked[:2]] == ["one", "other"]
    assert len(plugin.asked) == 3
