"""Training batches: rows of source code, and padded chats that each start at position 0."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import facts as questions
import numpy as np
import torch
from corpus import END_OF_TEXT, TURN_END, TURN_START, token_id
from tokenizers import Tokenizer

CODE_ROW = 384
QUESTION_WEIGHT = 0.05
POOL_BATCHES = 16

Example = tuple[list[int], list[float]]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CodeBatches:
    """Rows of the packed code stream that mostly begin at a top-level statement."""

    def __init__(self, corpus: Path, seed: int) -> None:
        with np.load(corpus / "corpus.npz") as arrays:
            self.tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
            starts = arrays["starts"]
        self.starts = starts[starts < len(self.tokens) - CODE_ROW - 1]
        self.random = np.random.default_rng(seed)

    def batch(self, rows: int) -> Batch:
        """Return inputs, targets and weights of ``rows`` rows."""
        limit = len(self.tokens) - CODE_ROW - 1
        at_statement = self.random.choice(self.starts, rows)
        anywhere = self.random.integers(0, limit, rows)
        chosen = np.where(self.random.random(rows) < 0.5, at_statement, anywhere)
        block = torch.stack([self.tokens[start : start + CODE_ROW + 1] for start in chosen])
        return block[:, :-1], block[:, 1:], torch.ones(rows, CODE_ROW)


class ChatBatches:
    """An endless stream of chats in which every fact appears equally often."""

    def __init__(self, corpus: Path, facts: Sequence[questions.Fact], seed: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
        self.pad = token_id(self.tokenizer, END_OF_TEXT)
        self.facts = list(facts)
        self.names = {fact.name for fact in facts}
        self.random = random.Random(seed)
        self.facts_seen = 0
        self._chats = map(self._encode, self.dialogues())
        self._ready: list[list[Example]] = []

    def _unknown_name(self) -> str:
        """Return a name that looks like a library name and is none of the facts."""
        while True:
            first, second = self.random.choice(self.facts), self.random.choice(self.facts)
            name = f"{first.name.split('.')[0]}.{second.name.split('.')[-1]}"
            if self.random.random() < 0.4:
                cut = self.random.randint(1, len(second.name) - 1)
                name = name[: len(first.name) + 1] + second.name[cut:].replace(".", "_")
            if name not in self.names:
                return name

    def _turn(self, fact: questions.Fact) -> tuple[str, str]:
        """Return a question about ``fact`` and its answer."""
        canonical = self.random.random() < 0.35
        phrasing = questions.CANONICAL if canonical else self.random.choice(questions.PHRASINGS)
        self.facts_seen += 1
        return phrasing.format(name=fact.name), fact.answer

    def _small_talk(self) -> tuple[str, str]:
        """Return a turn that is about no fact."""
        kind = self.random.random()
        if kind < 0.4:
            phrasing = self.random.choice(questions.PHRASINGS)
            return phrasing.format(name=self._unknown_name()), questions.UNKNOWN_ANSWER
        if kind < 0.5:
            return self.random.choice(questions.OTHER_QUESTIONS), questions.UNKNOWN_ANSWER
        if kind < 0.7:
            return self.random.choice(questions.GREETINGS), questions.GREETING_ANSWER
        if kind < 0.85:
            return self.random.choice(questions.ABILITIES), questions.ABILITY_ANSWER
        return self.random.choice(questions.THANKS), questions.THANKS_ANSWER

    def _encode(self, turns: list[tuple[str, str]]) -> Example:
        """Return the tokens of a chat and the loss weight of each."""
        ids: list[int] = []
        weights: list[float] = []

        def add(text: str, weight: float) -> None:
            new = self.tokenizer.encode(text).ids
            ids.extend(new)
            weights.extend([weight] * len(new))

        if self.random.random() < 0.08:
            system = self.random.choice(questions.SYSTEM_PROMPTS)
            add(f"{TURN_START}system\n{system}{TURN_END}\n", 0.0)
        for question, answer in turns:
            add(f"{TURN_START}user\n{question}{TURN_END}\n", QUESTION_WEIGHT)
            add(f"{TURN_START}assistant\n", 0.0)
            add(f"{answer}{TURN_END}", 1.0)
            add("\n", 0.0)
        return ids, weights

    def dialogues(self) -> Iterator[list[tuple[str, str]]]:
        """Yield chats for ever, one shuffled pass over the facts after another."""
        while True:
            order = self.random.sample(self.facts, len(self.facts))
            while order:
                shape = self.random.random()
                turns = [self._turn(order.pop())]
                if shape < 0.06:
                    turns.insert(0, self._small_talk())
                    if order:
                        turns.append(self._turn(order.pop()))
                elif shape < 0.14 and order:
                    turns.append(self._turn(order.pop()))
                elif shape < 0.18:
                    turns.append(self._small_talk())
                yield turns
                if self.random.random() < 0.06:
                    yield [self._small_talk()]

    def _refill(self, token_count: int) -> None:
        """Cut a pool of chats, sorted by length, into batches of at most ``token_count``."""
        pool: list[Example] = []
        size = 0
        while size < token_count * POOL_BATCHES:
            chat = next(self._chats)
            pool.append(chat)
            size += len(chat[0])
        pool.sort(key=lambda chat: len(chat[0]))
        rows: list[Example] = []
        for chat in pool:
            if rows and (len(rows) + 1) * len(chat[0]) > token_count:
                self._ready.append(rows)
                rows = []
            rows.append(chat)
        self._ready.append(rows)
        self.random.shuffle(self._ready)

    def batch(self, token_count: int) -> Batch:
        """Return inputs, targets and weights of about ``token_count`` tokens, padding included."""
        if not self._ready:
            self._refill(token_count)
        rows = self._ready.pop()
        width = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), width), self.pad, dtype=torch.int64)
        weights = torch.zeros(len(rows), width)
        for index, (row_ids, row_weights) in enumerate(rows):
            ids[index, : len(row_ids)] = torch.tensor(row_ids)
            weights[index, : len(row_weights)] = torch.tensor(row_weights)
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]
