"""The embedded model: its files, its card and a few greedy answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aioserve.assets import EMBEDDED_MODELS, model_path

MAX_BYTES = 16 * 1024 * 1024
ASKED = 8


@pytest.fixture(scope="module")
def directory() -> Path:
    path = model_path("pyhelp")
    assert path is not None
    return path


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_embedded_model_is_there() -> None:
    assert EMBEDDED_MODELS == ("pyhelp",)
    for name in EMBEDDED_MODELS:
        path = model_path(name)
        assert path is not None
        assert path.is_dir()


@pytest.mark.parametrize("name", ["", "nothing", "../assets/pyhelp", "pyhelp/"])
def test_other_names_have_no_path(name: str) -> None:
    assert model_path(name) is None


def test_size(directory: Path) -> None:
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert total <= MAX_BYTES


def test_config_is_a_small_qwen3(directory: Path) -> None:
    config = read_json(directory / "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


def test_ends_of_generation_are_special_tokens(directory: Path) -> None:
    tokenizer = read_json(directory / "tokenizer.json")
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ends = read_json(directory / "generation_config.json")["eos_token_id"]
    assert [special[end] for end in ends] == ["<|im_end|>", "<|endoftext|>"]
    assert read_json(directory / "config.json")["eos_token_id"] == ends[0]


def test_chat_template(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [
        {"role": "user", "content": "What does len do?"},
        {"role": "assistant", "content": "It counts."},
        {"role": "user", "content": "Thanks"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nWhat does len do?<|im_end|>\n"
        "<|im_start|>assistant\nIt counts.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "naïve 日本 🐍\t\r\n", "  spaces   and\n\n\nlines", ""]
)
def test_tokenizer_round_trip(directory: Path, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_model_card_states_the_numbers(directory: Path) -> None:
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\d\.\d+ nats per token", card)
    assert re.search(r"\d\.\d+ bits per byte", card)
    exact = re.search(r"(\d+) of 300", card)
    assert exact is not None
    assert int(exact[1]) >= 240
    for word in ("Python Software Foundation License", "Apache-2.0", "tools/pyhelp/train.py"):
        assert word in card


@pytest.fixture(scope="module")
def answers(directory: Path) -> list[tuple[str, str]]:
    """The expected and the greedy answer to the first of the 300 questions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    questions = json.loads((directory / "questions.json").read_text(encoding="utf-8"))
    pairs = []
    for question, expected in questions[:ASKED]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        row = model.generate(**inputs, max_new_tokens=40)[0]
        prompt_length = inputs["input_ids"].shape[1]
        pairs.append((expected, tokenizer.decode(row[prompt_length:], skip_special_tokens=True)))
    return pairs


@pytest.mark.more
def test_greedy_answers_are_the_docstrings(answers: list[tuple[str, str]]) -> None:
    exact = sum(expected == given for expected, given in answers)
    assert exact >= 0.7 * len(answers)


def test_greedy_answers_vary_with_the_prompt(answers: list[tuple[str, str]]) -> None:
    assert len({given for _, given in answers}) >= 0.8 * len(answers)
