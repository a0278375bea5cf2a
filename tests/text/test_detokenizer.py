"""Streamed text equals decoded text, for every kind of tokenizer and any ids."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from aioserve.errors import InvariantError, UnsupportedModelError
from aioserve.text import token_bytes
from aioserve.text.assembler import IncrementalDetokenizer
from aioserve.text.tokenizer import Tokenizer
from tests.text.kinds import CORPUS, KINDS, byte_level_backend, tokenizer_of
from tests.tiers import examples
from tests.timing import seconds_computing

FALLBACK_KINDS = [kind for kind in KINDS if kind.startswith("byte fallback")]


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some past the vocabulary, with more than their share of real text and of bytes."""
    anything = st.integers(0, tokenizer.vocab_size + 8)
    ids = range(tokenizer.vocab_size)
    rare = st.one_of(
        st.sampled_from([i for i in ids if isinstance(tokenizer.pieces[i], bytes)] or [0]),
        st.sampled_from([i for i in ids if tokenizer.pieces[i] in (" ", b" ")] or [0]),
        st.sampled_from([*tokenizer.special_ids, *ids[-3:]]),
    )
    encoded = st.sampled_from(CORPUS).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda cut: tokenizer.encode(text[cut:])[:6])
    )
    part = st.one_of(st.lists(anything, max_size=4), st.lists(rare, max_size=6), encoded)
    return st.lists(part, max_size=6).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pushes_and_flush_equal_decode_for_any_ids(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=examples(150))
    @given(ids_of(tokenizer))
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_only_an_unfinished_character_or_byte_run_is_held(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=examples(50))
    @given(ids_of(tokenizer))
    def check(ids: list[int]) -> None:
        *pushed, held = stream(tokenizer, ids)
        pieces = [piece for piece in map(tokenizer.pieces.__getitem__, ids) if piece is not None]
        if not pieces or isinstance(pieces[-1], str):
            assert held == ""
        elif tokenizer.pieces.byte_level:
            assert held in ("", "\ufffd")
        else:
            run = list(itertools.takewhile(lambda piece: isinstance(piece, bytes), pieces[::-1]))
            assert len(held.encode()) <= 3 * len(run)
        assert "".join(pushed) + held == tokenizer.decode(ids)

    check()


@given(text=st.text(max_size=40))
def test_byte_level_text_survives_encoding_and_streaming(text: str) -> None:
    tokenizer = tokenizer_of("byte-level")
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback, stripped"])
def test_real_text_survives_encoding_and_streaming(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in CORPUS:
        assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


def test_a_character_split_over_tokens_comes_out_with_its_last_token() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    ids = [i for byte in "ж🙂".encode() for i in byte_ids(tokenizer, byte)]
    assert stream(tokenizer, ids) == ["", "ж", "", "", "", "🙂", ""]


def test_a_truncated_character_is_flushed_as_a_replacement() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    ids = [i for byte in "🙂".encode()[:3] for i in byte_ids(tokenizer, byte)]
    assert stream(tokenizer, ids) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("num_ready", [0, 20, 10**6])
def test_the_first_pieces_are_there_from_the_start_and_the_others_when_asked_for(
    num_ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dict(Tokenizer(byte_level_backend()).pieces)
    monkeypatch.setattr(token_bytes, "NUM_READY", num_ready)
    tokenizer = Tokenizer(byte_level_backend())
    size = tokenizer.vocab_size
    assert list(tokenizer.pieces) == list(range(min(num_ready, size)))
    assert [tokenizer.pieces[i] for i in range(size)] == [expected[i] for i in range(size)]


def byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [i for i in range(tokenizer.vocab_size) if tokenizer.pieces[i] == bytes([byte])][:1]


@pytest.mark.parametrize("kind", FALLBACK_KINDS)
def test_a_run_of_byte_tokens_comes_out_when_it_ends(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    letter = next(i for i in range(tokenizer.vocab_size) if tokenizer.pieces[i] == "e")
    run = [i for byte in "🙂".encode() for i in byte_ids(tokenizer, byte)]
    assert stream(tokenizer, [*run, letter, *run]) == ["", "", "", "", "🙂e", "", "", "", "", "🙂"]
    assert stream(tokenizer, [*run[:3], letter]) == ["", "", "", "\ufffd\ufffd\ufffde", ""]


def test_special_ids_and_ids_past_the_vocabulary_add_nothing() -> None:
    tokenizer = tokenizer_of("byte-level")
    assert len(tokenizer.special_ids) == 2
    ids = [*tokenizer.special_ids, tokenizer.vocab_size, tokenizer.vocab_size + 1000, 2**32 - 1]
    assert stream(tokenizer, ids) == [""] * (len(ids) + 1)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_no_tokenizer_has_is_refused(token_id: int) -> None:
    with pytest.raises(InvariantError, match=str(token_id)):
        IncrementalDetokenizer(tokenizer_of("byte-level")).push(token_id)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback, stripped"])
def test_a_long_run_without_a_whole_character_costs_no_more_per_token(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (broken,) = byte_ids(tokenizer, 0x80)

    def seconds(count: int) -> float:
        """Processor time per token."""

        def read() -> None:
            assert "".join(stream(tokenizer, [broken] * count)) == "\ufffd" * count

        return seconds_computing(read) / count

    # Twenty times the tokens: what looks at the whole run each time takes nearly twenty times.
    assert min(seconds(40_000) for _ in range(3)) < 4 * min(seconds(2_000) for _ in range(5))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Replace(tokenizers.Regex("a+"), " "),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Metaspace(), decoders.ByteLevel()]),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused_by_name(
    decoder: decoders.Decoder,
) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=r"some/file: decoder \w+"):
        Tokenizer(backend, source="some/file")
