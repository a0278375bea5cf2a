"""Each byte of a text counts for exactly one token, whatever places a tokenizer reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._evaluation.text import bytes_of_tokens
from aioserve.models.resolve import resolve
from aioserve.text.tokenizer import Tokenizer


@st.composite
def placed(draw: st.DrawFn) -> tuple[str, list[int]]:
    text = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
    return text, draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=20))


@given(placed())
def test_the_bytes_of_tokens_are_those_of_the_text(case: tuple[str, list[int]]) -> None:
    text, ends = case
    found = bytes_of_tokens(text, ends)
    assert found.sum() == len(text.encode())
    for count in range(1, len(ends)):
        assert found[:count].sum() == len(text[: max(ends[:count])].encode())


def test_the_first_token_of_a_character_has_all_of_it() -> None:
    tokenizer = Tokenizer.from_directory(resolve("pyhelp"))
    ids, ends = tokenizer.encode_with_ends("def f(x): 木🙂")
    assert ids == tokenizer.encode_plain("def f(x): 木🙂")
    found = bytes_of_tokens("def f(x): 木🙂", ends)
    assert found.sum() == len("def f(x): 木🙂".encode())
    assert 0 in found  # one character has several tokens
