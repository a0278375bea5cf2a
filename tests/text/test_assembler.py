"""One answer's text: decode, cut at the first stop string, delivered with the right tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.request import Logprobs, SamplingParams, TopLogprob
from aioserve.text.assembler import TextAssembler
from tests.text.kinds import KINDS as EVERY_KIND
from tests.text.kinds import tokenizer_of
from tests.text.test_detokenizer import byte_ids, ids_of
from tests.text.test_stop import cut

KINDS = ["byte-level", "byte fallback, stripped"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_joined_text_is_the_decode_of_the_pushed_ids_before_the_first_stop(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @given(ids_of(tokenizer), st.data())
    def check(ids: list[int], data: st.DataObject) -> None:
        whole = tokenizer.decode(ids)
        pieces = st.integers(0, len(whole)).flatmap(
            lambda at: st.integers(1, 5).map(lambda size: whole[at : at + size])
        )
        drawn = data.draw(st.lists(st.one_of(pieces, st.text(max_size=2)), max_size=3))
        stops = tuple(stop for stop in drawn if stop)
        assembler = TextAssembler(tokenizer, SamplingParams(stop=stops))
        text, stopped = "", False
        for token_id in ids:
            piece, stopped = assembler.push(token_id)
            text += piece
            if stopped:
                break
        at_end = assembler.finish()
        assert not (stopped and at_end)
        assert (text + at_end, assembler.matched_stop) == cut(whole, stops)

    check()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_forks_have_each_the_text_of_its_own_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @given(ids_of(tokenizer), ids_of(tokenizer), ids_of(tokenizer), st.data())
    def check(shared: list[int], one: list[int], two: list[int], data: st.DataObject) -> None:
        whole = tokenizer.decode([*shared, *one])
        pieces = st.integers(0, len(whole)).map(lambda at: whole[at : at + 3])
        stops = tuple({data.draw(pieces)} - {""})
        first = TextAssembler(tokenizer, SamplingParams(stop=stops))
        text = ""
        for token_id in shared:
            text += first.push(token_id)[0]
            if first.matched_stop is not None:
                return
        second = first.fork()
        texts, goes_on = [text, text], [list(one), list(two)]
        while any(goes_on):
            at = data.draw(st.sampled_from([at for at, ids in enumerate(goes_on) if ids]))
            piece, stopped = (first, second)[at].push(goes_on[at].pop(0))
            texts[at] += piece
            if stopped:
                goes_on[at] = []
        found = [
            (text + each.finish(), each.matched_stop)
            for text, each in zip(texts, (first, second), strict=True)
        ]
        assert found == [cut(tokenizer.decode([*shared, *ids]), stops) for ids in (one, two)]

    check()


def test_text_is_delivered_with_the_token_that_made_it_final() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = [i for byte in b"a##b#" for i in byte_ids(tokenizer, byte)]
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("###",)))
    assert [assembler.push(i) for i in ids] == [
        ("a", False),
        ("", False),
        ("", False),
        ("##b", False),
        ("", False),
    ]
    assert assembler.finish() == "#"
    assert assembler.finish() == ""


def test_a_token_after_the_stop_is_refused() -> None:
    tokenizer = tokenizer_of("byte-level")
    (dot,) = byte_ids(tokenizer, ord("."))
    assembler = TextAssembler(tokenizer, SamplingParams(stop=(".",)))
    assert assembler.push(dot) == ("", True)
    with pytest.raises(InvariantError, match=str(dot)):
        assembler.push(dot)
    assert assembler.finish() == ""


def test_a_token_after_the_end_is_refused() -> None:
    assembler = TextAssembler(tokenizer_of("byte-level"), SamplingParams())
    assert assembler.finish() == ""
    with pytest.raises(InvariantError, match="after the end"):
        assembler.push(0)


def test_a_stop_that_only_the_flushed_tail_completes_still_cuts() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = [i for byte in b"ok\xf0\x9f" for i in byte_ids(tokenizer, byte)]
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("k\ufffd",)))
    assert [assembler.push(i) for i in ids] == [("o", False), ("", False), ("", False), ("", False)]
    assert assembler.finish() == ""
    assert assembler.matched_stop == "k\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_an_id_that_ends_the_answer_has_a_text_if_that_is_wanted_or_it_is_a_mark(
    include: bool,
) -> None:
    tokenizer = tokenizer_of("byte-level")
    params = SamplingParams(include_stop_str_in_output=include)
    ids = [i for byte in b"a." for i in byte_ids(tokenizer, byte)]
    for shown, text in ({}, "a." if include else "a"), ({ids[1]: "</mark>"}, "a</mark>"):
        assembler = TextAssembler(tokenizer, params, shown)
        pushed = assembler.push(ids[0])[0] + assembler.push(ids[1], is_end=True)[0]
        assert pushed + assembler.finish() == text


def test_without_a_tokenizer_there_is_no_text_and_nothing_to_stop_at() -> None:
    assembler = TextAssembler(None, SamplingParams())
    assert assembler.push(7) == ("", False)
    assert assembler.finish() == ""
    with pytest.raises(InvariantError, match="after the end"):
        assembler.push(8)
    with pytest.raises(InvariantError, match="stop strings without a tokenizer"):
        TextAssembler(None, SamplingParams(stop="x"))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_alternatives_have_the_text_that_each_alone_adds(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = next(
        token_id
        for token_id in range(tokenizer.vocab_size)
        if (text := tokenizer.decode([token_id])) and text.isascii() and text.isalnum()
    )

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 9), max_size=5))
    def check(ids: list[int]) -> None:
        assembler = TextAssembler(tokenizer, SamplingParams())
        given = Logprobs(-1.0, tuple([TopLogprob(id, -float(id)) for id in ids]))
        told = assembler.with_texts(given)
        assert told.logprob == -1.0
        for id, one in zip(ids, told.top, strict=True):
            added = tokenizer.decode([before, id]).removeprefix(tokenizer.decode([before]))
            name = tokenizer.special_names.get(id)
            assert one == TopLogprob(id, -float(id), added if name is None else name)

    check()


def test_logprobs_without_alternatives_or_a_tokenizer_stay_as_they_are() -> None:
    alone, some = Logprobs(-1.0), Logprobs(-1.0, (TopLogprob(3, -2.0),))
    assert TextAssembler(tokenizer_of("byte-level"), SamplingParams()).with_texts(alone) is alone
    assert TextAssembler(None, SamplingParams()).with_texts(some) is some
