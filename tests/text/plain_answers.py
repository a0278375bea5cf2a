"""Plain definition of a completion's text, and byte-level tokenizers of any vocabulary."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence

import tokenizers
from hypothesis import strategies as st

from aioserve.request import FinishReason, SamplingParams
from aioserve.testing.fake_model import VOCAB_SIZE
from aioserve.text.tokenizer import Tokenizer

__all__ = ["byte_level", "plain_answer", "stops_of", "vocabularies"]

_TEXT = "🙂🙃🇫🇷今日は天気がいいですねÜnïcödé abc ab.\n\n"
_BYTES = _TEXT.encode()
_SINGLE = sorted({bytes([byte]) for byte in _BYTES})
_DECODER = codecs.getincrementaldecoder("utf-8")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARS = {byte: chr(byte) for byte in _PRINTABLE}
_CHARS |= {byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)}
"""Characters that byte-level vocabularies write for bytes."""


def vocabularies() -> st.SearchStrategy[list[bytes]]:
    """Distinct pieces: every byte of some text, and merges that begin and end inside characters;
    as many as a `FakeModel` has ids."""
    return st.integers(0, 2**32).map(_vocabulary)


def _vocabulary(seed: int) -> list[bytes]:
    source = random.Random(seed)
    pieces = dict.fromkeys(_SINGLE)
    for _ in range(source.randint(8, 40)):
        start = source.randrange(len(_BYTES))
        piece = _BYTES[start : start + source.randint(2, 9)]
        pieces |= dict.fromkeys(piece[:end] for end in range(1, len(piece) + 1))
    # The rest are bytes that are no part of the text, and runs of one.
    pieces |= dict.fromkeys([bytes([byte]) * size for size in (1, 2) for byte in range(256)])
    vocabulary = list(pieces)[:VOCAB_SIZE]
    source.shuffle(vocabulary)
    return vocabulary


def byte_level(vocabulary: Sequence[bytes]) -> Tokenizer:
    """Id `i` is `vocabulary[i]`."""
    spelled = {"".join(_CHARS[byte] for byte in piece): i for i, piece in enumerate(vocabulary)}
    merges = [(t[:-1], t[-1]) for t in spelled if len(t) > 1 and {t[:-1], t[-1]} <= set(spelled)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=spelled, merges=merges))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, source="drawn")


def plain_answer(
    vocabulary: Sequence[bytes],
    ids: Sequence[int],
    params: SamplingParams,
    end_ids: frozenset[int],
) -> tuple[int, str, FinishReason, int | str | None]:
    """Return the completion of a model that would go on with `ids`: number of ids, text, and why it
    ends.

    After every token all that is final is decoded anew, and every end of a stop string in what is
    new of it is tried.
    """
    include = params.include_stop_str_in_output
    before = ""
    for count, token_id in enumerate(ids, 1):
        ends = token_id in end_ids
        is_last = ends or count == params.max_tokens
        spelled = ids[: count - 1] if ends and not include else ids[:count]
        data = b"".join([vocabulary[i] for i in spelled])
        text = _DECODER("replace").decode(data, is_last)
        if count > params.min_tokens:
            for end in range(len(before) + 1, len(text) + 1):
                ending = [stop for stop in params.stop if text[:end].endswith(stop)]
                if ending:
                    stop = max(ending, key=len)
                    cut = end if include else end - len(stop)
                    return count, text[:cut], FinishReason.STOP, stop
        if ends:
            named = token_id if token_id in params.stop_token_ids else None
            return count, text, FinishReason.STOP, named
        if is_last:
            return count, text, FinishReason.LENGTH, None
        before = text
    raise AssertionError("ids for max_tokens are needed")


def stops_of(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Parts of a text, its end more often than others, and some that may not be."""
    at = st.integers(0, max(0, len(text) - 1))
    part = st.tuples(at, st.integers(1, 6)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    end = st.integers(1, 4).map(lambda size: text[-size:])
    anything = st.text("ab.\n🙂日\ufffd", min_size=1, max_size=3)
    return st.lists(st.one_of(part, end, anything), max_size=4).map(
        lambda stops: tuple(stop for stop in stops if stop)
    )
