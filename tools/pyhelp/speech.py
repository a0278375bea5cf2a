"""Let pyhelp speak: its own chats and code, with hidden states, for drafts to learn from.

Usage: python tools/pyhelp/speech.py MODEL_DIR CORPUS_DIR OUT_DIR

A draft is right if it says the same as pyhelp. So it learns from pyhelp's answers, not from the
documents that pyhelp learned from. Chats about one fact in ten are kept out of its training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from batches import ChatBatches
from corpus import END_OF_TEXT, TURN_END, TURN_START, token_id
from facts import SYSTEM_PROMPTS, Fact
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

FEATURE_LAYERS = (1, 3, 5)
"""Layers whose inputs are the hidden states that the head reads, counted from 0."""
HELD_OUT_ONE_IN = 10
ROWS = 64
MOST_ANSWER_TOKENS = 64
CODE_PROMPT_TOKENS, CODE_TOKENS = 32, 256
GREEDY_SHARE = 0.6
TOP = 16
"""Likeliest next tokens of each token whose probabilities are kept."""


def is_held_out(fact: Fact) -> bool:
    """Return true if drafts must learn nothing about a fact, from its name alone."""
    return int(hashlib.sha256(fact.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


@dataclass
class Speech:
    """Text, and for each of its tokens True if pyhelp chose it."""

    ids: list[int]
    chosen: list[bool]
    temperature: float

    def add(self, ids: Sequence[int], chosen: bool) -> None:
        """Append tokens."""
        self.ids.extend(ids)
        self.chosen.extend([chosen] * len(ids))


@torch.inference_mode()
def continue_all(
    model: Qwen3ForCausalLM, speeches: Sequence[Speech], ends: list[int], most_tokens: int
) -> None:
    """Append pyhelp's next tokens, up to an end token or ``most_tokens``."""
    generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009
    order = sorted(speeches, key=lambda speech: (speech.temperature, len(speech.ids)))
    for temperature in sorted({speech.temperature for speech in order}):
        alike = [speech for speech in order if speech.temperature == temperature]
        sampling = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        for rows in (alike[at : at + ROWS] for at in range(0, len(alike), ROWS)):
            width = max(len(row.ids) for row in rows)
            inputs = torch.full((len(rows), width), ends[-1])
            seen = torch.zeros_like(inputs)
            for index, row in enumerate(rows):
                inputs[index, width - len(row.ids) :] = torch.tensor(row.ids)
                seen[index, width - len(row.ids) :] = 1
            produced = generate(
                inputs=inputs,
                attention_mask=seen,
                max_new_tokens=most_tokens,
                use_cache=True,
                eos_token_id=ends,
                pad_token_id=ends[-1],
                **sampling,
            )
            for row, new in zip(rows, produced[:, width:].tolist(), strict=True):
                found = [index for index, token in enumerate(new) if token in ends]
                row.add(new[: found[0] + 1] if found else new, chosen=True)


def chats(
    model: Qwen3ForCausalLM, corpus: Path, facts: list[Fact], count: int, seed: int
) -> list[Speech]:
    """Return ``count`` chats of one to three turns, all answers being pyhelp's own."""
    batches = ChatBatches(corpus, facts, seed)
    tokenizer, chance = batches.tokenizer, random.Random(seed)
    ends = [token_id(tokenizer, TURN_END), batches.pad]
    asked: list[tuple[Speech, list[str]]] = []
    for turns in batches.dialogues():
        greedy = chance.random() < GREEDY_SHARE
        speech = Speech([], [], 0.0 if greedy else 1.0)
        if chance.random() < 0.08:
            system = f"{TURN_START}system\n{chance.choice(SYSTEM_PROMPTS)}{TURN_END}\n"
            speech.add(tokenizer.encode(system).ids, chosen=False)
        asked.append((speech, [question for question, _ in turns]))
        if len(asked) == count:
            break
    for turn in range(max(len(questions) for _, questions in asked)):
        now = [(speech, questions) for speech, questions in asked if len(questions) > turn]
        for speech, questions in now:
            before = "\n" if turn else ""
            user = f"{before}{TURN_START}user\n{questions[turn]}{TURN_END}\n"
            speech.add(tokenizer.encode(f"{user}{TURN_START}assistant\n").ids, chosen=False)
        continue_all(model, [speech for speech, _ in now], ends, MOST_ANSWER_TOKENS)
    return [speech for speech, _ in asked]


