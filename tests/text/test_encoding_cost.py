"""Tokenizers that multiply texts are refused, and slow ones are kept from the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from aioserve import Engine, SamplingParams
from aioserve.errors import UnsupportedModelError
from aioserve.text import library
from aioserve.text.encoding_cost import _is_quick, _longest
from aioserve.text.tokenizer import Tokenizer
from tests.grammars.walks import pyhelp

GPT = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_4 = (
    r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def backend(normalizer: Any = None, pre_tokenizer: Any = None, **model: Any) -> Any:
    vocab = {"a": 0, "b": 1, " ": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", **model))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


DOUBLES = normalizers.Replace("a", "aa")
MULTIPLY: list[tuple[Any, Any]] = [
    (normalizers.Sequence([DOUBLES] * 40), None),
    (normalizers.Sequence([normalizers.Sequence([DOUBLES] * 5)] * 2), None),
    (normalizers.Replace(Regex("a"), "a" * 300), None),
    (normalizers.Replace(Regex(""), "a" * 300), None),
    (normalizers.Sequence([normalizers.ByteLevel()] * 5), None),
    (normalizers.Sequence([normalizers.Prepend("aa")] * 6), None),
    (None, pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 5)),
]


@pytest.mark.parametrize(("normalizer", "pre_tokenizer"), MULTIPLY)
def test_steps_that_multiply_a_text_are_refused(normalizer: Any, pre_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="must make at most 256 characters of one"):
        Tokenizer(backend(normalizer, pre_tokenizer), source="mine")


def test_usual_steps_are_quick() -> None:
    for normalizer, pre_tokenizer in (
        (None, None),
        (
            normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "b")]),
            None,
        ),
        (normalizers.NFC(), pre_tokenizers.Split(Regex(GPT_4), "isolated")),
        (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
        (None, pre_tokenizers.ByteLevel()),
        (normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()] * 3), None),
    ):
        assert Tokenizer(backend(normalizer, pre_tokenizer)).is_quick
    assert pyhelp()[0].is_quick


@pytest.mark.parametrize(
    "expression", [GPT, GPT_4, r"\d{1,3}(?=(?:\d{3})*\b)", r"[(+*]+a", r"\(a\)+"]
)
def test_usual_expressions_are_quick(expression: str) -> None:
    assert _is_quick(expression)


@pytest.mark.parametrize(
    "expression",
    [r"(a+)+$", r"(?:a|b*)*c", r"a*a*a*b", r"(a{1,99}){1,99}$", r"((a*)b)*", r"(?:(?:a{2,})){2}"],
)
def test_expressions_that_go_back_again_and_again_are_not(expression: str) -> None:
    assert not _is_quick(expression)


def test_texts_of_a_charsmap_are_measured() -> None:
    assert _longest("BAAAAAAAAABhAGJiYgBjYwA=") == 3  # a table of four bytes, then a, bbb, cc


@pytest.mark.parametrize("dropout", [0.1, 1.0])
def test_dropout_is_refused_by_name(dropout: float) -> None:
    with pytest.raises(UnsupportedModelError, match="mine: dropout must be left out"):
        Tokenizer(backend(dropout=dropout), source="mine")
    assert Tokenizer(backend(dropout=0.0)).is_quick


@pytest.mark.asyncio
@pytest.mark.parametrize("is_quick", [True, False])
async def test_a_tokenizer_that_may_be_slow_is_asked_on_threads_alone(
    monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    asked: list[bool] = []
    encode = library.encode_ids

    def told(*arguments: Any, **options: Any) -> list[int]:
        asked.append(threading.current_thread() is threading.main_thread())
        assert options["is_quick"] is is_quick  # else the library keeps the lock
        return encode(*arguments, **options)

    async with Engine("pyhelp") as engine:
        params = SamplingParams(max_tokens=2)
        expected = await engine.generate("import os", params)
        tokenizer = engine._lifecycle.model.tokenizer
        assert tokenizer is not None
        monkeypatch.setattr(tokenizer, "is_quick", is_quick)
        monkeypatch.setattr(library, "encode_ids", told)
        assert (await engine.generate("import os", params)).token_ids == expected.token_ids
    assert asked == [is_quick]


def test_the_library_is_called_so_that_it_lets_go_of_the_lock() -> None:
    tokenizer, _ = pyhelp()
    for text in ("", "a", "import os" * 20):
        plain = library.encode_ids(tokenizer._backend, text)
        assert library.encode_ids(tokenizer._backend, text, is_quick=False) == plain
        assert library.encode(tokenizer._backend, text, is_quick=False).ids == plain
