"""Windows over a text: each token is scored once, with the promised context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._evaluation.windows import Window, second_halves, sliding_windows


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Tokens of a text, tokens of a window, stride, and special tokens before a window."""
    before = draw(st.integers(0, 2))
    size = draw(st.integers(2, 40))
    stride = draw(st.integers(1, size if before else size - 1))
    return draw(st.integers(2, 300)), size, stride, before


@given(shapes())
def test_each_token_is_scored_once_and_in_order(shape: tuple[int, int, int, int]) -> None:
    tokens, size, stride, before = shape
    windows = sliding_windows(tokens, size, stride, before)
    scored = [token for one in windows for token in range(one.scored, one.end)]
    assert scored == list(range(0 if before else 1, tokens))
    assert all(one.num_scored >= 1 for one in windows)


@given(shapes())
def test_each_scored_token_has_the_promised_context_or_all_that_there_is(
    shape: tuple[int, int, int, int],
) -> None:
    tokens, size, stride, before = shape
    for one in sliding_windows(tokens, size, stride, before):
        assert 0 <= one.start <= one.scored < one.end <= tokens
        assert one.end - one.start <= size
        for token in range(one.scored, one.end):
            promised = min(token, size - stride)
            assert token - one.start >= promised
            assert token - one.start + before >= 1


@given(shapes())
def test_windows_are_those_of_the_guide_of_transformers(shape: tuple[int, int, int, int]) -> None:
    tokens, size, stride, before = shape
    expected, scored = [], 0 if before else 1
    for begin in range(0, tokens, stride):
        end = min(begin + size, tokens)
        expected.append(Window(begin, scored, end))
        scored = end
        if end == tokens:
            break
    assert sliding_windows(tokens, size, stride, before) == expected


@pytest.mark.parametrize(("size", "stride", "before"), [(8, 8, 0), (8, 9, 1), (8, 0, 0)])
def test_a_stride_that_leaves_a_token_without_context_is_refused(
    size: int, stride: int, before: int
) -> None:
    with pytest.raises(ValueError, match="can't have stride"):
        sliding_windows(20, size, stride, before)


@given(st.integers(0, 200), st.integers(3, 40), st.booleans())
def test_second_halves_are_those_that_llama_cpp_scores(
    tokens: int, context: int, has_bos: bool
) -> None:
    # A chunk has `context` places of the tokens, BOS included. Logits are read from place context
    # // 2 on, and each is about the next place.
    stream = ([None] if has_bos else []) + list(range(tokens))
    expected = []
    for chunk in range(len(stream) // context):
        places = range(chunk * context + context // 2 + 1, (chunk + 1) * context)
        expected += [stream[place] for place in places]
    windows = second_halves(tokens, context, int(has_bos))
    assert [token for one in windows for token in range(one.scored, one.end)] == expected
    for one in windows:
        assert one.end - one.start + int(has_bos) == context


def test_windows_with_bos_may_follow_each_other_without_a_gap() -> None:
    assert sliding_windows(6, 3, 3, 1) == [Window(0, 0, 3), Window(3, 3, 6)]
