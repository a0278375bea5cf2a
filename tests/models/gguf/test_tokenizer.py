"""Tokenizers of GGUF files: ids are those of the tokenizer that the model came with."""

from __future__ import annotations

import functools
import json
import unicodedata
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.models.gguf import tokenizer
from aioserve.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from aioserve.models.gguf.tokenizer import GGUFVocabulary
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.tokenizer_file import parse_tokenizer
from tests.models.gguf.vocabularies import (
    BYTE,
    CONTROL,
    DEFINED,
    NORMAL,
    SPACE,
    USER_DEFINED,
    byte_level,
    sentencepiece,
)

WORDS = (
    *CONTROL, *DEFINED, "it's", "IT'S", "cafés", "5,000", "12345", "世界", "😀👍🏽", "Grüße", "x",
    "schedule", "request", "\n\n", "\t", "\r\n", "  ", "    ", " ", "e\u0301", "\u00a0", "...",
    "//", "\u0e01",
)  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=8).map("".join)


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    backend, size = parse_tokenizer(GGUFVocabulary(metadata, "x.gguf").tokenizer_json(), "x.gguf")
    return Tokenizer(backend, source="x.gguf", vocab_size=size)


def transformers_of(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    names = {
        "tokens": "tokens", "merges": "merges", "scores": "scores", "token_type": "token_type",
        "model": "tokenizer_type", "pre": "pre_tokenizer_type", "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id", "unknown_token_id": "unk_token_id",
        "add_space_prefix": "add_prefix_space",
    }  # fmt: skip
    given = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for key, name in names.items()
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is not None
    }
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], given)
    return backend


@functools.cache
def byte_level_pair(pre: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return tokenizer_of(byte_level(pre)), transformers_of(byte_level(pre))


RULES = {rules: name for name, rules in PRE_TOKENIZERS.items()}
"""One name for each set of rules."""
COMPARED = [name for name in RULES.values() if name in {*GGUF_PRE_TOKENIZER_SPLITS, "phi-2"}]


@pytest.mark.parametrize("pre", COMPARED)
@given(text=texts)
def test_byte_level_ids_are_those_of_transformers(pre: str, text: str) -> None:
    assume("two words" not in text)  # transformers spells this token with a space differently
    ours, theirs = byte_level_pair(pre)
    if PRE_TOKENIZERS[pre].composes:
        text = unicodedata.normalize("NFC", text)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


@functools.cache
def byte_level_of(pre: str) -> Tokenizer:
    return tokenizer_of(byte_level(pre))


@pytest.mark.parametrize("pre", [name for name in RULES.values() if name not in COMPARED])
@given(text=texts)
def test_every_way_to_cut_loses_nothing(pre: str, text: str) -> None:
    ours = byte_level_of(pre)
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 12 it's", ["a", "Ġ", "1", "2", "Ġit", "'s"]),
        ("deepseek-coder", "a 12\nit's", ["a", "Ġ", "1", "2", "Ċ", "it", "'", "s"]),
        (
            "deepseek-llm",
            "a 12\nit's é, b",
            ["a", "Ġ", "1", "2", "Ċ", "it", "'", "s", "ĠÃ©", ",", "Ġb"],
        ),
        ("deepseek-v3", "a1234 .it's\n", ["a", "123", "4", "Ġ.", "it", "'s", "Ċ"]),
        ("llama-bpe", "a 1234 IT'S", ["a", "Ġ", "123", "4", "ĠIT", "'S"]),
        ("qwen2", "a 12 IT'S", ["a", "Ġ", "1", "2", "ĠIT", "'S"]),
        ("tekken", "aBc 12/\n", ["a", "Bc", "Ġ", "1", "2", "/Ċ"]),
        ("gpt-4o", "aBc's 1234", ["a", "Bc's", "Ġ", "123", "4"]),
        ("gpt-2", "a 1234  b's", ["a", "Ġ1234", "Ġ", "Ġb", "'s"]),
    ],
)
def test_text_is_cut_as_the_name_says(pre: str, text: str, pieces: list[str]) -> None:
    rules = PRE_TOKENIZERS[pre].pre_tokenizer()
    backend = tokenizers.Tokenizer.from_str(
        json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": rules})
    )
    assert backend.pre_tokenizer is not None
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_piece_that_is_a_token_is_one_where_merges_are_ignored() -> None:
    tokens = ["a", "b", "c", "bc", "abc"]  # "a" + "bc" isn't a merge
    for pre, ids in (("llama-bpe", [4]), ("qwen2", [0, 3])):
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["b c"],
        }
        assert tokenizer_of(metadata).encode("abc") == ids


