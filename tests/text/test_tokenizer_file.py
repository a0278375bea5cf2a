"""A tokenizer.json that is read in pieces gives the tokenizer that the library would give."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from aioserve.errors import ModelError
from aioserve.text import tokenizer_file
from aioserve.text.tokenizer_file import MAX_FILE_BYTES, one_past_highest_id, read_tokenizer
from tests.text.kinds import CORPUS, KINDS
from tests.text.large_file import NUM_ADDED, NUM_TOKENS, write_large_file

NOT_FOR_THE_LIBRARY = re.compile("in merges is cut by|is in an object twice")
ADDED = "<s><|end|><tool call> n\u0301e\u0301 a b"


def ids_of(backend: tokenizers.Tokenizer, text: str) -> list[int] | str:
    try:
        return backend.encode(text).ids
    except Exception as error:  # which is the library's class for all that may be wrong
        return str(error)


def state_of(backend: tokenizers.Tokenizer) -> tuple[Any, ...]:
    """All that there is to know of a tokenizer."""
    added = {
        token_id: repr(token) for token_id, token in backend.get_added_tokens_decoder().items()
    }
    return backend.to_str(), added, [ids_of(backend, text) for text in (*CORPUS, ADDED)]


def library_reads(file: Path) -> bool:
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:  # a panic is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return False
    return True


def read_or_error(file: Path) -> tuple[tokenizers.Tokenizer, int] | str:
    try:
        return read_tokenizer(file)
    except ModelError as error:
        return str(error)


def assert_same_as_by_the_library(file: Path) -> None:
    """Check that a file is read as the library reads it, and that a file it rejects is refused."""
    read = read_or_error(file)
    if isinstance(read, str):
        assert "can't be read as a tokenizer" in read
        # Some files end the process if the library sees them.
        assert NOT_FOR_THE_LIBRARY.search(read) or not library_reads(file)
        return
    backend, vocab_size = read
    expected = tokenizers.Tokenizer.from_file(str(file))
    assert vocab_size == one_past_highest_id(expected)
    model: Any = expected.model
    if getattr(model, "dropout", None):
        assert backend.to_str() == expected.to_str()  # its ids are drawn at random
    else:
        assert state_of(backend) == state_of(expected)


def is_read_in_pieces(file: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return true if the library never sees the file as a whole."""
    seen: list[bytes] = []
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_file, "_read_whole", seen.append)
        with contextlib.suppress(TypeError):  # which the recorder causes
            read_tokenizer(file)
    return not seen


@pytest.mark.parametrize("pretty", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_as_the_library_reads_it(
    kind: str, pretty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    backend = KINDS[kind]()
    backend.save(str(file), pretty)
    assert_same_as_by_the_library(file)
    is_bpe = isinstance(backend.model, tokenizers.models.BPE)
    assert is_read_in_pieces(file, monkeypatch) == is_bpe


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_file(tmp_path_factory.mktemp("large"))


def test_a_file_of_real_size_is_read_in_pieces(
    large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert large_file.stat().st_size > 10_000_000
    assert is_read_in_pieces(large_file, monkeypatch)
    assert_same_as_by_the_library(large_file)
    assert read_tokenizer(large_file)[1] == NUM_TOKENS + NUM_ADDED


def test_merges_in_the_old_form_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_large_file(tmp_path, num_tokens=6000)
    written = json.loads(file.read_text(encoding="utf-8"))
    merges = [" ".join(pair) for pair in written["model"]["merges"]]
    written["model"]["merges"] = ["#version: 0.2", *merges]
    file.write_text(json.dumps(written))  # escaped, too
    assert is_read_in_pieces(file, monkeypatch)
    assert_same_as_by_the_library(file)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(
        ModelError, match=rf"has 1099511627776 bytes, must have at most {MAX_FILE_BYTES}"
    ):
        read_tokenizer(file)


def test_a_file_that_may_not_be_read_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: can't be read"):
        read_tokenizer(tmp_path / "tokenizer.json")
