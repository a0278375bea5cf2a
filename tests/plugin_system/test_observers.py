"""Observers hear of every request and step, and can't harm the engine."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from aioserve import (
    AioserveError,
    Engine,
    FinishReason,
    Observer,
    ObserverSpec,
    PluginError,
    Refusal,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    hookimpl,
)
from aioserve.plugins import Observers, PluginRegistry, RequestSummary
from aioserve.testing import (
    FakeModel,
    Fault,
    Faults,
    check_invariants,
    random_step_seconds,
    run_simulated,
)
from tests.plugin_system.hostile import ERRORS, TOUCHES, contained, hostile
from tests.plugin_system.planted import entry_point


class Recorder(Observer):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def arrived(self, requests):
        assert requests
        self.told += [("arrived", request) for request in requests]

    def step_finished(self, step):
        self.told.append(("step", step))

    def finished(self, requests):
        assert requests
        self.told += [("finished", request) for request in requests]

    def of(self, kind: str) -> list:
        return [told for what, told in self.told if what == kind]


class ObserverPlugin:
    """Attaches what its factory makes, and keeps it."""

    def __init__(self, make=Recorder, name: str = "recorder") -> None:
        self.name = name
        self.make = make
        self.made: list = []

    @hookimpl
    def aioserve_observers(self):
        def factory():
            self.made.append(self.make())
            return self.made[-1]

        return [ObserverSpec(self.name, factory, "keeps what it is told")]


ANSWER = SamplingParams(max_tokens=5, seed=0)
SUMMARY = RequestSummary("r", None, FinishReason.STOP, None, 3, 5, 0.1, 0.2)


def serve(plugin: object, requests: int = 8) -> None:
    """A few requests through an engine, one after the other."""

    async def main() -> None:
        async with Engine(FakeModel(), plugins=[plugin]) as engine:
            for _ in range(requests):
                assert len((await engine.generate([1, 2], ANSWER)).token_ids) == 5
            check_invariants(engine)

    run_simulated(main)


def test_an_observer_hears_of_a_request_from_its_arrival_to_its_end():
    plugin = ObserverPlugin()

    async def main() -> None:
        async with Engine(FakeModel(step_seconds=lambda plan: 0.5), plugins=[plugin]) as engine:
            assert engine.dump()["observers"] == ["recorder (given to the engine)"]
            await asyncio.sleep(3)
            await engine.generate(
                [1, 2, 3], ANSWER, request_id="mine", tenant="gold", ttft_target_seconds=2
            )
            (observer,) = plugin.made
            assert [kind for kind, _ in observer.told[:2]] == ["arrived", "step"]
            ((kind, ended),) = observer.told[-1:]
            assert kind == "finished"
            (arrived,) = observer.of("arrived")
            assert (arrived.request_id, arrived.tenant, arrived.prompt_tokens) == (
                "mine",
                "gold",
                3,
            )
            assert (arrived.max_tokens, arrived.num_samples) == (5, 1)
            assert (arrived.ttft_target_seconds, arrived.tpot_target_seconds) == (2, None)
            assert arrived.arrival_seconds == pytest.approx(asyncio.get_running_loop().time() - 2.5)
            assert (ended.request_id, ended.tenant, ended.error) == ("mine", "gold", None)
            assert (ended.prompt_tokens, ended.completion_tokens) == (3, 5)
            assert ended.finish_reason is FinishReason.LENGTH
            assert ended.first_token_seconds == pytest.approx(0.5)
            assert ended.total_seconds == pytest.approx(2.5)
            assert ended.device_seconds == pytest.approx(2.5)
            assert (ended.encoding_seconds, ended.queued_seconds) == pytest.approx((0, 0))
            assert (ended.cached_tokens, ended.preemptions) == (0, 0)
            assert ended.inter_token_latency.count == 4
            first, *others = observer.of("step")
            assert (first.computed_tokens, first.num_sequences, first.failed) == (3, 1, False)
            assert [step.computed_tokens for step in others] == [1, 1, 1, 1]

    run_simulated(main)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("overlap", [True, False])
def test_whatever_happens_each_request_arrives_and_ends_once(seed, overlap):
    source = random.Random(seed)
    plugin = ObserverPlugin()
    rates = {Fault.STEP_RAISES: 0.02, Fault.LAUNCH_RAISES: 0.02, Fault.BAD_ROW: 0.05}
    delivered: dict[str, int] = {}

    async def one(engine: Engine, number: int) -> None:
        await asyncio.sleep(source.uniform(0, 1))
        params = SamplingParams(max_tokens=source.randint(1, 12), n=source.choice([1, 1, 2]))
        prompt = [number % 3] * source.randint(1, 20)
        name = f"r{number}"
        leave_after = source.choice([0, 1, 3, 99, 99])
        delivered[name] = 0
        try:
            async with engine.stream(prompt, params, request_id=name) as stream:
                if leave_after == 0:
                    await asyncio.sleep(source.choice([0, 0.02]))
                    return
                async for _ in stream:
                    delivered[name] += 1
                    if delivered[name] == leave_after:
                        return
        except AioserveError:
            return

    async def main() -> None:
        model = FakeModel(
            num_pages=8,
            max_model_len=64,
            step_seconds=random_step_seconds(0.001, 0.1, seed=seed),
            faults=Faults(rates=rates, seed=seed),
        )
        async with Engine(model, plugins=[plugin], overlap=overlap, page_size=4) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(30)))
            late = engine.stream([1], SamplingParams(max_tokens=40), request_id="late")
            await asyncio.sleep(source.uniform(0, 0.1))
            check_invariants(engine)
        late.close()

    logging.disable(logging.ERROR)
    try:
        run_simulated(main, seed=seed)
    finally:
        logging.disable(logging.NOTSET)
    (observer,) = plugin.made
    arrived = [request.request_id for request in observer.of("arrived")]
    ended = [request.request_id for request in observer.of("finished")]
    assert len(set(arrived)) == len(arrived)
    assert sorted(arrived) == sorted(ended)
    assert len(arrived) > 10
    seen: set[str] = set()
    for kind, told in observer.told:
        if kind == "arrived":
            seen.add(told.request_id)
        elif kind == "finished":
            assert told.request_id in seen
            assert told.completion_tokens >= delivered.get(told.request_id, 0)
            assert (told.finish_reason is FinishReason.ERROR) <= (told.error is not None)
    steps = [step.step for step in observer.of("step")]
    assert steps == list(range(1, len(steps) + 1)) or steps == list(range(len(steps)))


def test_a_request_that_the_policy_refuses_has_arrived_and_ended_with_its_error():
    class Never(SchedulingPolicy):
        def admit(self, request, view):
            return Refusal("closed")

    plugin = ObserverPlugin()

    async def main() -> None:
        async with Engine(FakeModel(), policy=Never(), plugins=[plugin]) as engine:
            with pytest.raises(RequestRejectedError):
                await engine.generate([1])
            await asyncio.sleep(1)
            (ended,) = plugin.made[0].of("finished")
            assert ended.error.startswith("RequestRejectedError: ")
            assert ended.error.endswith("closed")

    run_simulated(main)


def test_an_observer_hears_of_requests_that_end_with_the_engine():
    plugin = ObserverPlugin()

    async def main() -> None:
        async with Engine(FakeModel(), plugins=[plugin], max_buffered_tokens=2) as engine:
            stream = engine.stream([1], SamplingParams(max_tokens=40), request_id="slow")
            await asyncio.sleep(5)  # nobody reads: the request pauses, and the loop sleeps
            assert plugin.made[0].of("finished") == []
        (ended,) = plugin.made[0].of("finished")
        assert (ended.request_id, ended.finish_reason) == ("slow", FinishReason.ABORT)
        assert ended.error.startswith("EngineClosedError: ")
        stream.close()

    run_simulated(main)


def test_each_engine_has_observers_of_its_own(installed):
    plugin = ObserverPlugin()
    installed.append(entry_point("recorder", lambda: plugin))
    for _ in range(2):
        serve_nothing_else(plugin)
    assert len(plugin.made) == 2
    assert len(plugin.made[0].of("finished")) == len(plugin.made[1].of("finished")) == 1


def serve_nothing_else(plugin: ObserverPlugin) -> None:
    async def main() -> None:
        async with Engine(FakeModel(), policy=SchedulingPolicy()) as engine:
            await engine.generate([1], ANSWER)

    run_simulated(main)


# Those that fail.


def failing(*methods: str, times: int | None = None, error: BaseException | None = None):
    """An observer class whose `methods` raise, the first so many times."""
    error = ValueError("planted") if error is None else error

    class Failing(Recorder):
        calls = 0

    def fail(self, told):
        self.calls += 1
        if times is None or self.calls <= times:
            raise error

    for method in methods:
        setattr(Failing, method, fail)
    return Failing


@pytest.mark.parametrize("method", ["arrived", "step_finished", "finished"])
def test_an_observer_that_keeps_failing_is_detached_by_name(method, installed, caplog):
    """The failing method may be called between others that work."""
    bad, good = ObserverPlugin(failing(method), "bad"), ObserverPlugin()
    installed.append(entry_point("bad", lambda: bad))

    async def main() -> None:
        async with Engine(FakeModel(), policy=SchedulingPolicy(), plugins=[good]) as engine:
            for _ in range(8):
                await engine.generate([1, 2], ANSWER)
            assert engine.dump()["observers"] == ["recorder (given to the engine)"]

    run_simulated(main)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        *[
            f"observer bad (some-dist 1.2): {method} raised ValueError('planted'); "
            f"3 in a row detach it (fault {number})"
            for number in (1, 2, 3)
        ],
        f"observer bad (some-dist 1.2) is detached: {method} raised 3 times in a row",
    ]
    assert caplog.records[0].exc_info is not None
    assert bad.made[0].calls == 3
    assert len(good.made[0].of("finished")) == 8


@pytest.mark.parametrize("error", [asyncio.CancelledError("planted"), SystemExit("planted")])
@pytest.mark.parametrize("method", ["arrived", "step_finished", "finished"])
def test_what_an_observer_raises_is_its_own_whatever_it_is(method, error, caplog):
    """A look at the result of a cancelled task raises `CancelledError`."""
    serve(ObserverPlugin(failing(method, error=error)))
    messages = [record.getMessage() for record in caplog.records]
    told = f"observer recorder (given to the engine): {method} raised {error!r}"
    assert [message.partition(";")[0] for message in messages[:3]] == [told] * 3
    assert "is detached" in messages[3]


@pytest.mark.parametrize("error", ERRORS)
@contained
def test_an_exception_that_raises_when_it_is_looked_at_is_a_failure_like_any_other(error):
    observers = Observers()
    observers.attach(failing("finished", error=hostile(TOUCHES, error, base=Exception))(), "it")
    observers.attach(Recorder(), "another")
    for _ in range(3):
        assert observers.labels == ("it", "another")
        observers.tell([], None, [SUMMARY])
    assert observers.labels == ("another",)


def test_an_observer_that_fails_every_other_time_does_not_fill_the_log(caplog):
    class Fickle(Observer):
        calls = 0

        def finished(self, requests):
            self.calls += 1
            assert self.calls % 2

    observers = Observers()
    observers.attach(Fickle(), "it")
    for _ in range(200):
        observers.tell([], None, [SUMMARY])
    assert observers.labels == ("it",)
    assert len(caplog.records) == 13


def test_an_interrupt_is_no_failure_of_the_observer(caplog):
    observers = Observers()
    observers.attach(failing("finished", error=KeyboardInterrupt())(), "it")
    with pytest.raises(KeyboardInterrupt):
        observers.tell([], None, [SUMMARY])
    assert observers.labels == ("it",)
    assert not caplog.records


def test_an_observer_that_fails_now_and_then_stays(caplog):
    plugin = ObserverPlugin(failing("finished", times=2))
    serve(plugin, requests=6)
    assert plugin.made[0].calls == 6
    assert len(caplog.records) == 2


class Waiting(Observer):
    async def finished(self, requests):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 1 // 0, "observer bad (some-dist 1.2) can't be made: ZeroDivisionError"),
        (dict, "observer bad (some-dist 1.2): its factory made {}, no Observer"),
        (lambda *, need: Recorder(), "observer 'bad' needs the option need"),
        (
            Waiting,
            "observer bad (some-dist 1.2): Waiting.finished must be a plain function",
        ),
    ],
)
def test_an_observer_that_cannot_be_made_is_left_out(make, message, installed, monkeypatch, caplog):
    class Plugin:
        @hookimpl
        def aioserve_observers(self):
            return [ObserverSpec("bad", make)]

    installed.append(entry_point("bad", Plugin))
    registry = PluginRegistry()
    assert not registry.make_observers()
    assert message in str(registry.broken[0].cause)
    assert "plugin left out: bad (some-dist 1.2)" in caplog.text

    monkeypatch.setenv("AIOSERVE_PLUGINS", "bad")
    with pytest.raises(AioserveError) as caught:
        PluginRegistry().make_observers()
    assert message in str(caught.value)
    monkeypatch.delenv("AIOSERVE_PLUGINS")
    installed.clear()
    with pytest.raises(AioserveError) as caught:
        PluginRegistry([Plugin()]).make_observers()
    assert message.replace("some-dist 1.2", "given to the engine") in str(caught.value)


def test_two_plugins_may_not_offer_one_observer(installed):
    installed += [entry_point(name, ObserverPlugin) for name in ("a", "b")]
    (broken,) = PluginRegistry().broken
    assert "observer 'recorder' is offered by plugin a (some-dist 1.2) too" in str(broken)


@pytest.mark.asyncio
async def test_a_broken_plugin_that_the_environment_names_keeps_an_engine_from_starting(
    installed, monkeypatch
):
    installed.append(entry_point("audit", lambda: 1 // 0))
    async with Engine(FakeModel(), policy=SchedulingPolicy()):
        pass
    monkeypatch.setenv("AIOSERVE_PLUGINS", "audit")
    with pytest.raises(PluginError, match=r"can't be loaded: audit \(some-dist 1.2\): ZeroDiv"):
        async with Engine(FakeModel(), policy=SchedulingPolicy()):
            pass
