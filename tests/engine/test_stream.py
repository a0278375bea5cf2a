"""The whole contract of a stream: every way to leave it, slow readers, one end."""

from __future__ import annotations

import asyncio
import gc
import threading

import anyio
import pytest

from aioserve import (
    Engine,
    EngineClosedError,
    FinishReason,
    PromptTooLongError,
    SamplingParams,
    StreamBusyError,
    StreamStalledError,
    TokenStream,
    WrongLoopError,
)
from aioserve.testing import check_invariants, run_simulated
from aioserve.testing.fake_model import FakeModel, byte_tokenizer, expected_tokens
from tests.engine.idle import all_given_back
from tests.waits import until

pytestmark = pytest.mark.asyncio

PROMPT = [1, 2, 3, 4, 5]
LONG = SamplingParams(max_tokens=200, seed=0)


def engine(**options) -> Engine:
    model = FakeModel(num_pages=256, step_seconds=lambda plan: 0.001)
    return Engine(model, **options)


async def take(stream: TokenStream, count: int) -> list[int]:
    return [(await anext(stream)).id for _ in range(count)]


async def test_tokens_come_in_order_and_then_exactly_one_end():
    async with engine() as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=20, seed=0))
        tokens = [token async for token in stream]

        assert [token.id for token in tokens] == expected_tokens(PROMPT, 20)
        assert [token.index for token in tokens] == list(range(20))
        text = byte_tokenizer().decode([token.id for token in tokens])
        assert "".join(token.text for token in tokens) == text
        assert stream.finish_reason is FinishReason.LENGTH
        assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (5, 20)
        assert stream.timings.first_token_seconds is not None
        assert 0 < stream.timings.first_token_seconds <= stream.timings.total_seconds
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_started_waits_for_the_first_token_and_takes_none():
    async with engine() as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=20, seed=0))
        await stream.started()
        await stream.started()
        assert stream.timings.first_token_seconds is not None
        assert [token.id async for token in stream] == expected_tokens(PROMPT, 20)
        await stream.started()


