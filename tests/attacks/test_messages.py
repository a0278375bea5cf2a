"""Prompts that are huge, endless or lie about themselves: nobody else waits for them."""

from __future__ import annotations

import asyncio
import enum
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, SamplingParams
from aioserve.config import EngineConfig
from aioserve.engine import encoding
from aioserve.errors import (
    AioserveError,
    InvalidPromptError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
)
from aioserve.execution.runner import LoadedModel
from aioserve.testing import FakeModel, byte_tokenizer, check_invariants
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from aioserve.text.messages import MAX_MESSAGES, MAX_ROLE_CHARS
from aioserve.text.tokenizer import Tokenizer
from tests.attacks.held_loop import assert_loop_is_free
from tests.attacks.hostile import hostile_texts, hostile_values, is_named, named_errors
from tests.tiers import clock_counts
from tests.waits import LIMIT_SECONDS

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
PARAMS = SamplingParams(max_tokens=4)
HUGE = "x" * 10_000_000
LONG = "x" * (encoding.LONG_CHARS + 1)
SHORT = "a text that is encoded by a thread " * 20


class ChatModel(FakeModel):
    """Model with a chat template, and a tokenizer that waits where it is told to."""

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer = tokenizer or byte_tokenizer()

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        template = ChatTemplate(TEMPLATE, origin="test")
        loaded = await super().load(config, num_slots=num_slots)
        return msgspec.structs.replace(
            loaded, tokenizer=self.tokenizer, chat_template=template, name="chat"
        )


class Blocking(Tokenizer):
    """Encodes a text that begins with "x" when it is let go on, to ids of its own length."""

    def __init__(self) -> None:
        other = byte_tokenizer()
        super().__init__(other._backend)
        self.texts: list[str] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.ended = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True, **more: Any) -> list[int]:
        self.texts.append(text[:10])
        if text.startswith("x"):
            self.begun.release()
            goes_on = self.go_on.wait(LIMIT_SECONDS)
            self.ended.set()
            assert goes_on
            return [1, 2, 3]
        return super().encode(text, add_special_tokens=add_special_tokens, **more)


def big_model(tokenizer: Tokenizer | None = None) -> ChatModel:
    return ChatModel(tokenizer, num_pages=8192, max_model_len=100_000)


def message(content: Any = "hello", role: Any = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


class Endless(Sequence[Any]):
    """Says that it has three messages, and gives no end of them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return message()

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield message()


class LyingList(list[Any]):
    def __len__(self) -> int:
        return 1


class Text(str):
    """Python's methods of it lie, and take long."""

    def __len__(self) -> int:
        return 1

    def __str__(self) -> str:
        raise ValueError("touched")

    __iter__ = __getitem__ = __eq__ = encode = isascii = __str__  # type: ignore[assignment]


class Role(enum.StrEnum):
    USER = "user"


class EndlessMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return "text"

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "role"


# -- bounds


@pytest.mark.clock
@pytest.mark.parametrize(
    ("messages", "value", "limit", "unit"),
    [
        ([message("")] * 1_000_000, 1_000_000, MAX_MESSAGES, "messages"),
        (LyingList([message()] * 1_000_000), MAX_MESSAGES + 1, MAX_MESSAGES, "messages"),
        (Endless(), MAX_MESSAGES + 1, MAX_MESSAGES, "messages"),
        ([message(HUGE * 2)], 20_000_004, 12_800_000, "characters"),
        ([message(HUGE)] * 10_000, 20_000_008, 12_800_000, "characters"),
        ([message(Text("x" * 12_800_000))], 12_800_004, 12_800_000, "characters"),
    ],
    ids=["many", "lying", "endless", "content", "sum", "subclass"],
)
@pytest.mark.asyncio
async def test_what_is_too_much_is_refused_by_its_size(messages, value, limit, unit):
    async with Engine(big_model()) as engine:

        async def attack() -> None:
            with pytest.raises(PromptTooLongError, match=f"prompt has {value} {unit}") as caught:
                engine.stream(messages)
            assert (caught.value.value, caught.value.limit, caught.value.unit) == (
                value,
                limit,
                unit,
            )
            assert is_named(caught.value)

        await assert_loop_is_free(attack)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([message(role=HUGE)], r"messages\[0\]\['role'\] must have at most 64 .* got 10000000"),
        ([dict.fromkeys(map(str, range(1_000_000)), "x") | message()], "unsupported field '0'"),
        ([dict.fromkeys([HUGE], "x") | message()], "unsupported field 'xxx"),
        ([message(), 5], r"messages\[1\] must be a dict, got int"),
    ],
    ids=["role", "keys", "key", "no message"],
)
@pytest.mark.asyncio
async def test_what_no_message_has_is_refused_by_name(messages, complaint):
    async with Engine(big_model()) as engine:

        async def attack() -> None:
            with pytest.raises(InvalidPromptError, match=complaint) as caught:
                engine.stream(messages)
            assert is_named(caught.value)

        await assert_loop_is_free(attack)


