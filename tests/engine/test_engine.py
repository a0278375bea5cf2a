"""An engine in its host program: options, prompts, errors, faults, ends."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import multiprocessing
import signal
import sys
import threading

import msgspec
import numpy as np
import pytest

from aioserve import (
    ConfigError,
    DuplicateRequestError,
    Engine,
    EngineClosedError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    PromptTooLongError,
    QueueFullError,
    Refusal,
    RequestFailedError,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    StepError,
    UnknownPolicyError,
    Verdict,
    WrongLoopError,
)
from aioserve.testing import run_simulated
from aioserve.testing.fake_model import FakeModel, expected_tokens
from aioserve.text.tokenizer import Tokenizer
from tests.engine.idle import all_given_back
from tests.waits import LIMIT_SECONDS, until

PROMPT = [1, 2, 3, 4, 5]
SHORT = SamplingParams(max_tokens=10, seed=0)
LONG = SamplingParams(max_tokens=200, seed=0)


def slow_model(**options) -> FakeModel:
    return FakeModel(**{"num_pages": 256, "step_seconds": lambda plan: 0.001, **options})


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.asyncio
async def test_tokens_depend_on_the_prompt_alone(overlap, page_size, chunk, scarce):
    prompts = [[i + 1] * (1 + 7 * i % 50) for i in range(12)]
    num_pages = -(-80 // page_size) if scarce else 4096 // page_size
    model = FakeModel(num_pages=num_pages, max_model_len=80)
    options = {"page_size": page_size, "max_num_batched_tokens": chunk, "overlap": overlap}
    params = SamplingParams(max_tokens=30, seed=7)
    async with Engine(model, output_reserve_tokens=0, **options) as engine:
        answers = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        stats = engine.stats()
    assert stats.pages_held_by_requests == stats.pages_fenced == 0
    if scarce and chunk > 7 and page_size < 64:
        assert stats.preemptions_total > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == expected_tokens(prompt, 30, seed=7)


@pytest.mark.asyncio
async def test_two_engines_live_on_one_loop_and_a_third_of_their_streams_are_abandoned():
    async with Engine(slow_model()) as one, Engine(slow_model()) as other:

        async def use(index: int) -> None:
            engine = (one, other)[index % 2]
            async for token in engine.stream([index + 1], LONG):
                if index % 3 == 0 and token.index == index:
                    break

        await asyncio.gather(*(use(index) for index in range(64)))
        for engine in (one, other):
            await engine.drain()
            assert await all_given_back(engine)


@pytest.mark.asyncio
async def test_the_host_process_is_left_as_it_was():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    start_method = multiprocessing.get_start_method(allow_none=True)
    threads = set(threading.enumerate())
    tasks = asyncio.all_tasks()
    async with Engine("pyhelp", num_pages=64) as engine:
        await engine.generate(PROMPT, SHORT)
        assert [t for t in threading.enumerate() if t.name == "aioserve-pyhelp"]
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    assert multiprocessing.get_start_method(allow_none=True) == start_method
    assert not multiprocessing.active_children()
    assert {t for t in threading.enumerate() if t.name.startswith("aioserve")} <= threads
    assert asyncio.all_tasks() == tasks


# -- bad input


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InvalidPromptError, "must not be empty"),
        ([], InvalidPromptError, "must not be empty"),
        (None, InvalidPromptError, "got NoneType"),
        (b"bytes", InvalidPromptError, "got bytes"),
        (7, InvalidPromptError, "got int"),
        ({"role": "user"}, InvalidPromptError, "got dict"),
        ([1, 256], InvalidPromptError, r"in \[0, 256\), got 256 at index 1"),
        ([-1], InvalidPromptError, "got -1 at index 0"),
        ([1.5], InvalidPromptError, "got 1.5 at index 0"),
        ([[1], [2]], InvalidPromptError, r"got list of list: \[\[1\], \[2\]\]"),
        ([[1], [2, 3]], InvalidPromptError, r"got list of list: \[\[1\], \[2, 3\]\]"),
        ([2**70], InvalidPromptError, f"got {2**70} at index 0"),
        (["a"], InvalidPromptError, r"got list of str: \['a'\]"),
        ([{"role": "user", "content": "hi"}], InvalidPromptError, "no chat template"),
        ("x" * 32_769, PromptTooLongError, "has 32769 characters"),
        (np.array(5), InvalidPromptError, "got ndarray"),
        (bytearray(b"ab"), InvalidPromptError, "got bytearray"),
        ([1] * 256, PromptTooLongError, "has 256 tokens; max_model_len is 256"),
    ],
)
@pytest.mark.asyncio
async def test_a_bad_prompt_is_refused_by_name_at_once(prompt, error, message):
    async with Engine(slow_model()) as engine:
        with pytest.raises(error, match=message):
            engine.stream(prompt)
        assert engine.stats().num_waiting == 0
        assert len((await engine.generate(PROMPT, SHORT)).token_ids) == 10


@pytest.mark.parametrize("length", [300, 3000])
@pytest.mark.asyncio
async def test_a_text_too_long_for_the_model_fails_at_the_first_read(length):
    async with Engine(slow_model()) as engine:
        stream = engine.stream("x" * length)
        with pytest.raises(PromptTooLongError, match=f"{length} tokens; max_model_len is 256"):
            await anext(stream)
        assert stream.finish_reason == "error"
        assert engine.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a number in \[0, 100\], got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and at most 1, got 1.1"),
        ({"top_k": -2}, r"top_k must be an int in \[-1, 9223372036854775807\], got -2"),
        ({"min_p": -0.1}, r"min_p must be a number in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p must be a number in \[0, 1\], got 1.1"),
        ({"typical_p": 0}, "typical_p must be a number above 0 and at most 1, got 0"),
        ({"typical_p": 1.1}, "typical_p must be a number above 0 and at most 1, got 1.1"),
        ({"max_tokens": 0}, r"max_tokens must be an int in \[1, .*, got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be an int"),
        ({"seed": -1}, "seed must be an int in"),
        ({"seed": 2**64}, "seed must be an int in"),
        ({"stop": ("",)}, r"stop\[0\] must be a str of 1 to 256 characters, got ''"),
        ({"stop": ("x",) * 17}, "stop must have at most 16 entries, got 17"),
        (
            {"stop": ("x" * 256,) * 4 + ("y",)},
            "stop must have at most 1024 characters .*, got 1025",
        ),
        ({"stop": 5}, "stop must be a str of 1 to 256 characters, got 5"),
        ({"stop": (1,)}, r"stop\[0\] must be a str of 1 to 256 characters, got 1"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids\[0\] must be an int in \[0, .*, got -1"),
        ({"ignore_eos": 1}, "ignore_eos must be a bool"),
        ({"n": 0}, r"n must be an int in \[1, .*, got 0"),
        ({"n": True}, "n must be an int in .*, got True"),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name(fields, message):
    with pytest.raises(InvalidSamplingError, match=message):
        SamplingParams(**fields)


def test_a_sampling_parameter_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="vocabulary_penalty"):
        SamplingParams(vocabulary_penalty=1.0)  # pyright: ignore[reportCallIssue]


def test_one_stop_string_needs_no_tuple():
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.asyncio
async def test_what_only_the_model_can_tell_about_parameters_is_checked_at_once():
    async with Engine(slow_model()) as engine:
        with pytest.raises(InvalidSamplingError, match="below the vocabulary size 256, got 256"):
            engine.stream(PROMPT, SamplingParams(stop_token_ids=(256,)))
        with pytest.raises(InvalidSamplingError, match="params must be SamplingParams"):
            engine.stream(PROMPT, {"max_tokens": 3})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 3}, "page_size must be one of 1, 2, 4"),
        ({"page_size": True}, "page_size must be one of"),
        ({"num_pages": 0}, r"num_pages must be an int in \[1, "),
        ({"memory_utilization": 0}, "memory_utilization must be a number above 0 and at most 1"),
        ({"memory_utilization": "1"}, "memory_utilization must be a number"),
        ({"page_size": 16.0}, "page_size must be one of"),
        ({"max_num_seqs": 10**9}, r"max_num_seqs must be an int in \[1, 65536\]"),
        ({"seed": 2**64}, "seed must be an int"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        (
            {"device": "gpu"},
            "device must be one of 'auto', 'cpu', 'cuda', or 'cuda:N' with .*'gpu'",
        ),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"overlap": 1}, "overlap must be a bool"),
        ({"prefix_caching": 1}, "prefix_caching must be a bool, got 1"),
        ({"partial_page_reuse": None}, "partial_page_reuse must be a bool"),
        ({"eviction": None}, "eviction must be a str of 1 to 256 characters, got None"),
        ({"eviction": ""}, "eviction must be a str of 1 to 256 characters, got ''"),
        ({"num_host_pages": -1}, r"num_host_pages must be an int in \[0, .*got -1"),
        ({"preemption": "never"}, "preemption must be one of 'auto', 'recompute', 'swap'"),
        ({"preemption": "swap"}, 'preemption="swap" needs num_host_pages of at least 1, got 0'),
        ({"stall_timeout_seconds": 0}, "stall_timeout_seconds must be a number above 0"),
        ({"policy": 7}, "policy must be a name or a SchedulingPolicy"),
        ({"plugins": "fair_share"}, "plugins must be a sequence of .* got 'fair_share'"),
        ({"plugins": SamplingParams()}, "plugins must be a sequence of .* got SamplingParams"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(**options)


@pytest.mark.asyncio
async def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(UnknownPolicyError, match=r"no scheduling policy 'lifo'; there are: .*fcfs"):
        await Engine(slow_model(), policy="lifo").__aenter__()


@pytest.mark.asyncio
async def test_request_ids_are_exact_and_unique_among_live_requests():
    async with Engine(slow_model()) as engine:
        hundred = engine.stream(PROMPT, SHORT, request_id="r100")
        one = engine.stream(PROMPT, LONG, request_id="r1")
        ten = engine.stream(PROMPT, SHORT, request_id="r10")
        with pytest.raises(DuplicateRequestError, match="'r1'"):
            engine.stream(PROMPT, request_id="r1")
        one.close()
        for other in (ten, hundred):
            assert len([token async for token in other]) == 10
        for _ in range(2):
            assert (await engine.generate(PROMPT, SHORT, request_id="r1")).request_id == "r1"
        for bad in ("", "x" * 257, 5):
            with pytest.raises(InvalidRequestError, match="request_id must be a str of 1 to 256"):
                engine.stream(PROMPT, request_id=bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, b"tenant"])
@pytest.mark.asyncio
async def test_a_bad_cache_salt_is_refused_at_once(salt):
    async with Engine(slow_model()) as engine:
        with pytest.raises(InvalidRequestError, match="cache_salt must be a str of 1 to 256"):
            engine.stream(PROMPT, cache_salt=salt)
        assert engine.stats().num_waiting == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("most", "told"), [(1, "1 request waits"), (2, "2 requests wait")])
async def test_a_full_queue_refuses_the_next_request(most: int, told: str):
    async with Engine(slow_model(), max_num_seqs=1, max_waiting=most) as engine:
        running = engine.stream(PROMPT, LONG)
        await anext(running)
        waiting = [engine.stream(PROMPT, SHORT) for _ in range(most)]
        with pytest.raises(QueueFullError, match=f"^{told}; max_waiting is {most}"):
            engine.stream(PROMPT, SHORT)
        running.close()
        for stream in waiting:
            assert len([token async for token in stream]) == 10


@pytest.mark.asyncio
async def test_long_prompts_are_encoded_off_the_loop_in_the_callers_context(monkeypatch):
    seen: list[tuple[bool, str]] = []
    who = contextvars.ContextVar("who", default="nobody")
    loop_thread = threading.get_ident()
    encode = Tokenizer.encode

    def recording(self, text, **options):
        seen.append((threading.get_ident() == loop_thread, who.get()))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recording)
    async with Engine(slow_model(max_model_len=4000)) as engine:
        who.set("caller")
        await engine.generate("short", SHORT)
        await engine.generate("long" * 500, SHORT)
    assert seen == [(True, "caller"), (False, "caller")]


@pytest.mark.asyncio
async def test_a_stream_left_while_its_prompt_is_encoded_is_never_computed(monkeypatch):
    encoding, go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def waiting(self, text, **options):
        encoding.set()
        go_on.wait(LIMIT_SECONDS)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", waiting)
    async with Engine(slow_model(max_model_len=4000)) as engine:
        stream = engine.stream("long" * 500, SHORT)
        assert await asyncio.to_thread(encoding.wait, LIMIT_SECONDS)
        assert engine.stats().num_waiting == 1
        stream.close()
        go_on.set()
        await engine.drain()
        assert engine.stats().tokens_prefilled_total == 0


@pytest.mark.asyncio
async def test_a_tokenizer_that_breaks_fails_its_request_alone(monkeypatch):
    def broken(self, text, **options):
        raise OSError("planted")

    monkeypatch.setattr(Tokenizer, "encode", broken)
    async with Engine(slow_model()) as engine:
        for text in ("short", "long" * 500):
            with pytest.raises(RequestFailedError, match="can't be encoded: OSError"):
                await engine.generate(text, SHORT)
        assert len((await engine.generate(PROMPT, SHORT)).token_ids) == 10


# -- faults


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.asyncio
async def test_a_failed_step_ends_its_requests_and_no_others(overlap, caplog):
    def disturb(index, plan, outcome):
        if index == 5:
            raise OSError("planted")
        return outcome

    async with Engine(slow_model(disturb=disturb), max_num_seqs=2, overlap=overlap) as engine:
        answers = await asyncio.gather(
            *(engine.generate(PROMPT, SHORT) for _ in range(4)), return_exceptions=True
        )
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(failed) == 2
        for error in failed:
            assert isinstance(error, StepError)
            assert isinstance(error.__cause__, OSError)
        assert "step 5 failed" in caplog.text
        assert await all_given_back(engine)


@pytest.mark.asyncio
async def test_logits_that_are_nan_end_that_row_alone():
    def disturb(index, plan, outcome):
        rows = [item for item in plan.items for _ in item.rows]
        bad = {row: "the logits are NaN" for row, item in enumerate(rows) if item.token_ids[0] == 9}
        return msgspec.structs.replace(outcome, row_errors=bad)

    async with Engine(slow_model(disturb=disturb)) as engine:
        good, bad = await asyncio.gather(
            engine.generate([8], SHORT), engine.generate([9], SHORT), return_exceptions=True
        )
        assert not isinstance(good, BaseException)
        assert list(good.token_ids) == expected_tokens([8], 10)
        assert isinstance(bad, RequestFailedError)
        assert "NaN" in str(bad)


@pytest.mark.asyncio
async def test_a_bug_in_the_core_loop_ends_every_request_and_is_reported(monkeypatch, caplog):
    async with Engine(slow_model()) as engine:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        monkeypatch.setattr(engine._lifecycle.scheduler, "plan", lambda now: 1 / 0)
        with pytest.raises(EngineError, match="the engine failed") as caught:
            async for _ in stream:
                pass
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineClosedError, match="the engine failed"):
            engine.stream(PROMPT)
    assert "the core loop failed" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_every_request_and_reaches_whoever_runs_the_event_loop(
    error, monkeypatch, caplog
):
    """Ctrl-C interrupts whatever runs at that moment, for example a policy."""
    ended = []

    class Interrupted(SchedulingPolicy):
        def chunk(self, request, budget_tokens, view):
            raise KeyboardInterrupt

    async def main():
        async with Engine(slow_model(), policy=Interrupted()) as engine:
            if error is SystemExit:
                monkeypatch.setattr(engine._lifecycle.scheduler, "plan", sys.exit)
            stream = engine.stream(PROMPT, LONG)
            try:
                await asyncio.sleep(LIMIT_SECONDS)
            finally:
                with pytest.raises(EngineError, match=f"was ended by {error.__name__}"):
                    await anext(stream)
                with pytest.raises(EngineClosedError, match="the engine failed") as caught:
                    engine.stream(PROMPT)
                assert isinstance(caught.value.__cause__, error)
                ended.append(error)

    with pytest.raises(error):
        asyncio.run(main())
    gc.collect()
    assert ended == [error]
    assert not caplog.records


@pytest.mark.asyncio
async def test_drain_ends_though_the_last_word_to_the_observers_fails(monkeypatch, caplog):
    async with Engine(slow_model()) as engine:
        stream = engine.stream(PROMPT, LONG)
        monkeypatch.setattr(engine._lifecycle.core.observer_events, "tell", lambda: 1 / 0)
        monkeypatch.setattr(engine._lifecycle.scheduler, "plan", lambda now: 1 / 0)
        assert await engine.drain() == 0
        with pytest.raises(EngineError):
            await anext(stream)
    del engine, stream
    gc.collect()
    assert "Task exception was never retrieved" in caplog.text


@pytest.mark.asyncio
async def test_a_request_that_the_policy_refuses_fails_by_name():
    class Refusing(SchedulingPolicy):
        def admit(self, request, view):
            return Verdict.NEVER if request.prompt_tokens == 3 else Verdict.NOW

    async with Engine(slow_model(), policy=Refusing()) as engine:
        with pytest.raises(RequestRejectedError, match="Refusing refused request 'x'"):
            await engine.generate([1, 2, 3], SHORT, request_id="x")
        assert len((await engine.generate(PROMPT, SHORT)).token_ids) == 10


@pytest.mark.asyncio
async def test_the_reason_of_a_refusal_stands_in_the_error():
    class Strict(SchedulingPolicy):
        def admit(self, request, view):
            if request.tenant == "greedy":
                return Refusal(f"{request.tenant} has had {view.processed_tokens} tokens")
            return Verdict.NOW

    async with Engine(slow_model(), policy=Strict()) as engine:
        assert len((await engine.generate(PROMPT, SHORT, tenant="modest")).token_ids) == 10
        message = "Strict refused request 'x': greedy has had 14 tokens"
        with pytest.raises(RequestRejectedError, match=message):
            await engine.generate(PROMPT, SHORT, request_id="x", tenant="greedy")
        assert await all_given_back(engine)


@pytest.mark.parametrize("prompt", [PROMPT, "ab", "ab" * 50])
@pytest.mark.asyncio
async def test_a_policy_sees_what_the_caller_says_of_a_request(prompt):
    arrived, ended = [], []

    class Recording(SchedulingPolicy):
        def arrived(self, requests):
            arrived.extend(requests)

        def finished(self, requests):
            ended.extend((r.arrival_seconds, r.first_token_seconds) for r in requests)

    async with Engine(slow_model(), policy=Recording()) as engine:
        before = asyncio.get_running_loop().time()
        completion = await engine.generate(
            prompt,
            SHORT,
            tenant="blue",
            priority=-7,
            ttft_target_seconds=2,
            tpot_target_seconds=0.25,
            deadline_seconds=3600,
        )
        await engine.generate(prompt, SHORT)
    told = [(r.tenant, r.priority, r.ttft_target_seconds, r.tpot_target_seconds) for r in arrived]
    assert told == [("blue", -7, 2, 0.25), (None, 0, None, None)]
    assert isinstance(told[0][2], float)
    assert [request.deadline_seconds for request in arrived] == [3600, None]
    (came, first), (came_later, _) = ended
    assert completion.timings.first_token_seconds is not None
    assert before <= came < first <= came + completion.timings.first_token_seconds < came_later


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant": ""}, "tenant must be a str of 1 to 512 characters, got ''"),
        ({"tenant": "x" * 513}, "tenant must be a str of 1 to 512 characters, got 'xxx"),
        ({"tenant": 7}, "tenant must be a str of 1 to 512 characters, got 7"),
        ({"priority": 2**31}, "priority must be an int in .*, got 2147483648"),
        ({"priority": -(10**5000)}, "priority must be an int in .*, got <int of 16610 bits>"),
        ({"priority": True}, "priority must be an int in .*, got True"),
        ({"priority": 1.0}, "priority must be an int in .*, got 1.0"),
        ({"ttft_target_seconds": 0}, "ttft_target_seconds must be a number above 0.*got 0"),
        ({"ttft_target_seconds": "1"}, "ttft_target_seconds must be a number.*got '1'"),
        ({"ttft_target_seconds": True}, "ttft_target_seconds must be a number.*got True"),
        ({"ttft_target_seconds": 10**5000}, "ttft_target_seconds must .* got <int of 16610 bits>"),
        ({"tpot_target_seconds": 10**400}, "tpot_target_seconds must .* got <int of 1329 bits>"),
        ({"tpot_target_seconds": -0.1}, "tpot_target_seconds must be .* above 0 .*got -0.1"),
        ({"tpot_target_seconds": float("inf")}, "tpot_target_seconds must be .* finite.*got inf"),
        ({"tpot_target_seconds": float("nan")}, "tpot_target_seconds must be .* finite.*got nan"),
    ],
)
@pytest.mark.asyncio
async def test_a_bad_tenant_priority_or_target_is_refused_at_once(options, message):
    async with Engine(slow_model()) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            engine.stream(PROMPT, **options)
        with pytest.raises(InvalidRequestError, match=message):
            await engine.generate(PROMPT, **options)
        assert engine.stats().num_waiting == 0


@pytest.mark.asyncio
async def test_a_policy_that_always_raises_is_replaced_step_by_step(caplog):
    class Broken(SchedulingPolicy):
        def order(self, waiting, view):
            raise RuntimeError("planted")

    caplog.set_level(logging.CRITICAL)
    async with Engine(slow_model(), policy=Broken()) as engine:
        answer = await engine.generate(PROMPT, SHORT)
        assert list(answer.token_ids) == expected_tokens(PROMPT, 10)
        assert engine.stats().policy_faults_total >= 1


# -- life


@pytest.mark.asyncio
async def test_an_engine_works_only_inside_its_with_block_and_once():
    engine = Engine(slow_model())
    with pytest.raises(EngineClosedError, match="new: use it inside"):
        engine.stream(PROMPT)
    async with engine:
        await engine.generate(PROMPT, SHORT)
    with pytest.raises(EngineClosedError, match="closed and takes no requests"):
        engine.stream(PROMPT)
    with pytest.raises(EngineClosedError, match="can be entered once"):
        await engine.__aenter__()


@pytest.mark.asyncio
async def test_another_loop_and_another_thread_are_refused():
    async with Engine(slow_model()) as engine:

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError, match="another event loop"):
                engine.stream(PROMPT)

        await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(engine.stream, PROMPT)


@pytest.mark.asyncio
async def test_drain_waits_for_what_runs_and_takes_nothing_new():
    async with Engine(slow_model()) as engine:
        stream = engine.stream(PROMPT, SHORT)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="draining"):
            engine.stream(PROMPT)
        assert await drained == 0
        assert [token.id async for token in stream] == expected_tokens(PROMPT, 10)


@pytest.mark.asyncio
async def test_drain_ends_what_runs_past_its_deadline():
    async with Engine(slow_model(step_seconds=lambda plan: 0.01)) as engine:
        streams = [engine.stream(PROMPT, LONG) for _ in range(3)]
        assert await engine.drain(0.05) == 3
        for stream in streams:
            with pytest.raises(EngineClosedError, match="drained"):
                async for _ in stream:
                    pass


@pytest.mark.asyncio
async def test_a_cancelled_host_task_still_closes_the_engine():
    entered = asyncio.Event()
    engine = Engine(slow_model())

    async def host() -> None:
        async with engine:
            entered.set()
            await engine.generate(PROMPT, LONG)

    task = asyncio.create_task(host())
    await entered.wait()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.stats().pages_held_by_requests == engine.stats().pages_fenced == 0
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("aioserve")]


@pytest.mark.asyncio
async def test_an_engine_is_closed_to_the_end_although_its_host_is_cancelled_while_closing():
    engine = Engine(slow_model(step_seconds=lambda plan: 0.05))
    closing = asyncio.Event()

    async def host() -> None:
        async with engine:
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            closing.set()

    task = asyncio.create_task(host())
    await closing.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("aioserve")]
    assert engine.stats().pages_held_by_requests == engine.stats().pages_fenced == 0


@pytest.mark.asyncio
async def test_a_core_task_that_is_cancelled_leaves_no_request_waiting():
    async with Engine(slow_model()) as engine:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("aioserve"):
                task.cancel()
        with pytest.raises(EngineError, match="cancelled"):
            async for _ in stream:
                pass
        with pytest.raises(EngineClosedError, match="the engine failed"):
            engine.stream(PROMPT)


@pytest.mark.asyncio
async def test_a_prompt_is_encoded_by_no_task_that_a_host_could_cancel():
    async with Engine(slow_model(max_model_len=4000)) as engine:
        before = asyncio.all_tasks()
        stream = engine.stream("long" * 500, SHORT)
        assert asyncio.all_tasks() == before
        assert len([token async for token in stream]) == 10


@pytest.mark.asyncio
async def test_drain_may_be_called_again_with_a_shorter_deadline():
    async with Engine(slow_model(step_seconds=lambda plan: 0.01)) as engine:
        streams = [engine.stream(PROMPT, LONG) for _ in range(2)]
        patient = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0.02)
        streams[0].close()
        assert await engine.drain(0) == 1
        assert await patient == 0


@pytest.mark.asyncio
async def test_health_ignores_readers_that_are_behind():
    async with Engine(slow_model(), max_buffered_tokens=2) as engine:
        stream = engine.stream(PROMPT, LONG)
        await until(lambda: stream.usage.completion_tokens >= 2)
        await until(lambda: engine.stats().step_age_seconds == 0)
        assert engine.stats().num_running == 1
        assert await engine.drain(0) == 1
        assert stream.finish_reason == "abort"
        await engine.drain()
        assert engine.stats().step_age_seconds == 0


@pytest.mark.asyncio
async def test_each_reader_gets_an_error_object_of_its_own():
    async with Engine(slow_model()) as engine:
        streams = [engine.stream(PROMPT, LONG) for _ in range(2)]
        for stream in streams:
            await anext(stream)
    errors = []
    for stream in streams:
        with pytest.raises(EngineClosedError) as caught:
            async for _ in stream:
                pass
        errors.append(caught.value)
    assert errors[0] is not errors[1]


@pytest.mark.asyncio
async def test_a_request_id_is_free_as_soon_as_its_reader_has_left():
    async with Engine(slow_model()) as engine:
        for _ in range(3):
            async with engine.stream(PROMPT, LONG, request_id="again") as stream:
                await anext(stream)


def test_health_is_the_age_of_the_last_step_while_work_is_pending():
    async def main() -> None:
        async with Engine(slow_model(step_seconds=lambda plan: 0.1)) as engine:
            assert engine.stats().step_age_seconds == 0
            stream = engine.stream(PROMPT, LONG)
            await asyncio.sleep(0.05)
            assert engine.stats().step_age_seconds == pytest.approx(0.05)
            stream.close()
            await engine.drain()
            assert engine.stats().step_age_seconds == 0

    run_simulated(main)


@pytest.mark.asyncio
async def test_dump_names_every_request_and_what_it_holds():
    async with Engine(slow_model()) as engine:
        stream = engine.stream(PROMPT, LONG, request_id="seen")
        await anext(stream)
        (request,) = engine.dump()["sequences"]
        assert request["request_id"] == "seen"
        assert len(request["pages"]) == engine.stats().pages_held_by_requests > 0
        stream.close()


@pytest.mark.asyncio
async def test_token_ids_may_be_an_array_of_any_integer_type():
    async with Engine(slow_model()) as engine:
        for dtype in (np.int64, np.uint8):
            answer = await engine.generate(np.array(PROMPT, dtype), SHORT)
            assert list(answer.token_ids) == expected_tokens(PROMPT, 10)


@pytest.mark.asyncio
async def test_seeds_decide_and_default_to_distinct_ones_per_request():
    async with Engine(slow_model()) as engine:
        free = SamplingParams(max_tokens=10)
        one, other = await engine.generate(PROMPT, free), await engine.generate(PROMPT, free)
        assert one.token_ids != other.token_ids
    async with Engine(slow_model()) as again:
        assert (await again.generate(PROMPT, free)).token_ids == one.token_ids
