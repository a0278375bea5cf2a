"""The embedded draft: its files, and that it drafts what the embedded model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve.assets import EMBEDDED_DRAFTS, draft_path, model_path
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.text.tokenizer import Tokenizer
from tests.parity.paged import PagedRun

MAX_BYTES = 1_000_000
ASKED = 30
LEAST_SHARE = 0.8


@pytest.fixture(scope="module")
def directory() -> Path:
    path = draft_path("pyhelp")
    assert path is not None
    return path


def test_every_embedded_draft_is_there() -> None:
    for name, drafter in EMBEDDED_DRAFTS:
        path = draft_path(name, drafter)
        assert path is not None
        assert (path / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["", "pyhelp-draft", "../assets/pyhelp"])
def test_other_names_have_no_draft(name: str) -> None:
    assert draft_path(name) is None


@pytest.mark.parametrize("drafter", ["", "mtp", "medusa", "ngram"])
def test_other_drafters_have_no_draft(drafter: str) -> None:
    assert draft_path("pyhelp", drafter) is None


def test_size(directory: Path) -> None:
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert total <= MAX_BYTES


def test_it_has_the_tokens_and_ends_of_the_embedded_model(directory: Path) -> None:
    draft, model = model_files(directory).config(), model_files(model_path("pyhelp") or "").config()
    assert draft.vocab_size == model.vocab_size
    assert draft.eos_token_ids == model.eos_token_ids
    assert draft.max_position_embeddings == model.max_position_embeddings


def test_it_drafts_most_tokens_of_the_answers(directory: Path) -> None:
    model = model_path("pyhelp")
    assert model is not None
    tokenizer = Tokenizer.from_directory(model)
    questions = json.loads((model / "questions.json").read_text(encoding="utf-8"))
    draft = load_model(directory)
    right = count = 0
    for question, answer in questions[:ASKED]:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        asked, whole = (tokenizer.encode(text) for text in (prompt, f"{prompt}{answer}<|im_end|>"))
        logits = PagedRun(draft).step({"a": list(whole)})["a"]
        drafted = logits.argmax(-1).tolist()[len(asked) - 1 : -1]
        wanted = list(whole)[len(asked) :]
        right += sum(a == b for a, b in zip(drafted, wanted, strict=True))
        count += len(wanted)
    assert right / count >= LEAST_SHARE


def test_the_card_says_how_it_was_made_and_what_it_does(directory: Path) -> None:
    card = (directory / "README.md").read_text(encoding="utf-8")
    words = ("Python Software Foundation License", "Apache-2.0", "tools/pyhelp/draft.py")
    for word in (*words, "tools/pyhelp/acceptance.py", "tools/pyhelp/cost.py", "of a step"):
        assert word in card
