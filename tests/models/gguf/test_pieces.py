"""SentencePiece's vocabularies in written GGUF files: scores give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import json_file
from aioserve.errors import ConfigError
from aioserve.models.files import model_files
from aioserve.models.gguf.copy import write_gguf
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.gguf.mixes import MIXES
from aioserve.models.gguf.pieces import same_merges
from aioserve.models.gguf.tokenizer import GGUFVocabulary
from tests.models.gguf.test_model import written
from tests.models.gguf.vocabularies import TEXT, sentencepiece
from tests.tiers import examples

FIELDS = ("tokens", "token_type", "unknown_token_id", "bos_token_id", "add_space_prefix")
MARKED = "a<|im_end|> b<think>   c two words<|im_end|>\n  <s>"


def model_with(tmp_path: Path, name: str, metadata: dict[str, Any], *padding: str) -> Path:
    """Write a model whose tokenizer.json matches these metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = metadata["tokenizer.ggml.eos_token_id"]
    size = {"vocab_size": len(tokens) + len(padding), "eos_token_id": ends}
    directory = written(name, tmp_path / "hf", dtype="bfloat16", **size)
    (directory / "tokenizer.json").write_bytes(GGUFVocabulary(metadata, "x").tokenizer_json())
    return directory


def change(directory: Path, edit: Any) -> None:
    file = directory / "tokenizer.json"
    said = json.loads(file.read_text())
    edit(said)
    file.write_text(json.dumps(said))


def copied(directory: Path) -> Path:
    write_gguf(directory, directory.parent / "x.gguf", MIXES["BF16"])
    return directory.parent / "x.gguf"


@pytest.mark.parametrize(
    ("name", "prefix", "padding"),
    [("gemma3", False, ()), ("gemma2", False, ("[PAD]",)), ("phi3", True, ()), ("llama", True, ())],
)
def test_a_vocabulary_comes_back(
    tmp_path: Path, name: str, prefix: bool, padding: tuple[str, ...]
) -> None:
    metadata = sentencepiece(name, add_space_prefix=prefix)
    directory = model_with(tmp_path, name, metadata, *padding)
    file = copied(directory)
    found = GGUFFile(file)
    count = len(metadata["tokenizer.ggml.tokens"])
    for field in FIELDS:
        one, other = (said[f"tokenizer.ggml.{field}"] for said in (found.metadata, metadata))
        if isinstance(one, list | np.ndarray):
            one = one[:count]
        assert np.array_equal(one, other), field
    assert found.metadata.get("general.name") is None  # it lacks <|endoftext|>
    found.close()
    ours, theirs = (model_files(path).tokenizer() for path in (file, directory))
    for text in (TEXT, MARKED, f" {MARKED}", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_names == theirs.special_names


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_package_reads_scores_that_fall_as_tokens_are_made(tmp_path: Path) -> None:
    directory = model_with(tmp_path, "gemma3", sentencepiece("gemma3", add_space_prefix=False))
    change(directory, lambda said: said["model"].update(merges=[*map(" ".join, merges_of(said))]))
    fields = gguf.GGUFReader(copied(directory)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
    made = dict.fromkeys(
        map("".join, merges_of(json.loads((directory / "tokenizer.json").read_text())))
    )
    learned = [scores[token] for token in made if token.strip("\u2581")]
    assert learned == sorted(learned, reverse=True)
    assert len(set(learned)) == len(learned) > 100
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is False


def test_a_vocabulary_may_have_more_values_than_other_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_with(tmp_path, "llama", sentencepiece("llama"))
    monkeypatch.setattr(json_file, "MAX_VALUES", 500)
    assert len(model_files(copied(directory)).tokenizer().encode(TEXT)) > 500


def merges_of(said: dict[str, Any]) -> list[list[str]]:
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in said["model"]["merges"]]


def test_phi3s_marks_take_the_space_behind_them(tmp_path: Path) -> None:
    metadata = sentencepiece("phi3")
    old = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [
        {"two words": "<|endoftext|>"}.get(token, token) for token in old
    ]
    directory = model_with(tmp_path, "phi3", metadata)
    file = copied(directory)
    found = GGUFFile(file)
    assert found.metadata["general.name"] == "Phi-3"  # llama.cpp recognises it by this name
    found.close()
    ours, theirs = (model_files(path).tokenizer() for path in (file, directory))
    text = "a<|im_end|>  b</s>  c<think>  d<s>  e<|endoftext|>  f"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("a<|im_end|>  b") == ours.encode("a<|im_end|>b")


def reverse_merges(said: dict[str, Any]) -> None:
    said["model"]["merges"].reverse()


def lose_a_merge(said: dict[str, Any]) -> None:
    del said["model"]["merges"][-1]


def cut_at_words(said: dict[str, Any]) -> None:
    said["pre_tokenizer"] = {"type": "Whitespace"}


def compose(said: dict[str, Any]) -> None:
    said["normalizer"]["normalizers"].insert(0, {"type": "NFC"})


def leave_unknown_apart(said: dict[str, Any]) -> None:
    said["model"]["fuse_unk"] = False


def strip_marks(said: dict[str, Any]) -> None:
    said["added_tokens"][1]["rstrip"] = True


def look_behind_the_normalizer(said: dict[str, Any]) -> None:
    said["added_tokens"][1]["normalized"] = True


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (reverse_merges, "make tokens in an order that scores can tell"),
        (lose_a_merge, "make tokens in an order that scores can tell"),
        (cut_at_words, "cut text as one of"),
        (compose, "cut text as one of"),
        (leave_unknown_apart, "have fuse_unk true"),
        (strip_marks, "'<s>' has rules"),
        (look_behind_the_normalizer, "'<s>' has rules"),
    ],
)
def test_a_vocabulary_that_scores_cant_tell_is_refused(
    tmp_path: Path, edit: Any, says: str
) -> None:
    directory = model_with(tmp_path, "gemma3", sentencepiece("gemma3", add_space_prefix=False))
    change(directory, edit)
    with pytest.raises(ConfigError, match=says):
        copied(directory)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


pairs = st.lists(st.tuples(*[st.sampled_from(["a", "b", "ab", "ba", "aa"])] * 2), unique=True)


@settings(max_examples=examples(200))
@given(merges=pairs, data=st.data())
def test_merges_are_the_same_only_if_tokens_are_made_in_the_same_order(
    merges: list[tuple[str, str]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(merges))
    made = [["".join(pair) for pair in one] for one in (merges, order)]
    assert same_merges(merges, order) == (made[0] == made[1])
    assert not same_merges(merges, [*merges, ("a", "aab")])
