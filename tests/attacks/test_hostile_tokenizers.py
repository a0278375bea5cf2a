"""Any tokenizer.json is read as the library reads it, or refused by name."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.tokenizer_file import read_tokenizer
from tests.text.test_tokenizer_file import assert_same_as_by_the_library

CHARS = "ab▁é😀"
BROKEN = (b"", b"]", b"}", b'"', b",", b"\\", b"\xff", b"1", b"\\ud800")

tokens = st.text(CHARS, max_size=3)
vocabularies = st.dictionaries(
    tokens | st.sampled_from(["<unk>", "<0x61>", "##a", "a</w>", '"', "\\", ",:"]),
    st.integers(0, 40) | st.sampled_from([2**32 - 1, 2**32, -1, 1.0, None]),
    max_size=12,
)
added_tokens = st.fixed_dictionaries(
    {
        "id": st.integers(0, 60),
        "content": st.sampled_from(["<s>", "</s>", "<unk>", "a", "b", "né", ""]) | tokens,
        "single_word": st.booleans(),
        "lstrip": st.booleans(),
        "rstrip": st.booleans(),
        "normalized": st.booleans(),
        "special": st.booleans(),
    }
)
options = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["BPE", "BPE", "BPE", "WordLevel", 5]),
        "dropout": st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]),
        "unk_token": st.sampled_from([None, "<unk>", "a"]),
        "continuing_subword_prefix": st.sampled_from([None, "", "##"]),
        "end_of_word_suffix": st.sampled_from([None, "", "</w>"]),
        "fuse_unk": st.booleans(),
        "byte_fallback": st.booleans(),
        "ignore_merges": st.booleans(),
        "other": st.sampled_from([None, [[{}], {"a": [1]}], "}"]),
    },
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A BPE tokenizer with all there is in such a file, whole or broken."""
    drawn = draw(vocabularies)
    # Of two tokens with one id the library picks one at random.
    vocab = {token: token_id for token_id, token in {i: t for t, i in drawn.items()}.items()}
    known = [*vocab, "c"]
    drawn_options = draw(options)
    prefix = drawn_options.get("continuing_subword_prefix")
    pairs = st.tuples(st.sampled_from(known), st.sampled_from(known))
    merges: Any = draw(st.lists(pairs, max_size=4))
    whole = [
        (left, right)
        for left, right in merges
        if left + right in vocab and "c" not in (left, right)
    ]
    merges = draw(st.sampled_from([whole, whole, whole, merges]))
    if prefix:
        # See below for others.
        merges = [(left, prefix + right) for left, right in merges]
    if draw(st.booleans()):
        merges = [f"{left} {right}" for left, right in merges]
    model = {"type": "BPE", **drawn_options, "vocab": vocab, "merges": merges}
    items = draw(st.permutations(list(model.items())))
    written = {
        "version": "1.0",
        "normalizer": draw(st.sampled_from([None, {"type": "NFC"}, {"type": "Lowercase"}])),
        "added_tokens": draw(st.lists(added_tokens, max_size=4)),
        "model": dict(items),
    }
    data = json.dumps(
        dict(draw(st.permutations(list(written.items())))),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
    ).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data)))
        broken = draw(
            st.sampled_from([b"", b"]", b"}", b'"', b",", b"\\", b"\xff", b"1", b"\\ud800"])
        )
        data = data[:at] + broken + data[at + draw(st.integers(0, 2)) :]
    return data


@given(files())
def test_fuzz_a_file_is_read_as_the_library_reads_it(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokenizer.json"
        file.write_bytes(data)
        assert_same_as_by_the_library(file)


@pytest.mark.parametrize("form", ["pairs", "lines", "no type", "a token twice"])
@pytest.mark.parametrize("right", ["", "a", "\U0001f600", "a\u00e9"])
def test_a_merge_over_which_the_library_ends_the_process_is_refused(
    right: str, form: str, tmp_path: Path
) -> None:
    """It cuts the prefix off by its length in bytes, here in the middle of a character."""
    model = {
        "type": "BPE",
        "continuing_subword_prefix": "##",
        "vocab": {"a": 0, right: 1},
        "merges": [f"a {right}" if form == "lines" else ["a", right]],
    }
    if form == "no type":
        del model["type"]
    added = {"id": 2, "content": "<s>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    written = {"added_tokens": [added] * (1 + (form == "a token twice")), "model": model}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(written))
    with pytest.raises(ModelError, match=r"in merges is cut by continuing_subword_prefix '##'"):
        read_tokenizer(file)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """The library would read both."""
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"type": "BPE"}, "model": {"type": "BPE"}}')
    with pytest.raises(ModelError, match="a key is in an object twice"):
        read_tokenizer(file)


def test_a_long_value_is_not_quoted_in_full(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "x" * 100_000}))
    with pytest.raises(ModelError, match="can't be read as a tokenizer") as caught:
        read_tokenizer(file)
    assert len(str(caught.value)) < 1000


def test_a_decoder_of_many_steps_is_refused_in_few_words(tmp_path: Path) -> None:
    step = {"type": "BPEDecoder", "suffix": "</w>"}
    decoder = {"type": "Sequence", "decoders": [step] * 1000}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"decoder": decoder, "model": model}))
    with pytest.raises(UnsupportedModelError, match=r"BPEDecoder \+ 990 more is not") as caught:
        Tokenizer.from_directory(tmp_path)
    assert len(str(caught.value)) < 1000
