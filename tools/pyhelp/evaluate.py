"""Measure pyhelp: the loss on held-out source files and the share of exact answers.

Usage: python tools/pyhelp/evaluate.py MODEL_DIR --corpus CORPUS_DIR
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from corpus import END_OF_TEXT, TURN_END, TURN_START, token_id
from facts import collect_facts, sample_questions
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

HELD_OUT_ROW = 384
MAX_NEW_TOKENS = 64

Question = Sequence[str]
"""Question and expected answer."""


def prompt_text(question: str) -> str:
    """Return the prompt that the chat template makes of one user message."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, corpus: Path, rows: int | None = None) -> float:
    """Return the mean loss in nats per token over the held-out files, or its first ``rows``."""
    with np.load(corpus / "corpus.npz") as arrays:
        tokens = torch.from_numpy(arrays["held_out"].astype(np.int64))
    count = (len(tokens) - 1) // HELD_OUT_ROW
    total, seen = 0.0, 0
    for row in range(min(count, rows or count)):
        block = tokens[row * HELD_OUT_ROW : (row + 1) * HELD_OUT_ROW + 1]
        logits = model(input_ids=block[None, :-1]).logits[0].float()
        total += functional.cross_entropy(logits, block[1:], reduction="sum").item()
        seen += len(block) - 1
    return total / seen


def continue_greedily(
    model: Qwen3ForCausalLM, inputs: torch.Tensor, ends: list[int], count: int
) -> list[list[int]]:
    """Return at most ``count`` new tokens for each of the equally long prompts."""
    generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009
    produced = generate(
        inputs=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=ends[-1],
    )
    return produced[:, inputs.shape[1] :].tolist()


@torch.inference_mode()
def greedy_answers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, questions: Sequence[str], batch: int = 60
) -> list[str]:
    """Return the greedy answer to every question."""
    ends = [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)]
    encoded = [tokenizer.encode(prompt_text(question)).ids for question in questions]
    answers = [""] * len(questions)
    order = sorted(range(len(questions)), key=lambda index: len(encoded[index]))
    lengths = sorted({len(ids) for ids in encoded})
    groups = [[i for i in order if len(encoded[i]) == length] for length in lengths]
    for group in [part[at : at + batch] for part in groups for at in range(0, len(part), batch)]:
        inputs = torch.tensor([encoded[index] for index in group])
        rows = continue_greedily(model, inputs, ends, MAX_NEW_TOKENS)
        for index, row in zip(group, rows, strict=True):
            answers[index] = tokenizer.decode(row, skip_special_tokens=True)
    return answers


def score(
    questions: Sequence[Question], answer: Callable[[list[str]], Sequence[str]]
) -> tuple[int, list[tuple[str, str, str]]]:
    """Return how many answers are exact and the (question, expected, given) of the others.

    ``answer`` maps the list of questions to the list of answers, so that any engine will do.
    """
    given = answer([question[0] for question in questions])
    wrong = [
        (asked, expected, found)
        for (asked, expected), found in zip(questions, given, strict=True)
        if found.strip() != expected
    ]
    return len(questions) - len(wrong), wrong


def exact_share(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, questions: Sequence[Question]
) -> tuple[int, list[tuple[str, str, str]]]:
    """Return the number of exact greedy answers and the wrong ones."""
    return score(questions, lambda asked: greedy_answers(model, tokenizer, asked))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the model directory")
    parser.add_argument("--corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("--count", type=int, default=300, help="how many questions to ask")
    parser.add_argument("--wrong", type=int, default=10, help="how many wrong answers to show")
    parser.add_argument("--complete", action="append", default=[], help="a text to complete")
    options = parser.parse_args()
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    if options.corpus is not None:
        loss = held_out_loss(model, options.corpus)
        summary = json.loads((options.corpus / "corpus.json").read_text(encoding="utf-8"))
        bytes_per_token = summary["held_out_bytes"] / summary["held_out_tokens"]
        bits = loss / math.log(2) / bytes_per_token
        print(f"held-out loss {loss:.4f} nats/token, {bits:.4f} bits/byte")
    questions = sample_questions(collect_facts(), options.count)
    exact, wrong = exact_share(model, tokenizer, questions)
    print(f"exact answers {exact}/{len(questions)}")
    for asked, expected, found in wrong[: options.wrong]:
        print(f"  {asked}\n    expected {expected}\n    given    {found}")
    for text in options.complete:
        ids = torch.tensor([tokenizer.encode(text).ids])
        ends = [token_id(tokenizer, END_OF_TEXT)]
        (new,) = continue_greedily(model, ids, ends, 80)
        print("---", text + tokenizer.decode(new), sep="\n")


if __name__ == "__main__":
    main()
