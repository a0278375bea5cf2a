"""A stream in every order of deliveries, reads and ways to leave, compared with a plain model of
it.

The core loop's side (`put`, `finish_sample`, `finish`) and the reader's side act in any order. In
between the event loop runs, or doesn't. There is exactly one end, and nothing after it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from aioserve import FinishReason, RequestFailedError, StreamBusyError, Token, TokenStream
from aioserve.engine.mailbox import Mailbox, ReaderEvent
from aioserve.scheduling.account import RequestAccount
from aioserve.testing import SimLoop
from tests.tiers import examples

END = "end"
ERROR = "error"
CANCELLED = "cancelled"
OWN_ENDS = st.sampled_from([FinishReason.LENGTH, FinishReason.STOP])


async def read(stream: TokenStream) -> str | Token:
    try:
        return await anext(stream, END)
    except RequestFailedError:
        return ERROR


async def read_batch(stream: TokenStream, min_tokens: int) -> str | list[Token]:
    try:
        return await stream.batch(min_tokens) or END
    except RequestFailedError:
        return ERROR


async def refused(stream: TokenStream) -> str:
    """Return only the message: keeping the error would keep the stream, which `drop` must end."""
    try:
        await anext(stream, END)
    except StreamBusyError as error:
        return str(error)
    return "not refused"


async def wait(stream: TokenStream) -> str | Token:
    try:
        await stream.started()
    except RequestFailedError:
        return ERROR
    return "started"


class StreamMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 5),
        samples=st.integers(1, 3),
        lifetime=st.integers(0, 25),
        seed=st.integers(0, 2**16),
    )
    def start(self, capacity, samples, lifetime, seed):
        gc.freeze()  # objects of the whole suite: `drop` would look through them each time
        self.loop = SimLoop(seed)
        self.told: list[str] = []
        self.mailbox = Mailbox("r", self.loop, self.tell, capacity, samples)
        self.stream: TokenStream | None = TokenStream(self.mailbox)
        self.reader: asyncio.Task[Any] | None = None
        self.reader_waits = False
        self.lifetime = lifetime
        """Rules to run before the stream may end."""
        # State of the model.
        self.capacity = capacity
        self.buffer: list[Token] = []
        self.min_tokens = 1
        """Fewest tokens that the reader waits for."""
        self.has_news = False
        """True if a sample began or ended since the last batch."""
        self.num_put = 0
        self.ends: list[FinishReason | None] = [None] * samples
        self.first_end: FinishReason | None = None
        self.end: FinishReason | None = None
        self.has_error = False
        self.paused = False
        self.expect_told: list[str] = []
        self.began = self.loop.time()
        self.end_seconds: float | None = None
        self.put_seconds: list[list[float]] = [[] for _ in range(samples)]
        self.account = RequestAccount()
        self.told_account = RequestAccount()
        """Account at the end."""

    def run(self) -> None:
        """Let the event loop do all that it can."""
        self.loop.run_until_complete(asyncio.sleep(0.001))

    def started(self) -> bool:
        return hasattr(self, "loop")

    def tell(self, event: ReaderEvent) -> None:
        self.told.append(event.value)

    # -- the core loop's side

    @precondition(lambda self: len(self.buffer) < self.capacity + 2)
    @rule(id=st.integers(0, 9), data=st.data())
    def put(self, id, data):
        token = Token(id, "", self.num_put, data.draw(st.integers(0, len(self.ends) - 1)))
        self.mailbox.put(token)
        if self.end is None:
            self.num_put += 1
            self.buffer.append(token)
            self.has_news |= token.index == 0
            self.put_seconds[token.sample].append(self.loop.time())
            if not self.paused and len(self.buffer) >= self.capacity:
                self.paused = True
                self.expect_told.append("fell behind")

    @precondition(lambda self: self.end is None)
    @rule()
    def enter_the_scheduler(self):
        self.mailbox.encoded()
        self.mailbox.account = self.account

    @rule(cached=st.integers(0, 9))
    def be_planned(self, cached):
        self.account.start(1, cached, self.loop.time())
        self.account.device_seconds += 0.5
        self.account.preemptions += 1

    def may_end(self) -> bool:
        return self.lifetime <= 0

    @precondition(lambda self: self.may_end() and None in self.ends)
    @rule(reason=OWN_ENDS, data=st.data())
    def finish_sample(self, reason, data):
        going_on = [sample for sample, end in enumerate(self.ends) if end is None]
        sample = data.draw(st.sampled_from(going_on))
        self.mailbox.finish_sample(sample, reason)
        self.ends[sample] = reason
        self.has_news = True
        if None not in self.ends:
            self.end = self.ends[0]

    @precondition(may_end)
    @rule(with_error=st.booleans())
    def finish(self, with_error):
        reason = FinishReason.ERROR if with_error else FinishReason.ABORT
        error = RequestFailedError("planted") if with_error else None
        assert self.mailbox.finish(reason, error) is (self.end is None)
        self.model_end(reason, with_error)

    @precondition(lambda self: self.end is not None)
    @rule(data=st.data())
    def finish_a_sample_late(self, data):
        self.mailbox.finish_sample(0, data.draw(OWN_ENDS))

    def model_end(self, reason: FinishReason, with_error: bool = False) -> None:
        if self.end is None:
            self.end = reason
            self.ends = [end or reason for end in self.ends]
            self.has_error = with_error

    # -- the reader's side

    @precondition(lambda self: self.stream is not None and self.reader is None)
    @rule(how=st.sampled_from([read, read, wait]), at_once=st.booleans())
    def read(self, how, at_once):
        self.min_tokens = 1
        self.reader = self.loop.create_task(how(self.stream))
        if at_once:
            self.let_the_loop_run()

    @precondition(lambda self: self.stream is not None and self.reader is None)
    @rule(min_tokens=st.integers(1, 4), at_once=st.booleans())
    def read_batch(self, min_tokens, at_once):
        assert self.stream is not None
        self.min_tokens = min_tokens
        self.reader = self.loop.create_task(read_batch(self.stream, min_tokens))
        if at_once:
            self.let_the_loop_run()

    def is_held_back(self) -> bool:
        """True if the reader waits for more tokens than there are."""
        if self.min_tokens == 1 or self.has_news or self.end is not None:
            return False
        wanted = self.min_tokens * self.ends.count(None)
        return len(self.buffer) < min(wanted, self.capacity / 2)

    @rule()
    def let_the_loop_run(self):
        self.run()
        self.check_reader(cancelled=False)

    @precondition(lambda self: self.reader is not None and self.lifetime <= 10)
    @rule()
    def cancel_the_reader(self):
        assert self.reader is not None
        self.reader.cancel()
        self.run()
        self.check_reader(cancelled=True)

    @precondition(lambda self: self.reader_waits and not self.buffer and self.end is None)
    @rule()
    def read_twice_at_once(self):
        assert self.stream is not None
        refusal = self.loop.run_until_complete(refused(self.stream))
        assert "another task is already reading" in refusal

    def check_reader(self, *, cancelled: bool) -> None:
        """Check what has become of the reader, after the loop has run."""
        reader = self.reader
        if reader is None:
            return
        if cancelled:
            # A reader that had not begun to wait has not touched the stream.
            if self.reader_waits:
                self.model_leave()
            assert outcome_of(reader) == CANCELLED
        elif self.buffer and not self.is_held_back():
            outcome = outcome_of(reader)
            if outcome != "started":
                if isinstance(outcome, list):
                    assert outcome == self.buffer
                    self.buffer.clear()
                    self.has_news = False
                else:
                    assert outcome == self.buffer.pop(0)
                if self.paused and 2 * len(self.buffer) <= self.capacity:
                    self.paused = False
                    self.expect_told += ["caught up"] if self.end is None else []
        elif self.end is not None:
            expected = (ERROR,) if self.has_error else (END, "started")
            assert outcome_of(reader) in expected
        else:
            assert not reader.done()
            self.reader_waits = True
            return
        self.reader = None
        self.reader_waits = False

    def model_leave(self) -> None:
        self.buffer.clear()
        if self.end is None:
            self.model_end(FinishReason.ABORT)
            self.expect_told.append("left")

    @precondition(lambda self: self.may_end() and self.stream is not None)
    @rule(way=st.sampled_from(["close", "aclose", "close elsewhere", "with"]))
    def leave(self, way):
        self.run()
        self.check_reader(cancelled=False)
        assert self.stream is not None
        if way == "close elsewhere":
            self.stream.close()
        else:
            self.loop.run_until_complete(leave(self.stream, way))
        self.model_leave()
        self.run()
        self.check_reader(cancelled=False)

    @precondition(lambda self: self.may_end() and self.stream is not None and self.reader is None)
    @rule(in_a_cycle=st.booleans())
    def drop(self, in_a_cycle):
        if in_a_cycle:
            cycle: list[object] = [self.stream]
            cycle.append(cycle)
            del cycle
        self.stream = None
        if in_a_cycle:
            gc.collect()
        self.run()
        if self.end is None:
            self.model_leave()

    # -- what always holds

    @precondition(started)
    @invariant()
    def the_stream_equals_its_model(self):
        self.lifetime -= 1
        mailbox = self.mailbox
        assert mailbox.finish_reason is self.end
        assert mailbox.finish_reasons == self.ends
        assert (self.end is None) == (None in self.ends)
        assert self.told == self.expect_told
        assert mailbox.completion_tokens == self.num_put
        assert mailbox.taken == self.num_put - len(self.buffer)
        assert mailbox.paused is self.paused
        assert self.told.count("left") <= 1
        if self.end is not None and self.end_seconds is None:
            self.end_seconds = self.loop.time()
            self.told_account = replace(mailbox.account)
            assert self.told_account in (self.account, RequestAccount())
        self.times_equal_the_model()
        if self.stream is not None:
            assert self.stream.finish_reason is self.end
            assert self.stream.finish_reasons == tuple(self.ends)
            assert self.stream.usage.completion_tokens == self.num_put

    def times_equal_the_model(self):
        timings, usage = self.mailbox.timings, self.mailbox.usage
        account = self.mailbox.account if self.end is None else self.told_account
        assert (timings.preemptions, timings.device_seconds) == (
            account.preemptions,
            account.device_seconds,
        )
        assert usage.cached_tokens == (account.cached_tokens or 0)
        assert timings.completion_tokens == usage.completion_tokens == self.num_put
        ended = self.loop.time() if self.end_seconds is None else self.end_seconds
        # The end may have come since the rule began that let the loop run.
        assert timings.total_seconds == pytest.approx(ended - self.began, abs=0.01)
        came = [seconds for of in self.put_seconds for seconds in of]
        first = min(came) - self.began if came else None
        assert timings.first_token_seconds == first
        if account.started_seconds is not None:
            assert timings.queued_seconds == account.started_seconds - self.began
        gaps = [b - a for of in self.put_seconds for a, b in itertools.pairwise(of)]
        told = timings.inter_token_latency
        if not gaps:
            assert told is None
            return
        assert told is not None
        assert (told.count, told.max_seconds) == (len(gaps), max(gaps))
        assert told.mean_seconds == pytest.approx(sum(gaps) / len(gaps))

    def teardown(self):
        if not self.started():
            return
        self.run()
        self.check_reader(cancelled=False)
        self.mailbox.finish(FinishReason.ABORT)
        self.model_end(FinishReason.ABORT)
        self.run()
        self.check_reader(cancelled=False)
        if self.stream is not None:
            outcomes = [self.loop.run_until_complete(read(self.stream)) for _ in self.buffer]
            assert outcomes == self.buffer
            last = [self.loop.run_until_complete(read(self.stream)) for _ in range(3)]
            assert last == [ERROR if self.has_error else END] * 3
        self.loop.close()
        gc.unfreeze()


async def leave(stream: TokenStream, way: str) -> None:
    if way == "close":
        stream.close()
    elif way == "aclose":
        await stream.aclose()
    else:
        async with stream:
            pass


def outcome_of(reader: asyncio.Task[Any]) -> Any:
    assert reader.done()
    return CANCELLED if reader.cancelled() else reader.result()


StreamMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40)
TestStream = StreamMachine.TestCase