def test_as_many_messages_as_may_be_and_as_long_a_role():
    messages = [message(role="r" * MAX_ROLE_CHARS)] * MAX_MESSAGES
    assert conversation_of(messages).validated().messages == messages
    assert len(conversation_of(messages, max_chars=MAX_MESSAGES * 69).messages) == MAX_MESSAGES
    with pytest.raises(PromptTooLongError, match=r"up to messages\[9999\]"):
        conversation_of(messages, max_chars=MAX_MESSAGES * 69 - 1)


def test_what_is_read_is_plain_and_a_copy():
    given_ = [{"role": Role.USER, "content": Text("hello")}]
    plain = conversation_of(given_).validated().messages
    assert plain == [{"role": "user", "content": "hello"}]
    assert {type(text) for text in plain[0].values()} == {str}
    assert conversation_of([EndlessMapping()]).messages == [{"role": "text", "content": "text"}]


def test_what_raises_when_it_is_read_is_named():
    class Raises(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise KeyError("planted")

    with pytest.raises(InvalidPromptError, match=r"messages can't be read: KeyError\('planted'\)"):
        conversation_of([Raises(message())])


@pytest.mark.asyncio
async def test_a_surrogate_in_a_message_is_named_by_the_first_read():
    text = "\u1234" * 100_000 + "\ud800"
    with pytest.raises(InvalidPromptError, match=r"\['content'\] can't .* '\\ud800' at 100000"):
        conversation_of([message(text)]).validated()
    async with Engine(big_model()) as engine:
        with pytest.raises(InvalidPromptError, match=r"messages\[0\]\['content'\] can't"):
            await engine.generate([message(text)])


# -- the loop

AT_MOST = 8_000 * encoding.MAX_CHARS_PER_TOKEN
"""Characters of a prompt, where the context is 8000 tokens."""


@pytest.mark.clock
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "prompt",
    [
        HUGE,
        "x" * AT_MOST,
        "\u1234" * AT_MOST,
        [message(HUGE)],
        [message("x" * (AT_MOST - 100))],
        [message("\u1234" * (AT_MOST - 4))],
        [message("\u1234" * (AT_MOST - 100))],
        [message("hi")] * MAX_MESSAGES,
        [5] * 10_000_000,
        np.zeros(10_000_000, np.int64),
        np.zeros((10_000, 1_000)),
        range(10**18),
    ],
    ids=[
        "refused text",
        "text",
        "wide text",
        "refused content",
        "content",
        "content that is longer rendered",
        "wide content",
        "messages",
        "ids",
        "array",
        "matrix",
        "range",
    ],
)
@pytest.mark.asyncio
async def test_no_prompt_holds_the_loop(prompt):
    async with Engine(ChatModel(num_pages=512, max_model_len=8_000)) as engine:

        async def attack() -> None:
            with named_errors():
                await engine.generate(prompt, PARAMS)

        await assert_loop_is_free(attack)


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


CALL = {"name": "f", "arguments": '{"a": [' + "1, " * 300_000 + "1]}"}


@pytest.mark.clock
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([message()], {"tools": [tool(description=HUGE)]}),
        ([message()], {"tools": [tool(x=[0] * 10_000_000)]}),
        ([message()], {"tools": [tool(x=["x"] * 9_990)]}),
        ([message()], {"tools": [tool()] * 1_000_000}),
        ([message()], {"chat_template_kwargs": dict.fromkeys(map(str, range(1_000_000)), 1)}),
        ([message([{"type": "text", "text": "x"}] * 1_000_000)], {}),
        ([{"role": "assistant", "tool_calls": [{"function": CALL}]}], {}),
        ([{"role": "assistant", "tool_calls": [{"function": CALL}] * 1_000_000}], {}),
    ],
    ids=["text", "values", "many", "tools", "kwargs", "parts", "arguments", "calls"],
)
@pytest.mark.asyncio
async def test_nothing_that_comes_with_messages_holds_the_loop(messages, options):
    async with Engine(ChatModel(num_pages=512, max_model_len=8_000)) as engine:

        async def attack() -> None:
            with named_errors():
                await engine.generate(messages, PARAMS, **options)

        await assert_loop_is_free(attack)


# -- other people's prompts


@pytest.mark.asyncio
async def test_short_prompts_are_answered_while_long_ones_are_encoded():
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer)) as engine:
        long = [engine.stream(prompt, PARAMS) for prompt in (LONG, [message(LONG)], LONG)]
        for prompt in [SHORT, [message(SHORT)], "short"] * 3:
            assert (await engine.generate(prompt, PARAMS)).samples[0].token_ids
        assert [stream.finish_reason for stream in long] == [None] * 3
        assert tokenizer.texts.count("x" * 10) == 1
        tokenizer.go_on.set()
        for stream in long:
            assert len([token async for token in stream]) == 4
        check_invariants(engine)


