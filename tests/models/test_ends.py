"""Tokens that end a completion: the same ones for a model in a directory and in a GGUF file."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from aioserve import Engine, SamplingParams
from aioserve.models.files import model_files
from aioserve.models.gguf.copy import write_gguf as write_copy
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.gguf.mixes import MIXES
from aioserve.models.model_files import ModelFiles
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.gguf.vocabularies import bytes_vocabulary
from tests.models.gguf.writing import Stored, Typed, write_gguf
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

SIZE = VOCAB_SIZE
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
KINDS = {"normal": NORMAL, "control": CONTROL, "defined": USER_DEFINED}


@dataclass(frozen=True)
class Case:
    """Vocabulary, and the end tokens that each file names."""

    marks: dict[str, str]
    """Kinds of tokens, by name."""
    ends: set[str]
    begin: str | None = None
    config: str | None = None
    generation: tuple[str, ...] = ()
    tokenizer: str | None = None
    file: str | None = None
    """End token that its GGUF file names."""

    def ids(self) -> dict[str, int]:
        names = list(self.marks)
        return {name: SIZE - len(names) + at for at, name in enumerate(names)}


def marks(*names: str, **kinds: str) -> dict[str, str]:
    return {name: kinds.get("kind", "control") for name in names}


HARMONY = ("<|start|>", "<|return|>", "<|call|>", "<|end|>", "<|endoftext|>")
CASES = {
    "chatml": Case(
        marks("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"<|endoftext|>", "<|im_end|>"},
        config="<|endoftext|>",
        generation=("<|endoftext|>",),
        tokenizer="<|im_end|>",
        file="<|endoftext|>",
    ),
    "nothing said": Case(marks("<|im_start|>", "<|im_end|>"), {"<|im_end|>"}),
    "a name of its own": Case(
        marks("<|begin|>", "<|fin|>", "<|stop|>"),
        {"<|fin|>", "<|stop|>"},
        config="<|stop|>",
        tokenizer="<|fin|>",
        file="<|stop|>",
    ),
    "phi-3": Case(
        {**marks("<|endoftext|>", "<|user|>"), "<|end|>": "defined"},
        {"<|endoftext|>", "<|end|>"},
        config="<|endoftext|>",
        tokenizer="<|endoftext|>",
        file="<|endoftext|>",
    ),
    "as text": Case(
        {**marks("<bos>", "<eos>"), "<end_of_turn>": "normal"},
        {"<eos>", "<end_of_turn>"},
        begin="<bos>",
        config="<eos>",
        file="<eos>",
    ),
    "llama-3": Case(
        marks("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
        config="<|end_of_text|>",
        file="<|eot_id|>",
    ),
    "html": Case(  # Gemma's vocabulary
        {**marks("<bos>", "<eos>"), "<s>": "defined", "</s>": "defined"},
        {"<eos>"},
        begin="<bos>",
        file="<eos>",
    ),
    "mistral, taught another": Case(
        marks("<s>", "</s>", "<|im_end|>"),
        {"</s>", "<|im_end|>"},
        begin="<s>",
        config="</s>",
        tokenizer="<|im_end|>",
        file="<|im_end|>",
    ),
    "gpt-oss": Case(
        marks(*HARMONY),
        {"<|return|>", "<|call|>", "<|endoftext|>"},
        config="<|return|>",
        generation=("<|return|>", "<|call|>"),
        tokenizer="<|end|>",
        file="<|end|>",
    ),
    "a call alone": Case(marks("<|call|>", "<|end|>"), {"<|end|>"}, file=None),
    "nothing known": Case(marks("<|user|>", "<|assistant|>"), set()),
}


def tokenizer_of(case: Case) -> tokenizers.Tokenizer:
    tokens, merges = bytes_vocabulary(SIZE - len(case.marks))
    vocab = {token: at for at, token in enumerate(tokens)}
    pairs: Any = [tuple(merge.split()) for merge in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab | case.ids(), pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(name, special=kind == "control", normalized=False)
            for name, kind in case.marks.items()
            if kind != "normal"
        ]
    )
    return backend


def write_directory(case: Case, directory: Path, template: str | None = None) -> Path:
    ids = case.ids()
    fields: dict[str, Any] = {"eos_token_id": ids.get(case.config or "")}
    fields["bos_token_id"] = ids.get(case.begin or "")
    config = {**CONFIGS["llama"], "num_hidden_layers": 1, **fields}
    write_random_model(directory, config, dtype="float32")
    tokenizer_of(case).save(str(directory / "tokenizer.json"))
    said = {"eos_token": case.tokenizer, "bos_token": case.begin, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    if case.generation:
        ends = {"eos_token_id": [ids[name] for name in case.generation]}
        (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory


def write_file(case: Case, directory: Path, path: Path, template: str | None = None) -> Path:
    """Write the model in `directory` as a converter does, with the end token of the case's file."""
    config = json.loads((directory / "config.json").read_text())
    ids, known = case.ids(), {"bos_token_id": 0, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps({**config, **known}))
    source = GGUFFile(convert(directory, path))
    (directory / "config.json").write_text(json.dumps(config))
    content = path.read_bytes()
    tensors = {
        name: Stored(entry.shape, 0, content[entry.offset : entry.offset + entry.num_bytes])
        for name, entry in source.tensors.items()
    }
    pairs = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in source.metadata.items()
        if not key.startswith("tokenizer.ggml.")
    }
    source.close()
    tokens, merges = bytes_vocabulary(SIZE - len(case.marks))
    kinds = [NORMAL] * len(tokens) + [KINDS[kind] for kind in case.marks.values()]
    said = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, *case.marks],
        "token_type": Typed("i32", kinds),
        "merges": merges,
        "bos_token_id": ids.get(case.begin or ""),
        "eos_token_id": ids.get(case.file or ""),
    }
    said = {f"tokenizer.ggml.{key}": v for key, v in said.items() if v is not None}
    if template is not None:
        said["tokenizer.chat_template"] = template
    return write_gguf(path, {**pairs, **said}, tensors)


