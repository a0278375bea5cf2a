"""A program may hand the tokenizer anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from aioserve import InvalidPromptError
from aioserve.text.tokenizer import Tokenizer
from tests.attacks.hostile import HUGE_INTS, hostile_values, named_errors
from tests.text.kinds import tokenizer_of


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tokenizer_of("byte-level")


@pytest.mark.parametrize(
    "token_id",
    [*HUGE_INTS[1:], -1, None, True, 1.0, "a", b"a", [1], float("nan")],
    ids=lambda value: str(value)[:20] if not isinstance(value, int) else str(value.bit_length()),
)
def test_what_is_no_token_id_is_refused_by_its_index(tokenizer: Tokenizer, token_id: Any) -> None:
    with pytest.raises(InvalidPromptError, match=r"^ids\[1\] must be an int in") as caught:
        tokenizer.decode([5, token_id])
    assert caught.value.argument == "ids"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("ids", [None, 5, "5", b"a", {5: 5}])
def test_what_is_no_sequence_is_no_ids(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(InvalidPromptError, match=r"^ids must be a sequence, got"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("length", [5, 5000])
def test_what_no_utf8_encodes_is_named_with_its_place(tokenizer: Tokenizer, length: int) -> None:
    with pytest.raises(InvalidPromptError, match=rf"UTF-8: '\\ud800' at {length}: surrogates"):
        tokenizer.encode("x" * length + "\ud800")


def test_ids_outside_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2**32 - 1, *tokenizer.encode("fox"), 10**6]) == "fox"


@given(hostile_values(), hostile_values())
def test_fuzz_any_ids_and_any_text_succeed_or_are_refused_by_name(value: Any, other: Any) -> None:
    tokenizer = tokenizer_of("byte-level")
    for flags in ({}, {"skip": other}):
        with named_errors():
            tokenizer.decode(value, **{f"{name}_special_tokens": of for name, of in flags.items()})
        with named_errors():
            tokenizer.decode([5, value])
        with named_errors():
            tokenizer.encode(value, **({"add_special_tokens": other} if flags else {}))
