"""Results have a short `repr`, regardless of their contents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioserve import (
    Beam,
    ChatAnswer,
    ChatCompletion,
    ChatDelta,
    Completion,
    FinishReason,
    Logprobs,
    Sample,
    Score,
    Selection,
    Timings,
    Token,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)

MOST_CHARS = 300
USAGE, TIMINGS = Usage(2**40, 2**40), Timings(0.0, 0.0, 1)
LONG = st.text(max_size=400) | st.text(max_size=3).map(lambda text: text * 5000)
REASONS = st.sampled_from(FinishReason)
NUMBERS = st.floats(-1e300, 0)


@given(LONG, LONG, st.integers(0, 2**63), REASONS, NUMBERS, st.integers(0, 300))
def test_any_repr_is_short(
    text: str, other: str, number: int, reason: FinishReason, logprob: float, count: int
) -> None:
    logprobs = Logprobs(logprob, (TopLogprob(number, logprob, text[:20]),) * count)
    token = Token(number, text, number, number, logprobs)
    call, delta = ToolCall(text, other, text), ToolCallDelta(number, text, other, text)
    sample = Sample(text, (number,) * count, reason, (logprobs,) * count, other)
    answer = ChatAnswer(text, other, (call,) * count, reason, (token,) * count)
    for one in (
        logprobs,
        token,
        call,
        delta,
        sample,
        answer,
        Beam(text, (number,) * count, reason, logprob, logprob, other),
        Completion(other, (sample,) * (count + 1), USAGE, TIMINGS, (logprobs,) * count),
        ChatCompletion(other, (answer,) * (count + 1), USAGE, TIMINGS),
        ChatDelta(text, other, (delta,) * count, number, (token,) * count),
        Score(text, (number,) * count, (logprobs,) * count, USAGE, TIMINGS),
        Selection(0, text, (logprob,) * (count + 1), ()),
    ):
        assert len(repr(one)) <= MOST_CHARS
        assert repr(one).startswith(f"{type(one).__name__}(")
        assert "\n" not in repr(one)


def test_a_repr_says_what_one_looks_for() -> None:
    text = "It rains in Oslo, and has for a week; take boots, a coat and a book to read."
    sample = Sample(text, (1, 2, 3), FinishReason.LENGTH)
    cut = "'It rains in Oslo, and has f..., a coat and a book to read.'"
    assert repr(sample) == f"Sample({cut}, 3 tokens, length)"
    one = Completion("r-1", (sample,), USAGE, TIMINGS)
    assert repr(one) == f"Completion('r-1', {cut}, 3 tokens, length)"
    two = Completion("r-1", (sample, sample), USAGE, TIMINGS)
    assert repr(two) == f"Completion('r-1', {cut}, 3 tokens, length, 2 samples)"
    calls = (ToolCall("call-1", "weather", '{"city": "Oslo"}'),)
    answer = ChatAnswer("", "", calls, FinishReason.STOP, (Token(7, " the", 0),))
    chat = ChatCompletion("r-2", (answer,), USAGE, TIMINGS)
    assert repr(chat) == "ChatCompletion('r-2', '', 1 tool call, 1 token, stop)"
    assert repr(calls[0]) == """ToolCall('call-1', 'weather', '{"city": "Oslo"}')"""
    token = Token(7, " the", 0, 1, Logprobs(-0.5, (TopLogprob(7, -0.5, " the"),) * 20))
    assert repr(token) == "Token(7, ' the', index=0, sample=1, logprob=-0.5)"
    assert repr(token.logprobs) == "Logprobs(-0.5, top=20)"