@pytest.mark.asyncio
async def test_a_long_prompt_is_encoded_although_short_ones_keep_coming():
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer), max_num_seqs=2) as engine:
        blocked = engine.stream(LONG, PARAMS)
        short = [engine.stream(SHORT, PARAMS) for _ in range(50)]
        next_long = engine.stream(LONG, PARAMS)
        short += [engine.stream(SHORT, PARAMS) for _ in range(50)]
        tokenizer.go_on.set()
        await blocked.started()
        assert len([token async for token in next_long]) == 4
        for stream in short:
            stream.close()


@pytest.mark.asyncio
async def test_long_prompts_that_wait_are_bounded_and_short_ones_are_not_refused_for_them(
    monkeypatch,
):
    monkeypatch.setattr(encoding, "MAX_LONG_CHARS", 3 * len(LONG))
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer)) as engine:
        streams = [engine.stream(LONG, PARAMS) for _ in range(3)]
        for prompt in (LONG, [message(LONG)]):
            with pytest.raises(QueueFullError, match=f"of {3 * len(LONG)} characters") as caught:
                engine.stream(prompt, PARAMS)
        assert (caught.value.value, caught.value.unit) == (3 * len(LONG), "characters")
        assert len((await engine.generate(SHORT, PARAMS)).token_ids) == 4
        streams[2].close()  # waits, so its room is free at once
        streams[2] = engine.stream(LONG, PARAMS)
        streams[0].close()  # is being encoded, so it isn't
        with pytest.raises(QueueFullError):
            engine.stream(LONG, PARAMS)
        tokenizer.go_on.set()
        for stream in streams[1:]:
            assert len([token async for token in stream]) == 4
        # What fits the model is never refused for its length where nobody else is long.
        monkeypatch.setattr(encoding, "MAX_LONG_CHARS", 1)
        assert len((await engine.generate(LONG, PARAMS)).token_ids) == 4
        check_invariants(engine)


@pytest.mark.asyncio
async def test_where_the_system_has_no_thread_to_give_one_request_fails_and_the_next_does_not(
    monkeypatch,
):
    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("aioserve-encode"):
            raise RuntimeError("can't start new thread")
        real(thread)

    real, text = threading.Thread.start, "x" * 600
    async with Engine(ChatModel(max_model_len=1024, num_pages=64)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            stream = engine.stream(text, PARAMS, request_id="one")
        with pytest.raises(RequestFailedError, match="can't start new thread"):
            await stream.started()
        answer = await engine.generate(text, PARAMS, request_id="one")
        assert len(answer.token_ids) == 4
        assert await engine.drain() == 0
        check_invariants(engine)


@pytest.mark.asyncio
async def test_what_nobody_waits_for_any_more_is_not_encoded():
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer)) as engine:
        streams = [engine.stream(LONG, PARAMS) for _ in range(5)]
        await asyncio.to_thread(tokenizer.begun.acquire)
        for stream in streams:
            stream.close()
        assert engine.stats().num_waiting == 0
        await engine.drain()
        assert not tokenizer.ended.is_set()  # it doesn't wait for the one on the thread
        tokenizer.go_on.set()
    assert len(tokenizer.texts) == 1


# -- the ids of requests that were left


@pytest.mark.parametrize("prompt", [LONG, [message(LONG)], SHORT, [message("hi")], "hi", [1, 2]])
@pytest.mark.parametrize("moment", ["at once", "encoding", "waiting", "running"])
@pytest.mark.asyncio
async def test_the_id_of_a_stream_that_was_closed_is_free(prompt, moment):
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer)) as engine:
        if moment == "waiting":
            engine.stream(LONG, PARAMS, request_id="other").request_id  # noqa: B018
        stream = engine.stream(prompt, SamplingParams(max_tokens=500), request_id="mine")
        if moment == "encoding":
            await asyncio.sleep(0.02)
        if moment == "running":
            tokenizer.go_on.set()
            await stream.started()
        stream.close()
        again = engine.stream(prompt, PARAMS, request_id="mine")
        tokenizer.go_on.set()
        assert len([token async for token in again]) == 4


@pytest.mark.asyncio
async def test_the_id_is_free_whichever_way_a_stream_was_left_while_its_text_is_encoded():
    tokenizer = Blocking()
    async with Engine(big_model(tokenizer)) as engine:

        def begin() -> asyncio.Task[object]:
            return asyncio.create_task(engine.generate(LONG, PARAMS, request_id="mine"))

        task = begin()
        await asyncio.to_thread(tokenizer.begun.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(LONG, PARAMS, request_id="mine"), 0.01)
        stream = engine.stream(LONG, PARAMS, request_id="mine")
        del stream
        async with engine.stream(LONG, PARAMS, request_id="mine"):
            pass
        stream = engine.stream(LONG, PARAMS, request_id="mine")
        await asyncio.to_thread(stream.close)
        task = begin()
        await asyncio.sleep(0)
        tokenizer.go_on.set()
        await task


