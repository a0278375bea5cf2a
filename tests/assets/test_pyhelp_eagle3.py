"""The embedded head: its files, and that it drafts what the embedded model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve.assets import draft_path, model_path
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.heads.loader import make_head
from aioserve.models.heads.read import ReadHead
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.text.tokenizer import Tokenizer
from tests.models.heads.runs import HeadRun
from tests.parity.paged import PagedRun

MAX_BYTES = 1_000_000
ASKED = 30
LEAST_SHARE = 0.8
KEPT = 3


@pytest.fixture(scope="module")
def directory() -> Path:
    path = draft_path("pyhelp", "eagle3")
    assert path is not None
    return path


def test_size(directory: Path) -> None:
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert total <= MAX_BYTES


def test_it_drafts_most_tokens_of_the_answers(directory: Path) -> None:
    model = model_path("pyhelp")
    assert model is not None
    tokenizer = Tokenizer.from_directory(model)
    questions = json.loads((model / "questions.json").read_text(encoding="utf-8"))
    read, backend = ReadHead.of(directory), backend_named("native")
    layers = read.config.layers_read(6)
    assert len(layers) == KEPT
    target = load_model(model, backend=backend, kept_layers=layers)
    head = make_head(read, target)
    assert isinstance(head, DecoderHead)
    right = count = 0
    for question, answer in questions[:ASKED]:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        asked, whole = (tokenizer.encode(text) for text in (prompt, f"{prompt}{answer}<|im_end|>"))
        PagedRun(target).step({"a": list(whole)})
        # The row at a position has what the model knew there and the next token, and draft tokens
        # the one behind that.
        run = HeadRun(head, backend, page_size=16)
        states = target.kept_states
        for place in range(len(asked), len(whole) - 1):
            first = place - 1
            begin = 0 if place == len(asked) else first
            rows = [(begin, list(whole[begin + 1 : place + 1]))]
            logits, _ = run.draft(rows, states[begin:place].clone())
            right += int(logits.argmax(-1)) == whole[place + 1]
            count += 1
    assert right / count >= LEAST_SHARE


def test_the_card_says_how_it_was_made_and_what_it_does(directory: Path) -> None:
    card = (directory / "README.md").read_text(encoding="utf-8")
    words = ("Python Software Foundation License", "Apache-2.0", "tools/pyhelp/eagle.py")
    for word in (*words, "tools/pyhelp/acceptance.py", "tools/pyhelp/cost.py", "of a step"):
        assert word in card
