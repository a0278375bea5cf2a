"""Answers without a model: at each place one of the allowed tokens, drawn by a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Set
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioserve.assets import model_path
from aioserve.grammars.grammar import CompiledGrammar
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.grammars.vocabulary import Vocabulary
from aioserve.testing.random_model import write_tokenizer
from aioserve.text.tokenizer import Tokenizer

END = 2
PADDING = 40
"""Logits beyond the vocabulary."""


@cache
def pyhelp() -> tuple[Tokenizer, Vocabulary]:
    """The embedded model's."""
    tokenizer = Tokenizer.from_directory(model_path("pyhelp") or "")
    return tokenizer, Vocabulary(tokenizer, tokenizer.vocab_size + PADDING)


def single_bytes(directory: Path) -> tuple[Tokenizer, Vocabulary]:
    """A token for each byte, and no end among them."""
    write_tokenizer(directory, 256)
    tokenizer = Tokenizer.from_directory(directory)
    return tokenizer, Vocabulary(tokenizer, 300)


def ids_in(mask: npt.NDArray[np.int32]) -> list[int]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


class Walk:
    """`ids` of one answer, and its matcher after them."""

    def __init__(
        self, grammar: CompiledGrammar, end_ids: Set[int], seed: int, *, most: int = 300
    ) -> None:
        rng = random.Random(seed)
        self.matcher: GrammarMatcher = grammar.matcher(end_ids)
        self.ids: list[int] = []
        while len(self.ids) < most and not self.matcher.has_ended:
            allowed = ids_in(self.matcher.allowed())
            assert self.matcher.error is None, self.matcher.error
            assert allowed, self.ids
            ends = [token_id for token_id in allowed if token_id in end_ids]
            assert bool(ends) == (self.matcher.is_accepting), self.ids
            # Whoever draws from all seldom comes to an end.
            choice = ends if ends and rng.random() < 0.5 else allowed
            if rng.random() < 0.5:
                choice = choice[:12]  # quotes, brackets and digits have low ids
            token_id = rng.choice(choice)
            assert self.matcher.accept(token_id)
            self.ids.append(token_id)


def brought_to_an_end(
    matcher: GrammarMatcher, ids: list[int], end_ids: Set[int], seed: int, *, most: int = 3000
) -> None:
    """Bring a completion of JSON to an end, from `ids`, which are tokens of single bytes.

    It closes a string, array or object where it may, and opens one only where nothing else is
    allowed. It fails if no end comes.
    """
    rng = random.Random(seed)
    begun = len(ids)
    closes = [frozenset(b"]}"), frozenset(b'"')]
    opens, plain = frozenset(b"[{ "), frozenset(b"0123456789x")
    while not matcher.has_ended:
        assert len(ids) < begun + most, bytes(ids)
        allowed = ids_in(matcher.allowed())
        assert matcher.error is None, matcher.error
        assert allowed, bytes(ids)
        is_quoted = len(_QUOTES.sub(b"", bytes(ids)).split(b'"')) % 2 == 0
        closing = [i for i in allowed if i in closes[is_quoted] or i in end_ids]
        choice = closing or [i for i in allowed if i not in opens] or allowed
        if rng.random() < 0.7:  # patterns ask for these
            choice = [i for i in choice if i in plain] or choice
        token_id = rng.choice(choice)
        assert matcher.accept(token_id)
        ids.append(token_id)


_QUOTES = re.compile(rb"\\.", re.DOTALL)