def test_a_message_of_gpt_oss_is_no_completion() -> None:
    """A completion has several messages. Only the last one, or a call, ends it."""
    marks = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    for tokens, ends in ((["a", *marks], (1, 3, 4)), (["a", *marks[:2]], (1, 2))):
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-4o",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3 if "<" in token else 1 for token in tokens]),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.eot_token_id": 2,
        }
        assert GGUFVocabulary(metadata, "x.gguf").eos_token_ids == ends


def test_qwen_composes_characters_first() -> None:
    ours = byte_level_of("qwen2")
    assert ours.encode("e\u0301") == ours.encode("\u00e9")
    ours = byte_level_of("llama-bpe")
    assert ours.encode("e\u0301") != ours.encode("\u00e9")


# -- SentencePiece


def by_score(metadata: dict[str, Any], text: str) -> list[int]:
    """Encode by SentencePiece's BPE.

    The neighbours that make the token with the best score are merged, the leftmost pair of equals
    first, until no pair makes a token. The rest become bytes."""
    tokens = [
        t if t.strip(" ") else t.replace(" ", SPACE) for t in metadata["tokenizer.ggml.tokens"]
    ]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    scores = metadata["tokenizer.ggml.scores"].tolist()
    ids = {token: i for i, token in enumerate(tokens)}
    rank = {
        token: (1.0, -i) if kinds[i] == USER_DEFINED else (0.0, scores[i])
        for token, i in ids.items()
        if kinds[i] in (NORMAL, USER_DEFINED)
    }
    symbols = list(text)
    while True:
        pairs = [(rank[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        if symbol in rank:
            found.append(ids[symbol])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@functools.cache
def llama() -> Tokenizer:
    return tokenizer_of(sentencepiece())


@given(text=texts)
def test_sentencepiece_ids_follow_from_the_scores(text: str) -> None:
    assume(not any(word in text for word in (*CONTROL, *DEFINED, "<unk>", SPACE)))
    spelled = SPACE + text.replace(" ", SPACE) if text else ""
    assert llama().encode(text) == [1, *by_score(sentencepiece(), spelled)]
    assert llama().decode(llama().encode(text)) == text


@functools.cache
def gemma_pair() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    metadata = sentencepiece("gemma3", add_space_prefix=False)
    return tokenizer_of(metadata), transformers_of(metadata)


@given(text=texts)
def test_gemmas_ids_are_those_of_transformers(text: str) -> None:
    ours, theirs = gemma_pair()
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text.replace(SPACE, " ")


def test_no_text_becomes_a_control_token_or_the_name_of_a_byte_by_merging() -> None:
    metadata = sentencepiece()
    old = metadata["tokenizer.ggml.tokens"]
    new = [part for part in ("<", "<s", "s>", "<0x0", "A>", ">") if part not in old]
    for name, values in (("token_type", [NORMAL] * len(new)), ("scores", [-1.0] * len(new))):
        array = metadata[f"tokenizer.ggml.{name}"]
        metadata[f"tokenizer.ggml.{name}"] = np.append(array, np.array(values, array.dtype))
    metadata["tokenizer.ggml.tokens"] = [*old, *new]
    model = json.loads(GGUFVocabulary(metadata, "x").tokenizer_json())["model"]
    made = {left + right for left, right in model["merges"]}
    assert {"<", "s>", "<0x0", "A>"} <= model["vocab"].keys()
    assert not made & {*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))}


def test_phi3s_marks_take_the_space_behind_them() -> None:
    added = json.loads(GGUFVocabulary(sentencepiece("phi3"), "x").tokenizer_json())["added_tokens"]
    assert {token["content"]: token["rstrip"] for token in added if token["special"]} == {
        "<unk>": False, "<s>": False, "</s>": True, "<|im_end|>": True,
    }  # fmt: skip


# -- tokens around a text


@pytest.mark.parametrize(
    ("metadata", "before", "behind"),
    [
        (sentencepiece(), 1, 0),
        (sentencepiece(add_bos_token=False), 0, 0),
        (sentencepiece(add_eos_token=True), 1, 1),
        (byte_level("gpt-2"), 0, 0),
        (byte_level("gpt-2", add_bos_token=True, add_eos_token=True), 1, 1),
        (byte_level("llama-bpe"), 1, 0),
        (byte_level("llama-bpe", add_bos_token=False), 0, 0),
    ],
)
def test_texts_are_framed_as_the_file_says(
    metadata: dict[str, Any], before: int, behind: int
) -> None:
    ours = tokenizer_of(metadata)
    plain = ours.encode("a", add_special_tokens=False)
    bos, eos = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    assert ours.encode("a") == [bos] * before + plain + [eos] * behind
    assert ours.frame == (before, behind)


def test_control_tokens_are_special_and_what_fills_the_vocabulary_is_no_token() -> None:
    metadata = byte_level("qwen2")
    ours = tokenizer_of(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert sorted(ours.special_names.values()) == sorted(CONTROL)
    assert ours.encode("<think>a") == [tokens.index("<think>"), *ours.encode("a")]
    assert ours.vocab_size == len(tokens) - 1
    assert ours.decode([tokens.index("[PAD999]")]) == ""


def test_all_tokens_that_end_a_completion_are_found() -> None:
    tokens = byte_level("qwen2")["tokenizer.ggml.tokens"]
    eos, im_end, think = map(tokens.index, ("</s>", "<|im_end|>", "<think>"))
    assert GGUFVocabulary(byte_level("qwen2"), "x").eos_token_ids == (eos, im_end)
    given = byte_level("qwen2", eot_token_id=think, eom_token_id=eos)
    assert GGUFVocabulary(given, "x").eos_token_ids == (eos, think, im_end)


def test_the_chat_template_comes_with_the_names_of_its_tokens() -> None:
    metadata = {**sentencepiece(), "tokenizer.chat_template": "{{ bos_token }}"}
    vocabulary = GGUFVocabulary(metadata, "x")
    assert vocabulary.chat_template == "{{ bos_token }}"
    assert vocabulary.tool_use_template is None
    named = metadata | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert GGUFVocabulary(named, "x").tool_use_template == "{{ tools }}"
    assert vocabulary.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model = 't5' is not supported"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model must be a string, got 3"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens must be an array of strings"),
        (byte_level("made-up"), "tokenizer.ggml.pre = 'made-up' is not supported: how text is cut"),
        (byte_level("qwen2", merges=["ab"]), "tokenizer.ggml.merges must be pairs"),
        (byte_level("qwen2", merges=["a b c"]), "tokenizer.ggml.merges must be pairs"),
        (byte_level("qwen2", merges=["a nowhere"]), "can't be read as a tokenizer"),
        (byte_level("qwen2", merges=np.zeros(3)), "merges must be an array of strings"),
        (byte_level("qwen2", bos_token_id=10**6), "tokenizer.ggml.bos_token_id must be an integer"),
        (byte_level("qwen2", eos_token_id="x"), "tokenizer.ggml.eos_token_id must be an integer"),
        (byte_level("qwen2", token_type=np.ones(3, np.int32)), "a number for each of"),
        (
            byte_level("qwen2", tokens=["a", "b", "a"], token_type=None),
            "'a' is token 0 and token 2",
        ),
        (byte_level("qwen2", tokens=["a" * 300], token_type=None), "token 0 has 300 characters"),
        (byte_level("qwen2", tokens=[], token_type=None), "tokens must be at least one token"),
        (sentencepiece(scores=["a"]), "tokenizer.ggml.scores must be an array with a number"),
        (sentencepiece(add_bos_token=1), "tokenizer.ggml.add_bos_token must be true or false"),
        (byte_level("gpt-2", bos_token_id=None, add_bos_token=True), "bos_token_id must be there"),
        (
            {**sentencepiece(), "tokenizer.chat_template": 3},
            "chat_template must be a string, got 3",
        ),
        (
            {**sentencepiece(), "tokenizer.chat_template.tool_use": 3},
            "chat_template.tool_use must be a string, got 3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_that_make_no_tokenizer_are_refused(metadata: dict[str, Any], says: str) -> None:
    def used() -> None:
        vocabulary = GGUFVocabulary(metadata, "x.gguf")
        assert vocabulary.chat_template is vocabulary.tool_use_template is None
        tokenizer_of(metadata)

    with pytest.raises(ModelError) as caught:
        used()
    assert says in str(caught.value)
    assert "x.gguf" in str(caught.value)
    assert isinstance(caught.value, UnsupportedModelError) == ("is not supported" in says)


def test_a_vocabulary_has_bounds_that_the_largest_in_use_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = sentencepiece()
    characters = sum(map(len, metadata["tokenizer.ggml.tokens"]))
    vocabulary = GGUFVocabulary(metadata, "x.gguf")
    merges = json.loads(vocabulary.tokenizer_json())["model"]["merges"]
    monkeypatch.setattr(tokenizer, "MAX_VOCABULARY_CHARS", characters)
    monkeypatch.setattr(tokenizer, "MAX_MERGES", len(merges))
    tokenizer_of(metadata)
    monkeypatch.setattr(tokenizer, "MAX_MERGES", len(merges) - 1)
    with pytest.raises(ModelError, match=r"x\.gguf: .* of each other in more than \d+ ways"):
        tokenizer_of(metadata)
    monkeypatch.setattr(tokenizer, "MAX_VOCABULARY_CHARS", characters - 1)
    with pytest.raises(ModelError, match=rf"have {characters} characters together"):
        tokenizer_of(metadata)


def test_bytes_without_tokens_of_their_own_are_unknown() -> None:
    metadata = sentencepiece()
    kinds = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = np.where(kinds == BYTE, NORMAL, kinds)
    assert tokenizer_of(metadata).encode("\u0e01")[-1] == 0
