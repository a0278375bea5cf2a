"""Drafters compared with models that search all of the text, in any order of calls."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.drafting.ngram import NgramDrafter
from aioserve.drafting.suffix import SuffixDrafter
from tests.properties.drafter_models import (
    ModelAnswers,
    ModelSequence,
    ngram_draft,
    suffix_draft,
)
from tests.tiers import examples

NAMESPACES = (b"", b"", b"\x00a", b"\x00b")
LARGEST = 2**31 - 1
ALPHABETS = ((0,), (0, 1), (7, LARGEST, 0, 5), tuple(range(40)))

randoms = st.randoms(use_true_random=True)
"""Source of draws inside a rule. It depends only on the seed, which is much faster than draws that
shrink."""


class DrafterMachine(RuleBasedStateMachine):
    """Slots start, grow, are asked and end. Ended sequences may start again."""

    drafter: Drafter
    max_tokens = 60

    def set_up(self, alphabet: tuple[int, ...]) -> None:
        self.alphabet = alphabet
        self.slots: dict[int, ModelSequence] = {}
        self.ended: list[ModelSequence] = []

    def expected(self, sequence: ModelSequence, limit: int) -> list[int]:
        raise NotImplementedError

    def has_started(self, sequence: ModelSequence) -> None:
        """Hook for models that must know."""

    def has_ended(self, sequence: ModelSequence) -> None:
        """Hook for models that must know."""

    # What is drawn.

    def some_tokens(self, random: Random, least: int, most: int) -> list[int]:
        """Draw tokens: often a run that occurred before, or one token again and again."""
        count = random.randint(least, most)
        kind = random.random()
        if kind < 0.2:
            return [random.choice(self.alphabet)] * count
        known = [s.known for s in [*self.slots.values(), *self.ended[-4:]]]
        if kind < 0.5 and known:
            text = random.choice(known)
            start = random.randrange(len(text))
            copied = text[start : start + count]
            if len(copied) >= least:
                return copied
        return [random.choice(self.alphabet) for _ in range(count)]

    def some_slot(self, random: Random) -> int:
        return random.choice(list(self.slots))

    # The life of sequences.

    @rule(random=randoms, slot=st.integers(0, 3), namespace=st.sampled_from(NAMESPACES))
    def start(self, random: Random, slot: int, namespace: bytes) -> None:
        if slot in self.slots:
            return
        predicted = self.some_tokens(random, 0, 12) if random.random() < 0.3 else []
        answer = self.some_tokens(random, 1, 5) if random.random() < 0.2 else []
        # After an uninformative prompt, the completions of others decide.
        short = random.random() < 0.5
        prompt = [random.choice([100, 101])] if short else self.some_tokens(random, 1, 20)
        self.start_with(slot, ModelSequence(prompt, answer, namespace, predicted))

    @precondition(lambda self: self.ended)
    @rule(random=randoms, slot=st.integers(0, 3))
    def start_again(self, random: Random, slot: int) -> None:
        """Start a sequence again with what was generated before, a little less or more, or none of
        it."""
        if slot in self.slots:
            return
        before = random.choice(self.ended[-3:])
        answer = before.answer[: random.choice([0, len(before.answer), len(before.answer) - 1])]
        answer = answer + (self.some_tokens(random, 1, 2) if random.random() < 0.2 else [])
        namespace = before.namespace if random.random() < 0.8 else NAMESPACES[0]
        again = ModelSequence(list(before.prompt), answer, namespace, before.predicted)
        self.start_with(slot, again)

    def start_with(self, slot: int, sequence: ModelSequence) -> None:
        self.drafter.start(
            slot,
            DraftedSequence(
                known_ids=np.array(sequence.known, np.int32),
                prompt_tokens=len(sequence.prompt),
                namespace=sequence.namespace,
                predicted_ids=np.array(sequence.predicted, np.int32),
            ),
        )
        self.slots[slot] = sequence
        self.has_started(sequence)

    @precondition(lambda self: self.slots)
    @rule(random=randoms)
    def extend(self, random: Random) -> None:
        slots = random.sample(list(self.slots), random.randint(1, len(self.slots)))
        slots = [s for s in slots if len(self.slots[s].known) < self.max_tokens]
        given = []
        for slot in slots:
            drafted = list(self.drafter.draft(slot, 4))
            held = drafted[: random.randint(0, 4)] if random.random() < 0.5 else []
            given.append(held + self.some_tokens(random, 0 if held else 1, 3))
        self.drafter.extend_all(slots, given)
        for slot, tokens in zip(slots, given, strict=True):
            self.slots[slot].answer += tokens

    @precondition(lambda self: self.slots)
    @rule(random=randoms)
    def end(self, random: Random) -> None:
        slot = self.some_slot(random)
        self.drafter.end(slot)
        sequence = self.slots.pop(slot)
        self.ended.append(sequence)
        self.has_ended(sequence)

    @precondition(lambda self: self.slots)
    @rule(limit=st.integers(1, 80))
    def draft_for_all(self, limit: int) -> None:
        slots = list(self.slots)
        drafts = self.drafter.draft_all(slots, [limit] * len(slots))
        assert drafts == [self.drafter.draft(slot, limit) for slot in slots]
        assert drafts == [self.expected(self.slots[slot], limit) for slot in slots]

    @invariant()
    def drafts_are_those_of_the_model(self) -> None:
        if not hasattr(self, "slots"):
            return
        for slot, sequence in self.slots.items():
            assert self.drafter.draft(slot, 6) == self.expected(sequence, 6)


class NgramMachine(DrafterMachine):
    @initialize(
        alphabet=st.sampled_from(ALPHABETS), shortest=st.integers(1, 3), more=st.integers(0, 5)
    )
    def make(self, alphabet: tuple[int, ...], shortest: int, more: int) -> None:
        self.set_up(alphabet)
        self.lengths = range(shortest + more, shortest - 1, -1)
        self.drafter = NgramDrafter(min_ngram=shortest, max_ngram=shortest + more)

    def expected(self, sequence: ModelSequence, limit: int) -> list[int]:
        return ngram_draft(sequence, limit, self.lengths)


class SuffixMachine(DrafterMachine):
    drafter: SuffixDrafter

    @initialize(
        alphabet=st.sampled_from(ALPHABETS),
        depth=st.sampled_from([2, 3, 4, 8, 64]),
        factor=st.sampled_from([0.4, 1.0, 1.5, 100.0]),
        least=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
        cache_tokens=st.sampled_from([0, 3, 10, 30, 100, 1000]),
    )
    def make(
        self,
        alphabet: tuple[int, ...],
        depth: int,
        factor: float,
        least: float,
        cache_tokens: int,
    ) -> None:
        self.set_up(alphabet)
        self.options: dict[str, Any] = {
            "max_depth": depth,
            "max_factor": factor,
            "min_probability": least,
        }
        self.drafter = SuffixDrafter(cache_tokens=cache_tokens, **self.options)
        self.answers = ModelAnswers(cache_tokens)

    def has_started(self, sequence: ModelSequence) -> None:
        self.answers.take_back(sequence)

    def has_ended(self, sequence: ModelSequence) -> None:
        self.answers.add(sequence)

    def expected(self, sequence: ModelSequence, limit: int) -> list[int]:
        return suffix_draft(sequence, limit, self.answers, **self.options)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "answers"):
            self.drafter.sanity_check()
            assert self.drafter.num_cached_tokens == self.answers.num_tokens


TestNgramDrafterEqualsItsModel = NgramMachine.TestCase
TestNgramDrafterEqualsItsModel.settings = settings(
    max_examples=examples(100), stateful_step_count=30
)
TestSuffixDrafterEqualsItsModel = SuffixMachine.TestCase
TestSuffixDrafterEqualsItsModel.settings = settings(
    max_examples=examples(300), stateful_step_count=40
)