def ends_of(files: ModelFiles) -> tuple[int, ...]:
    return files.ends(files.config(), files.tokenizer())


@pytest.mark.parametrize("name", CASES)
def test_both_layouts_of_a_model_have_the_same_ends(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    directory = write_directory(case, tmp_path / "hf")
    expected = {case.ids()[mark] for mark in case.ends}
    found = ends_of(model_files(directory))
    assert set(found) == expected
    assert len(found) == len(expected)
    if name != "a name of its own":  # a file says one
        assert set(ends_of(model_files(write_file(case, directory, tmp_path / "x.gguf")))) == (
            expected
        )


@pytest.mark.parametrize("name", ["phi-3", "as text"])
@pytest.mark.parametrize("layout", ["directory", "file"])
def test_a_known_end_of_any_kind_is_no_text(tmp_path: Path, name: str, layout: str) -> None:
    case = CASES[name]
    path = write_directory(case, tmp_path / "hf")
    if layout == "file":
        path = write_file(case, path, tmp_path / "x.gguf")
    tokenizer = model_files(path).tokenizer()
    for mark in case.ends:
        end = case.ids()[mark]
        ids = tokenizer.encode(f"ab{mark}cd")
        assert ids.count(end) == 1
        assert tokenizer.decode(ids) == "abcd"
        assert tokenizer.pieces[end] is None


def test_what_else_files_call_text_stays_text(tmp_path: Path) -> None:
    case = CASES["html"]
    directory = write_directory(case, tmp_path / "hf")
    for path in (directory, write_file(case, directory, tmp_path / "x.gguf")):
        tokenizer = model_files(path).tokenizer()
        assert tokenizer.decode(tokenizer.encode("<s>ab</s>")) == "<s>ab</s>"


@pytest.mark.parametrize("layout", ["directory", "file"])
@pytest.mark.asyncio
async def test_an_answer_ends_at_each(tmp_path: Path, layout: str) -> None:
    case = CASES["chatml"]
    path = write_directory(case, tmp_path / "hf")
    if layout == "file":
        path = write_file(case, path, tmp_path / "x.gguf")
    async with Engine(str(path), dtype="float32") as engine:
        for mark in case.ends:
            end = case.ids()[mark]
            params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={end: 100.0})
            completion = await engine.generate("ab", params)
            assert (completion.finish_reason, completion.text) == ("stop", "")


CLOSED = "{% for m in messages %}<|user|>{{ m.content }}MARK{% endfor %}"
TURNS = Case(
    marks("<|user|>", "<|end_turn|>", "<|end|>"), {"<|end|>"}, config="<|end|>", file="<|end|>"
)


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("<|end_turn|>", "'<|end_turn|>'"),
        ("\n<|no_token|>", "'<|no_token|>'"),  # written by its letters
        ("<|end|>", None),
        ("\n", "'<|user|>'"),  # what the next turn begins with ends none
        ("{{ raise_exception('no') }}", None),
        ("{{ 1 / 0 }}", None),
    ],
)
@pytest.mark.asyncio
async def test_a_template_that_closes_turns_with_no_end_is_told_once(
    tmp_path: Path, mark: str, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    template = CLOSED.replace("MARK", mark)
    directory = write_directory(TURNS, tmp_path / "hf", template)
    file = write_file(TURNS, directory, tmp_path / "x.gguf", template)
    for path in (directory, file):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aioserve"):
            async with Engine(str(path), dtype="float32"):
                pass
        warned = [one.getMessage() for one in caplog.records if "closes turns" in one.getMessage()]
        expected = [] if told is None else [f"{path}: the chat template closes turns with {told}"]
        assert [one.split(",")[0] for one in warned] == expected


COPIED = {
    "a name of its own": CASES["a name of its own"],
    "chatml": CASES["chatml"],
    "more than files name": Case(
        marks("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|fin|>", "<|stop|>"),
        {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|fin|>", "<|stop|>"},
        config="<|stop|>",
        generation=("<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
        tokenizer="<|fin|>",
    ),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_as_a_file_has_the_ends_of_its_model(tmp_path: Path, name: str) -> None:
    case = COPIED[name]
    directory = write_directory(case, tmp_path / "hf")
    write_copy(directory, tmp_path / "x.gguf", MIXES["BF16"])
    found = ends_of(model_files(tmp_path / "x.gguf"))
    assert set(found) == {case.ids()[mark] for mark in case.ends}