@pytest.mark.parametrize("moment", ["entering the scheduler", "encoded"])
async def test_a_stream_that_is_collected_while_its_request_moves_on_is_not_computed(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run at any allocation, even while a request is taken in."""
    async with Engine(FakeModel(num_pages=64, max_model_len=1000)) as it:
        live = it._lifecycle
        place = live.core if moment == "encoded" else live.scheduler
        submit = place.submit

        def collecting(request):
            if moment == "encoded":
                gc.collect()
                return submit(request)
            result = submit(request)
            gc.collect()
            return result

        monkeypatch.setattr(place, "submit", collecting)
        gc.disable()
        try:
            # Long enough for a thread, and referenced only by itself.
            circle: list[object] = [it.stream("x" * 600, SamplingParams(max_tokens=200))]
            circle.append(circle)
            del circle
            await until(lambda: it.stats().num_waiting == 0)
        finally:
            gc.enable()
        await it.drain(5)
        assert it.stats().tokens_generated_total == 0
        check_invariants(it)


async def test_started_raises_what_only_encoding_shows():
    async with engine() as it:
        with pytest.raises(PromptTooLongError):
            await it.stream("x" * 3000).started()


async def test_break_frees_the_pages_within_a_step():
    async with engine() as it:
        async for _ in it.stream(PROMPT, LONG):
            break
        assert await all_given_back(it)


async def test_an_exception_in_the_loop_frees_the_pages():
    async def read(it: Engine) -> None:
        async for _ in it.stream(PROMPT, LONG):
            raise KeyError

    async with engine() as it:
        with pytest.raises(KeyError):
            await read(it)
        assert await all_given_back(it)


async def test_the_end_of_a_with_block_frees_the_pages():
    async with engine() as it:
        async with it.stream(PROMPT, LONG) as stream:
            await take(stream, 2)
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(it)


@pytest.mark.parametrize("error", [KeyError, GeneratorExit])
async def test_whatever_ends_a_with_block_frees_the_pages(error: type[BaseException]):
    async def read(stream: TokenStream) -> None:
        async with stream:
            await take(stream, 2)
            raise error

    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        with pytest.raises(error):
            await read(stream)
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(it)


async def test_close_is_idempotent_and_ends_iteration():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        await take(stream, 2)
        stream.close()
        stream.close()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await all_given_back(it)


async def test_tokens_that_wait_unread_are_gone_after_close():
    async with engine() as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=20, seed=0))
        await take(stream, 1)
        await it.drain()
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.finish_reason is FinishReason.LENGTH


async def test_the_first_end_of_a_stream_counts():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        await take(stream, 1)
        stream.close()
    assert stream.finish_reason is FinishReason.ABORT
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_cancelled_reader_ends_its_request_even_if_the_stream_is_kept():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        reader = asyncio.create_task(take(stream, 200))
        await asyncio.sleep(0.005)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(it)


async def test_an_anyio_scope_that_times_out_ends_the_request():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        with anyio.move_on_after(0.005) as scope:
            async with stream:
                await take(stream, 200)
        assert scope.cancelled_caught
        assert await all_given_back(it)


async def test_an_anyio_scope_that_times_out_ends_the_request_even_if_the_stream_is_kept():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        with anyio.move_on_after(0.005) as scope:
            await take(stream, 200)
        assert scope.cancelled_caught
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(it)


async def test_a_stream_that_is_dropped_unread_is_collected():
    async with engine() as it:
        cycle: list[object] = [it.stream(PROMPT, LONG)]
        cycle.append(cycle)
        await until(lambda: it.stats().pages_held_by_requests)
        del cycle
        gc.collect()
        assert await all_given_back(it)


async def test_a_stream_may_be_collected_on_another_thread():
    async with engine() as it:
        held = [it.stream(PROMPT, LONG)]
        await take(held[0], 1)
        thread = threading.Thread(target=held.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert await all_given_back(it)


async def test_nothing_comes_after_close_although_a_step_is_in_flight():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        await take(stream, 1)
        stream.close()
        taken = stream.usage.completion_tokens
        await asyncio.sleep(0.01)
        assert stream.usage.completion_tokens == taken


async def test_a_slow_reader_pauses_its_own_sequence_and_loses_nothing():
    async with engine(max_buffered_tokens=8) as it:
        slow = it.stream(PROMPT, SamplingParams(max_tokens=60, seed=0))
        quick = await it.generate(PROMPT, SamplingParams(max_tokens=60, seed=0))
        generated = it.stats().tokens_generated_total
        assert generated <= 60 + 8 + 2
        assert [token.id async for token in slow] == list(quick.token_ids)


async def test_a_reader_that_takes_nothing_is_told_so_by_name():
    async with engine(max_buffered_tokens=4, stall_timeout_seconds=0.02) as it:
        stream = it.stream(PROMPT, LONG)
        await until(lambda: stream.finish_reason)
        assert await all_given_back(it)
        with pytest.raises(StreamStalledError, match="stall_timeout_seconds"):
            async for _ in stream:
                pass
        assert stream.finish_reason is FinishReason.ABORT


async def read_slowly() -> None:
    async with engine(max_buffered_tokens=16, stall_timeout_seconds=0.1) as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=20, seed=0))
        for _ in range(10):
            await anext(stream)
            await asyncio.sleep(0.09)
        assert [token.id async for token in stream] == expected_tokens(PROMPT, 20)[10:]


async def test_a_reader_that_is_slow_but_reads_is_left_alone():
    await asyncio.to_thread(run_simulated, read_slowly)


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 1}, {"num_pages": 17, "max_model_len": 256}])
async def test_a_reader_that_is_behind_holds_up_nobody_else(scarce):
    async with engine(max_buffered_tokens=8, **scarce) as it:
        slow = it.stream(PROMPT, SamplingParams(max_tokens=60, seed=0))
        await anext(slow)
        for length in (5, 200):
            prompt = [7] * length
            answer = await it.generate(prompt, SamplingParams(max_tokens=50, seed=0))
            assert list(answer.token_ids) == expected_tokens(prompt, 50)
        assert [token.id async for token in slow] == expected_tokens(PROMPT, 60)[1:]


async def test_a_stream_may_be_closed_on_another_thread():
    async with Engine(FakeModel(step_seconds=lambda plan: 0.2)) as it:
        stream = it.stream(PROMPT, LONG)
        reader = asyncio.create_task(take(stream, 200))
        await asyncio.sleep(0.05)  # the reader waits for the end of the first step
        # In debug mode a loop refuses calls from other threads instead of losing them.
        asyncio.get_running_loop().set_debug(True)
        await asyncio.to_thread(stream.close)
        with pytest.raises(StopAsyncIteration):
            await reader
        assert await all_given_back(it)


async def test_two_readers_of_one_stream_are_refused():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        first = asyncio.create_task(take(stream, 1))
        await asyncio.sleep(0)
        with pytest.raises(StreamBusyError, match="another task is already reading"):
            await anext(stream)
        await first
        stream.close()


async def test_a_stream_read_on_another_loop_says_so():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)

        def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                asyncio.run(take(stream, 1))

        await asyncio.to_thread(elsewhere)
        stream.close()


async def test_closing_the_engine_ends_open_streams_with_an_error():
    async with engine() as it:
        stream = it.stream(PROMPT, LONG)
        await take(stream, 1)
    with pytest.raises(EngineClosedError, match="closed before this request ended"):
        await take(stream, 200)
    assert stream.finish_reason is FinishReason.ABORT
    assert it.stats().pages_held_by_requests == it.stats().pages_fenced == 0


async def test_a_stop_string_is_cut_out_and_its_start_is_never_shown():
    answer = byte_tokenizer().decode(expected_tokens(PROMPT, 60))
    stop = answer[20:23]
    async with engine() as it:
        done = await it.generate(PROMPT, SamplingParams(max_tokens=60, seed=0, stop=(stop,)))
        assert done.text == answer[: answer.index(stop)]
        assert done.finish_reason is FinishReason.STOP
        assert await all_given_back(it)


async def test_an_end_of_sequence_id_ends_the_answer_unless_it_is_ignored():
    tokens = expected_tokens(PROMPT, 30)
    first = tokens.index(tokens[10])
    model = FakeModel(num_pages=64, eos_token_ids=frozenset({tokens[10], 300}))
    async with Engine(model) as it:
        ended = await it.generate(PROMPT, SamplingParams(max_tokens=30, seed=0))
        assert (list(ended.token_ids), ended.finish_reason) == (tokens[: first + 1], "stop")
        ignoring = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
        assert list((await it.generate(PROMPT, ignoring)).token_ids) == tokens
        stop = SamplingParams(max_tokens=30, seed=0, ignore_eos=True, stop_token_ids=(tokens[5],))
        assert (await it.generate(PROMPT, stop)).token_ids[-1] == tokens[5]
