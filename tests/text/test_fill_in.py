"""Marks of a gap are found where each is a token, whatever kind of token it is."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, models

from aioserve.text.fill_in import FORMS, fill_in_of, filled_in
from aioserve.text.tokenizer import Tokenizer


def with_tokens(names: list[str], *, special: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<": 1}, merges=[], unk_token="a"))
    backend.add_tokens([AddedToken(name, special=special) for name in names])
    return Tokenizer(backend)


def marks_of(form: str) -> list[str]:
    return [mark for mark in filled_in(form, "\0", "\0").split("\0") if mark]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_that_whose_marks_are_all_tokens(form: str, special: bool) -> None:
    names = marks_of(form)
    assert len(names) >= 2
    assert fill_in_of(with_tokens(names, special=special)) == form
    assert fill_in_of(with_tokens(names[1:], special=special)) is None


def test_texts_are_put_as_they_are() -> None:
    assert filled_in("<a>{prefix}<b>{suffix}", "{suffix}", "{prefix}") == "<a>{suffix}<b>{prefix}"