def code(
    model: Qwen3ForCausalLM, tokens: np.ndarray, starts: np.ndarray, pad: int, seed: int
) -> list[Speech]:
    """Return pyhelp's continuations of source text that begins at each of ``starts``."""
    chance = random.Random(seed)
    speeches = []
    for start in starts:
        speech = Speech([], [], 0.0 if chance.random() < 1 - GREEDY_SHARE else 1.0)
        speech.add(tokens[start : start + CODE_PROMPT_TOKENS].tolist(), chosen=False)
        speeches.append(speech)
    continue_all(model, speeches, [pad], CODE_TOKENS - CODE_PROMPT_TOKENS)
    return speeches


def splits(
    model: Qwen3ForCausalLM, corpus: Path, num_chats: int, num_code: int
) -> Iterator[tuple[str, list[Speech]]]:
    """Yield the speeches of each split by its name."""
    names = json.loads((corpus / "facts.json").read_text(encoding="utf-8"))
    facts = [Fact(name, answer) for name, answer in names]
    known = [fact for fact in facts if not is_held_out(fact)]
    unseen = [fact for fact in facts if is_held_out(fact)]
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    pad = token_id(tokenizer, END_OF_TEXT)
    with np.load(corpus / "corpus.npz") as arrays:
        tokens, starts = arrays["tokens"].astype(np.int64), arrays["starts"]
        held_out = arrays["held_out"].astype(np.int64)
    starts = starts[starts < len(tokens) - CODE_TOKENS]
    chosen = np.random.default_rng(1).choice(starts, num_code, replace=False)
    written = code(model, tokens, chosen, pad, seed=1)
    yield "train", chats(model, corpus, known, num_chats, seed=1) + written
    yield "seen", chats(model, corpus, known, 200, seed=2)
    yield "unseen", chats(model, corpus, unseen, 200, seed=3)
    every = np.arange(0, len(held_out) - CODE_TOKENS, len(held_out) // 60)
    yield "code", code(model, held_out, every, pad, seed=4)


@torch.inference_mode()
def computed(model: Qwen3ForCausalLM, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the head, ``[tokens, 3 * hidden]``, and pyhelp's distribution.

    That is of the token after each, ``[tokens, vocab]``.
    """
    found = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    features = torch.cat([found.hidden_states[layer][0] for layer in FEATURE_LAYERS], dim=-1)
    return features, found.logits[0].softmax(-1)


def save(model: Qwen3ForCausalLM, speeches: Sequence[Speech], path: Path) -> None:
    """Write ``speeches`` to ``path``, with the data that drafts learn from."""
    features, shares, tops = [], [], []
    for speech in speeches:
        feature, probabilities = computed(model, speech.ids)
        share, top = probabilities.topk(TOP)
        features.append(feature.to(torch.float16))
        shares.append(share.to(torch.float16))
        tops.append(top.to(torch.int16))
    np.savez(
        path,
        tokens=np.concatenate([speech.ids for speech in speeches]).astype(np.uint16),
        chosen=np.concatenate([speech.chosen for speech in speeches]),
        lengths=np.array([len(speech.ids) for speech in speeches]),
        greedy=np.array([speech.temperature == 0 for speech in speeches]),
        features=torch.cat(features).numpy(),
        shares=torch.cat(shares).numpy(),
        tops=torch.cat(tops).numpy(),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("out", type=Path, help="the folder to write the splits to")
    parser.add_argument("--chats", type=int, default=6000, help="chats to learn from")
    parser.add_argument("--code", type=int, default=1000, help="continuations to learn from")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, speeches in splits(model, options.corpus, options.chats, options.code):
        save(model, speeches, options.out / f"{name}.npz")
        total = sum(len(speech.ids) for speech in speeches)
        chosen = sum(sum(speech.chosen) for speech in speeches)
        print(f"{name}: {len(speeches)} texts, {total} tokens, {chosen} chosen by pyhelp")


if __name__ == "__main__":
    main()