# -- closing


def encoder_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("aioserve-encode")]


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_an_encode_that_nobody_waits_for():
    tokenizer = Blocking()
    engine = Engine(big_model(tokenizer))
    async with engine:
        stream = engine.stream(LONG, PARAMS)
        waiting = engine.stream([message(LONG)], PARAMS)
        await engine.generate(SHORT, PARAMS)
        await asyncio.to_thread(tokenizer.begun.acquire)
        await engine.__aexit__(None, None, None)
        assert not tokenizer.ended.is_set()
        (thread,) = encoder_threads()  # the other one has ended
        for one in (stream, waiting):
            with pytest.raises(AioserveError, match="closed before"):
                await anext(one)
    before = (engine.stats(), engine.dump())
    tokenizer.go_on.set()
    await asyncio.to_thread(thread.join, LIMIT_SECONDS)
    await asyncio.sleep(0)
    assert not encoder_threads()
    assert (engine.stats(), engine.dump()) == before
    assert len(tokenizer.texts) == 2


EXIT = """
import asyncio, sys, time
from aioserve import Engine
from aioserve.testing import FakeModel

async def main():
    async with Engine(FakeModel(num_pages=65536, max_model_len=100_000)) as engine:
        stream = engine.stream("x" * 10_000_000)
        await asyncio.sleep(0.1)
    print(time.process_time(), flush=True)

asyncio.run(main())
"""


def computed_by_children() -> float:
    """Seconds of processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.clock
def test_a_process_ends_although_a_text_is_being_encoded():
    before = computed_by_children()
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, check=True, timeout=200
    )
    computed = computed_by_children() - before
    (told,) = done.stderr.splitlines()
    assert "its thread aioserve-encode-fake is still at work after 0.5 s" in told
    assert not clock_counts() or computed - float(done.stdout) < 2.0


# -- what goes wrong


@pytest.mark.parametrize("prompt", ["short", SHORT, LONG, [message("hi")]])
@pytest.mark.asyncio
async def test_a_panic_of_the_tokenizer_fails_its_request_alone(prompt, monkeypatch):
    class Panic(BaseException):
        """Error like those of Rust code."""

    def panic(self: Tokenizer, text: str, **options: Any) -> list[int]:
        raise Panic("planted")

    async with Engine(big_model()) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Tokenizer, "encode", panic)
            with pytest.raises(RequestFailedError, match="can't be encoded: Panic"):
                await engine.generate(prompt, PARAMS)
        assert len((await engine.generate(prompt, PARAMS)).token_ids) == 4
        check_invariants(engine)


# -- anything


def big_text(size: str) -> str:
    return {"huge": HUGE, "long": LONG, "short": SHORT}[size]


def hostile_messages() -> st.SearchStrategy[Any]:
    # By their names: hypothesis shows strategies, and what they hold.
    big = st.sampled_from(["huge", "long", "short"]).map(big_text)
    texts = st.one_of(hostile_texts(), hostile_texts().map(Text), big, hostile_values())
    roles = st.one_of(st.sampled_from(["user", "system", "assistant", Role.USER]), texts)
    plain = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=20)}
    )
    fields = st.fixed_dictionaries({"role": roles, "content": texts})
    keys = st.one_of(st.sampled_from(["role", "name", "tool_calls"]), st.text(max_size=5))
    more = st.dictionaries(keys, texts, max_size=2)
    one = st.one_of(
        plain,
        fields,
        st.tuples(fields, more).map(lambda drawn: drawn[0] | drawn[1]),
        st.builds(EndlessMapping),
        hostile_values(),
    )
    lists = st.lists(one, min_size=1, max_size=4)
    many = one.map(lambda drawn: [drawn] * 20_000)
    return st.one_of(lists, lists.map(tuple), lists.map(LyingList), st.builds(Endless), many)


@given(prompts=st.lists(hostile_messages(), min_size=1, max_size=2), close=st.booleans())
def test_fuzz_messages(prompts: list[Any], close: bool) -> None:
    async def main() -> None:
        async with Engine(ChatModel(num_pages=256, max_model_len=2048)) as engine:
            for prompt in prompts:
                with named_errors():
                    stream = engine.stream(prompt, PARAMS)
                    if close:
                        stream.close()
                    async for _ in stream:
                        pass
            await engine.drain()
            stats = engine.stats()
            assert stats.num_running == stats.num_waiting == stats.pages_held_by_requests == 0
            check_invariants(engine)

    asyncio.run(main())
