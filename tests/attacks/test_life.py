"""An engine and its streams at the wrong moment, with the wrong arguments, and never ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import (
    AioserveError,
    ConfigError,
    Engine,
    EngineClosedError,
    EngineError,
    LoadedModel,
    PluginError,
    PromptTooLongError,
    RequestView,
    SamplingParams,
    SchedulingPolicy,
    StreamBusyError,
    TokenStream,
    hookimpl,
)
from aioserve.config import EngineConfig
from aioserve.testing import (
    FakeModel,
    SimLoop,
    SimulationError,
    check_invariants,
    run_simulated,
)
from tests.attacks.engines import (
    ENDLESS,
    LONG,
    SHORT,
    a_model,
    awaited,
    by_hand,
    list_of,
    tasks_of_engines,
    threads_of_engines,
)
from tests.attacks.hostile import hostile_values, is_named, named_errors
from tests.waits import LIMIT_SECONDS, until

# -- arguments


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "deadline", ["5", math.nan, [], -1, -1e-9, True, 10**400, -math.inf, 1j, b"1"], ids=repr
)
@pytest.mark.asyncio
async def test_a_bad_deadline_is_refused_and_nothing_is_drained(deadline: Any) -> None:
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], SHORT)
        with pytest.raises(
            ConfigError, match="deadline_seconds must be a number of at least 0"
        ) as no:
            await engine.drain(deadline)
        limits: dict[object, float] = {-1: 0, -1e-9: 0, -math.inf: 0, 10**400: math.inf}
        limit = limits.get(deadline) if isinstance(deadline, int | float) else None
        assert (no.value.argument, no.value.limit) == ("deadline_seconds", limit)
        assert len([token async for token in stream]) == 4
        assert len((await engine.generate([1], SHORT)).token_ids) == 4
        assert await engine.drain(math.inf) == 0


class _Endless:
    def __iter__(self) -> Iterator[object]:
        return itertools.repeat(object())


class _Broken:
    def __iter__(self) -> Iterator[object]:
        raise OSError("planted")

    def __repr__(self) -> str:
        raise ValueError("planted")


@pytest.mark.parametrize("plugins", [_Endless(), _Broken(), 5, "x", None])
def test_plugins_that_are_no_sequence_are_refused(plugins: Any) -> None:
    with pytest.raises((ConfigError, PluginError), match="plugins"):
        Engine(a_model(), plugins=plugins)


@given(hostile_values(), st.sampled_from(["policy", "plugins"]))
def test_fuzz_what_an_engine_is_given_to_run(value: Any, option: str) -> None:
    async def main() -> None:
        with named_errors():
            async with Engine(a_model(), **{option: value}) as engine:
                await engine.generate([1], SHORT)

    asyncio.run(main())


@pytest.mark.more
@given(hostile_values())
def test_fuzz_deadlines(value: Any) -> None:
    async def main() -> None:
        async with Engine(a_model(step_seconds=lambda plan: 0.01)) as engine:
            stream = engine.stream([1], SamplingParams(max_tokens=20))
            with named_errors():
                await engine.drain(value)
                assert stream.finish_reason is not None
                return
            assert stream.finish_reason is None
            assert len((await engine.generate([1], SHORT)).token_ids) == 4

    run_simulated(main)


@given(hostile_values(), hostile_values(), hostile_values())
def test_fuzz_simulated_loops(main: Any, seed: Any, seconds: Any) -> None:
    async def block() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.block(seconds)

    for call in (
        lambda: run_simulated(main),
        lambda: run_simulated(lambda: main),
        lambda: run_simulated(block, seed=seed),
        lambda: run_simulated(block, max_rounds=seed),
    ):
        with named_errors(), contextlib.suppress(SimulationError):
            call()


# -- an error stays


@pytest.mark.parametrize("length", [300, 3000])
@pytest.mark.asyncio
async def test_a_stream_whose_start_raised_raises_when_it_is_read(length: int) -> None:
    async with Engine(a_model()) as engine:
        stream = engine.stream("x" * length)
        errors: list[AioserveError] = []
        for _ in range(2):
            for read in (stream.started, stream.__anext__, lambda: list_of(stream)):
                with pytest.raises(PromptTooLongError) as caught:
                    await read()
                errors.append(caught.value)
        assert len(set(map(id, errors))) == len(errors)
        assert {str(error) for error in errors} == {str(errors[0])}
        stream.close()
        with pytest.raises(PromptTooLongError):
            await stream.started()


@pytest.mark.asyncio
async def test_the_tokens_before_an_error_come_before_it() -> None:
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], LONG)
        await anext(stream)
        await anext(stream)
        assert await engine.drain(0) == 1
        left = stream.usage.completion_tokens - 2
        for _ in range(left):
            await stream.started()
            await anext(stream)
        for _ in range(3):
            with pytest.raises(EngineClosedError, match="drained"):
                await anext(stream)


@pytest.mark.asyncio
async def test_a_second_reader_is_told_so_by_name_and_the_first_reads_on() -> None:
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], SHORT)
        first = asyncio.create_task(list_of(stream))
        await asyncio.sleep(0)
        for read in (stream.started, stream.__anext__):
            with pytest.raises(StreamBusyError, match="another task is already reading"):
                await read()
        assert len(await first) == 4


# -- entering and leaving at any moment


class SlowModel(FakeModel):
    """Loads in some rounds of the loop and, like any model, holds a thread from then on."""

    def __init__(self, rounds: int = 3, seconds: float = 0.0) -> None:
        super().__init__(num_pages=64, step_seconds=lambda plan: 0.001)
        self.rounds, self.seconds = rounds, seconds
        self.num_loaded = self.num_closed = 0

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        for _ in range(self.rounds):
            await asyncio.sleep(self.seconds)
        loaded = await super().load(config, num_slots=num_slots)
        self.num_loaded += 1
        close = loaded.runner.aclose

        async def aclose() -> None:
            await asyncio.sleep(self.seconds)
            await asyncio.sleep(0)
            await close()
            self.num_closed += 1

        loaded.runner.aclose = aclose
        return loaded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["cancel", "exit", "exit twice", "timeout"])
def test_an_engine_left_after_any_number_of_rounds_of_entering_leaves_nothing(
    how: str, seed: int
) -> None:
    outcomes: set[str] = set()

    async def main(rounds: int) -> None:
        model = SlowModel()
        engine = Engine(model)
        entering = asyncio.create_task(engine.__aenter__())
        for _ in range(rounds):
            await asyncio.sleep(0)
        leaving: list[Awaitable[None]] = []
        if how == "cancel":
            entering.cancel()
        elif how == "timeout":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await engine.__aexit__(None, None, None)
        else:
            count = how.count("twice") + 1
            leaving = [engine.__aexit__(None, None, None) for _ in range(count)]
            await asyncio.gather(*leaving)
        async with asyncio.timeout(ENDLESS):
            (entered,) = await asyncio.gather(entering, return_exceptions=True)
        outcomes.add(type(entered).__name__)
        if how == "cancel":
            await engine.__aexit__(None, None, None)
        assert engine.state == "closed"
        assert model.num_loaded == model.num_closed
        assert not await tasks_of_engines()
        with pytest.raises(EngineClosedError):
            engine.stream([1])
        with pytest.raises(EngineClosedError, match="can be entered once"):
            await engine.__aenter__()

    for rounds in range(20):
        run_simulated(lambda rounds=rounds: main(rounds), seed=seed)
    last = {"cancel": "CancelledError"}.get(how, "EngineClosedError")
    assert outcomes == {"Engine", last}


@pytest.mark.asyncio
async def test_closing_while_a_real_model_loads_ends_its_thread() -> None:
    for rounds in (0, 1, 5, 50):
        engine = Engine("pyhelp", num_pages=16)
        entering = asyncio.create_task(engine.__aenter__())
        for _ in range(rounds):
            await asyncio.sleep(0)
        await engine.__aexit__(None, None, None)
        assert not threads_of_engines()
        with pytest.raises(EngineClosedError) as caught:
            await entering
        assert caught.value.state == "closed"
        assert not threads_of_engines()


@pytest.mark.asyncio
async def test_cancelling_while_a_real_model_loads_leaves_no_thread() -> None:
    for seconds in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3):
        engine = Engine("pyhelp", num_pages=16)
        entering = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(seconds)
        entering.cancel()
        try:
            await entering
        except asyncio.CancelledError:
            assert not await tasks_of_engines()
        else:
            await engine.__aexit__(None, None, None)
        assert not threads_of_engines()


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_while_an_engine_loads_or_closes_has_an_end(seed: int) -> None:
    async def main() -> None:
        model = SlowModel(seconds=1.0)
        engine = Engine(model)
        entering = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(1.5)
        for call in (engine.__aenter__, engine.drain, lambda: engine.generate([1])):
            with pytest.raises(EngineClosedError) as caught:
                await call()
            assert caught.value.state == "loading"
        assert await entering is engine
        reader = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        leaving = [asyncio.create_task(engine.__aexit__(None, None, None)) for _ in range(3)]
        await asyncio.sleep(0.5)
        leaving[0].cancel()
        with pytest.raises(EngineClosedError):
            await engine.drain(1)
        with pytest.raises(EngineClosedError, match="closed before this request ended"):
            await reader
        assert await draining == 0
        done = await asyncio.gather(*leaving, return_exceptions=True)
        assert [type(end).__name__ for end in done] == ["CancelledError", "NoneType", "NoneType"]
        await engine.__aexit__(None, None, None)
        assert (model.num_loaded, model.num_closed) == (1, 1)
        check_invariants(engine)

    run_simulated(main, seed=seed)


def test_an_engine_that_was_closed_before_it_was_entered_stays_closed() -> None:
    async def main() -> None:
        engine = Engine(a_model())
        await engine.__aexit__(None, None, None)
        with pytest.raises(EngineClosedError) as caught:
            await engine.__aenter__()
        assert caught.value.state == "closed"

    run_simulated(main)


def test_a_model_that_closes_the_engine_that_loads_it_is_told_so() -> None:
    class Closing(FakeModel):
        async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
            await engine.__aexit__(None, None, None)
            raise AssertionError

    engine = Engine(Closing())

    async def main() -> None:
        with pytest.raises(EngineError, match="can't be closed by the task that enters it"):
            await engine.__aenter__()

    run_simulated(main)


class _Plugin:
    """Raises where it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def aioserve_observers(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError("planted"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr
)
@pytest.mark.parametrize("where", ["plugin", "load", "scheduler"])
def test_whatever_is_raised_while_entering_leaves_nothing(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(SlowModel):
        async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
            if where == "load":
                raise error
            return await super().load(config, num_slots=num_slots)

    def raising(*args: object, **options: object) -> None:
        raise error

    model = Raising()
    plugins = [_Plugin(error)] if where == "plugin" else []
    engine = Engine(model, plugins=plugins)
    if where == "scheduler":
        monkeypatch.setattr("aioserve.engine.lifecycle.CoreLoop", raising)

    async def main() -> None:
        await engine.__aenter__()

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        asyncio.run(main())
    raised = caught.value
    if where == "plugin" and not isinstance(error, KeyboardInterrupt):
        assert is_named(raised)
    else:
        assert type(raised) is type(error)
    assert engine.state == "closed"
    assert model.num_loaded == model.num_closed
    assert not threads_of_engines()


# -- never closed


@pytest.mark.asyncio
async def test_an_engine_that_nobody_holds_and_nobody_closed_is_closed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = SlowModel()
    engine = await Engine(model).__aenter__()
    stream = engine.stream([1], LONG)
    await anext(stream)
    with pytest.warns(ResourceWarning, match="was never closed"):
        del engine
    assert "never closed: use `async with`" in caplog.text
    await until(lambda: model.num_closed)
    with pytest.raises(EngineClosedError, match="closed before this request ended"):
        await list_of(stream)
    assert not await tasks_of_engines()


@pytest.mark.more
def test_the_thread_of_an_engine_whose_loop_has_gone_ends_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: Engine | None = asyncio.run(Engine("pyhelp", num_pages=16).__aenter__())
    assert len(threads_of_engines()) == 1
    with pytest.warns(ResourceWarning, match="was never closed"):
        engine = None
    gc.collect()
    for thread in threads_of_engines():
        thread.join(LIMIT_SECONDS)
    assert engine is None
    assert not threads_of_engines()
    assert len(caplog.records) == 1


@pytest.mark.more
def test_the_thread_of_an_engine_ends_although_its_loop_is_closed_and_never_runs_again() -> None:
    loop = asyncio.new_event_loop()
    engine: Engine | None = loop.run_until_complete(Engine("pyhelp", num_pages=16).__aenter__())
    assert len(threads_of_engines()) == 1
    with pytest.warns(ResourceWarning, match="was never closed"):
        engine = None
    loop.close()
    gc.collect()
    for thread in threads_of_engines():
        thread.join(LIMIT_SECONDS)
    assert engine is None
    assert not threads_of_engines()


PROGRAM = """
import asyncio, signal, sys
from aioserve import Engine, SamplingParams
from aioserve.testing import FakeModel

LONG = SamplingParams(max_tokens=5000)
engine = Engine({model})
streams = []

async def enter():
    await engine.__aenter__()
    streams.extend(engine.stream([1, 2], LONG) for _ in range(2))
    await anext(streams[0])

async def with_block(leave):
    async with engine:
        stream = engine.stream([1, 2], LONG)
        await anext(stream)
        leave()
        await asyncio.sleep(5)

def never_run_again():
    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter())
    return loop

{end}
"""
MODELS = {
    "fake": "FakeModel(num_pages=64, step_seconds=lambda plan: 0.01)",
    "real": '"pyhelp", num_pages=64',
}
ENDS = {
    "the loop ended": ("asyncio.run(enter())", 0, True),
    "the loop was closed": ("never_run_again().close()", 0, True),
    "the loop was left": ("loop = never_run_again()", 0, True),
    "sys.exit": ("asyncio.run(enter()); sys.exit(3)", 3, True),
    "held by itself": ("asyncio.run(enter()); engine.itself = engine", 0, True),
    "sys.exit inside": ("asyncio.run(with_block(lambda: sys.exit(4)))", 4, False),
    "Ctrl-C inside": (
        "asyncio.run(with_block(lambda: signal.raise_signal(signal.SIGINT)))",
        -2,
        False,
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "end"),
    [
        pytest.param(model, end, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, model in enumerate(MODELS)
        for j, end in enumerate(ENDS)
    ],
)
def test_a_program_that_ends_says_of_an_engine_no_more_than_that_it_was_not_closed(
    model: str, end: str
) -> None:
    how, code, says_so = ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(model=MODELS[model], end=how)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    if end == "Ctrl-C inside":
        assert lines.pop() == "KeyboardInterrupt"
        assert "aioserve" not in lines[-1]
        return
    said = [line for line in lines if "never closed: use `async with`" in line]
    assert lines == said
    assert len(said) == says_so


# -- what plugins see


@pytest.mark.asyncio
async def test_the_request_that_plugins_are_asked_about_is_not_counted_as_waiting() -> None:
    counts = []

    class Counting:
        @hookimpl
        def aioserve_admit(self, request: object) -> None:
            counts.append(engine.stats().num_waiting)

    engine = Engine(a_model(max_model_len=2000), plugins=[Counting()], max_num_seqs=1)
    async with engine:
        running = engine.stream([1], LONG)
        await anext(running)
        streams = [engine.stream(prompt, SHORT) for prompt in ([1], "short", [2])]
        assert counts == [0, 0, 1, 2]
        assert engine.stats().num_waiting == 3
        running.close()
        for stream in streams:
            await list_of(stream)
        await engine.generate("long" * 200, SHORT)
    assert counts == [0, 0, 1, 2, 0]


def test_what_a_policy_keeps_of_a_request_that_has_ended_raises_nothing() -> None:
    kept: list[RequestView] = []

    class Keeping(SchedulingPolicy):
        def arrived(self, requests: Any) -> None:
            kept.extend(requests)

        def finished(self, requests: Any) -> None:
            look()

    def look() -> None:
        for request in kept:
            for name in vars(RequestView):
                if not name.startswith("_"):
                    value = getattr(request, name)
                    if callable(value):
                        value(2)

    async def main() -> None:
        async with Engine(a_model(), policy=Keeping(), max_num_seqs=3) as engine:
            streams = [engine.stream([1] * 40, LONG) for _ in range(6)]
            await anext(streams[0])
            two = SamplingParams(max_tokens=4, seed=1, n=2)
            await asyncio.gather(*(engine.generate([1] * 40, two) for _ in range(3)))
            for stream in streams:
                stream.close()
            await engine.drain()
            assert engine.stats().policy_faults_total == 0
            assert len(kept) >= 9
            look()
            for request in kept:
                assert request.pages == request.reclaimable_pages == request.lost_tokens == 0

    run_simulated(main)


# -- all of it in any order

WHERE = ["here", "here", "task", "task", "task", "thread", "another loop"]
STREAM = ["stream", "stream", "stream", "text", "generate"]
READ = ["read", "read", "read all", "started", "close", "aclose", "drop"]
WHAT = ["enter", "exit", *STREAM, *READ, "drain", "stats", "dump", "limits", "cancel", "wait"]


class Program:
    """Calls of one engine, drawn, and what has become of each."""

    def __init__(self, calls: list[tuple[str, str, int, Any]]) -> None:
        self.calls = calls
        self.model = SlowModel(seconds=0.5)
        self.engine = Engine(self.model, max_buffered_tokens=6, stall_timeout_seconds=2.0)
        self.streams: list[TokenStream] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def call(self, what: str, number: int, value: Any) -> Any:
        engine = self.engine
        if what in ("read", "read all", "started", "close", "aclose") and self.streams:
            stream = self.streams[number % len(self.streams)]
            reads = {"read": stream.__anext__, "read all": lambda: list_of(stream)}
            return reads.get(what, getattr(stream, what, None))()  # pyright: ignore
        match what:
            case "enter":
                return engine.__aenter__()
            case "exit":
                return engine.__aexit__(None, None, None)
            case "stream" | "text":
                prompt = "text " * (number * 50 + 1) if what == "text" else [number] * (number + 1)
                stream = engine.stream(prompt, SamplingParams(max_tokens=12, seed=number))
                self.streams.append(stream)
            case "drop":
                del self.streams[:1]
            case "drain":
                return engine.drain(value)
            case "generate":
                return engine.generate([number], SHORT)
            case "cancel":
                for task in self.tasks[number : number + 1]:
                    task.cancel()
            case "wait":
                return asyncio.sleep(number / 5)
            case "stats" | "dump":
                return getattr(engine, what)()
            case "limits":
                return engine.limits
        return None

    async def made(self, what: str, number: int, value: Any) -> None:
        with named_errors(), contextlib.suppress(StopAsyncIteration):
            await awaited(lambda: self.call(what, number, value))

    async def run(self) -> None:
        for what, where, number, value in self.calls:
            arguments = (what, number, value)
            if where == "task" or what in ("read", "read all", "started", "generate"):
                self.tasks.append(asyncio.create_task(self.made(*arguments)))
            elif where == "here" or what in ("enter", "drop", "cancel", "wait"):
                await self.made(*arguments)
            elif where == "thread":
                await asyncio.to_thread(self.by_hand, *arguments)
            else:
                await asyncio.to_thread(asyncio.run, self.made(*arguments))
        del self.streams[: len(self.streams) // 2]
        await self.engine.__aexit__(None, None, None)
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        for end in ends:
            assert end is None or isinstance(end, asyncio.CancelledError), end

    def by_hand(self, *arguments: Any) -> None:
        with named_errors(), contextlib.suppress(StopAsyncIteration, RuntimeError):
            by_hand(lambda: self.call(*arguments))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(WHAT),
            st.sampled_from(WHERE),
            st.integers(0, 5),
            st.one_of(st.none(), st.floats(0, 3), hostile_values()),
        ),
        max_size=14,
    ),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_fuzz_calls(calls: list[tuple[str, str, int, Any]], enters: bool, seed: int) -> None:
    log: list[logging.LogRecord] = []
    handler = logging.NullHandler()
    handler.handle = lambda record: bool(log.append(record))
    first = [("enter", "here", 0, None)] if enters else []
    program = Program([*first, *calls])

    async def main() -> None:
        async with asyncio.timeout(ENDLESS):
            await program.run()
        assert not await tasks_of_engines()

    logging.getLogger().addHandler(handler)
    try:
        run_simulated(main, seed=seed)
    finally:
        logging.getLogger().removeHandler(handler)
    assert not [record.getMessage() for record in log]
    assert not threads_of_engines()
    assert program.model.num_loaded == program.model.num_closed
    assert program.engine.state == "closed"
    if program.engine._lifecycle.is_started:
        check_invariants(program.engine)
        assert program.engine.stats().pages_held_by_requests == 0
