"""Loading, encoding and decoding."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import processors

from aioserve.errors import InvalidPromptError, ModelError
from aioserve.text.tokenizer import Tokenizer
from tests.text.kinds import CORPUS, byte_level_backend, save, tokenizer_of


def test_a_directory_without_a_tokenizer_is_an_error_naming_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_sentencepiece_model_alone_is_an_error_that_says_how_to_convert_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has tokenizer\.model and no tokenizer\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    assert "`pip install transformers sentencepiece protobuf`" in str(caught.value)
    assert f"from_pretrained({str(tmp_path)!r}).save_pretrained({str(tmp_path)!r})" in str(
        caught.value
    )


def test_what_the_error_says_to_do_makes_a_tokenizer(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has vocab\.json and no tokenizer\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    *_, what_to_do = re.findall("`(.+?)`", str(caught.value))
    exec(what_to_do, {})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_a_malformed_file_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path))
    ids = tokenizer.encode(CORPUS[0])
    assert len(ids) > 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == CORPUS[0]


def test_special_tokens_are_added_only_on_request(tmp_path: Path) -> None:
    backend = byte_level_backend()
    begin = backend.token_to_id("<|user|>")
    assert begin is not None
    backend.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", begin)]
    )
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path))
    bare = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [begin, *bare]
    assert tokenizer.frame == (1, 0)
    assert Tokenizer(byte_level_backend()).frame == (0, 0)
    assert tokenizer.decode([begin, *bare]) == "fox"
    assert tokenizer.decode([begin, *bare], skip_special_tokens=False) == "<|user|>fox"


def test_the_vocabulary_size_is_one_past_the_highest_id() -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer(backend)
    assert backend.id_to_token(tokenizer.vocab_size - 1) == "né"
    assert backend.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.special_ids == {
        backend.token_to_id("<|end|>"),
        backend.token_to_id("<|user|>"),
    }


@pytest.mark.parametrize("text", ["a lone surrogate \ud800", b"bytes", None])
def test_what_is_not_text_is_refused_as_a_prompt(text: object) -> None:
    with pytest.raises(InvalidPromptError, match="text"):
        tokenizer_of("byte-level").encode(text)  # pyright: ignore[reportArgumentType]


def test_threads_may_encode_and_decode_at_the_same_time() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    texts = [f"{i} {CORPUS[i % len(CORPUS)]}" * 20 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(tokenizer.encode, texts))
        decoded = list(pool.map(tokenizer.decode, encoded))
    assert decoded == texts
    assert encoded == [tokenizer.encode(text) for text in texts]
