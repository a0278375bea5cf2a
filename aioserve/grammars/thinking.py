"""Ends the reasoning of a completion after so many tokens, by forcing the closing tag.

It is a matcher like that of a grammar, with a grammar inside or with none. The next token depends
only on the tokens before it. Knows how the parser of the completion tells reasoning from content.
Must not know tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.grammars.grammar import CompiledGrammar
from aioserve.grammars.matcher import GrammarMatcher, set_bits
from aioserve.request import SamplingParams
from aioserve.text.assembler import TextAssembler
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.output_parsers.reasoning import ReasoningReader
from aioserve.text.output_parsers.registry import ReasoningFormat
from aioserve.text.output_parsers.typed_marks import TypedMarks
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ThinkingBudget", "ThinkingMatcher"]


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that each completion of a request may reason for. Thread-safe, as a grammar is."""

    num_tokens: int
    """Most tokens of reasoning, without the tags."""
    reasoning: ReasoningFormat
    opened: str
    """Text that the prompt has written of the completion."""
    shown: Mapping[int, str]
    """Special tokens that are part of the text."""
    tokenizer: Tokenizer
    num_logits: int
    grammar: CompiledGrammar | None = None
    """Grammar that also holds the completions; None without one."""

    @property
    def is_large(self) -> bool:
        """True if the grammar after the reasoning is large: see `Grammar.is_large`."""
        return self.grammar is not None and self.grammar.is_large

    def matcher(self, end_ids: Set[int]) -> ThinkingMatcher:
        """Return a matcher for a new completion, which any of `end_ids` ends."""
        inner = None if self.grammar is None else self.grammar.matcher(end_ids)
        return ThinkingMatcher(self, inner, end_ids)


class ThinkingMatcher:
    """Matcher of one completion; see `GrammarMatcher`, which has the same methods."""

    def __init__(
        self, budget: ThinkingBudget, inner: GrammarMatcher | None, end_ids: Set[int]
    ) -> None:
        self._inner = inner
        self._end_ids = end_ids
        self._has_ended = False
        self._tag = tuple(
            budget.tokenizer.encode(budget.reasoning.closes, add_special_tokens=False)
        )
        self._num_words = -(-budget.num_logits // 32)
        self._num_left = budget.num_tokens
        self._closing: tuple[int, ...] = ()
        """Tokens of the tag that must come next."""
        self._text = TextAssembler(budget.tokenizer, SamplingParams(), budget.shown)
        exact = frozenset(budget.shown.values()).intersection(budget.reasoning.marks)
        self._typed = TypedMarks(exact) if exact else None
        reader = budget.reasoning.reader(budget.opened)
        self._reader: ReasoningReader | HarmonyParser | None = reader
        """Reader of the reasoning; None once that has ended."""
        self._look(reader)

    @property
    def has_ended(self) -> bool:
        return self._has_ended if self._inner is None else self._inner.has_ended

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    @property
    def argument(self) -> str:
        """Parameter that decides what may come next."""
        return "thinking_token_budget" if self._closing else "structured_output"

    def accept(self, token_id: int) -> bool:
        if self.has_ended or (self._closing and token_id != self._closing[0]):
            return False
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        if token_id in self._end_ids:
            self._has_ended = True
            return True
        self._closing = self._closing[1:]
        if self._reader is not None:
            self._num_left -= self._reader.is_inside
            text, _ = self._text.push(token_id)
            if self._typed is not None:
                text = self._typed.escaped(text, self._text.marks_in(text))
            self._reader.push(text)
            if not self._closing:
                self._look(self._reader)
        return True

    def accept_all(self, token_ids: Iterable[int]) -> bool:
        return all(self.accept(token_id) for token_id in token_ids)

    def forced(self, at_most: int | None = None) -> tuple[int, ...]:
        if self._closing:
            return self._closing[:at_most]
        return () if self._inner is None else self._inner.forced(at_most)

    def allowed(self) -> npt.NDArray[np.int32]:
        if not self._closing and self._inner is not None:
            return self._inner.allowed()
        mask = np.full(self._num_words, 0 if self._closing or self._has_ended else -1, np.int32)
        set_bits(mask, self._closing[:1])
        return mask

    def behind(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """Return the masks that `allowed` would give after each of `token_ids`.

        During reasoning it is for as many of `token_ids` as can't exceed the budget.
        """
        if self._closing or self.has_ended:
            return []
        if self._reader is not None:
            token_ids = token_ids[: max(0, self._num_left - 1)]
        if self._inner is not None:
            return self._inner.behind(token_ids)
        ends = [place for place, token_id in enumerate(token_ids) if token_id in self._end_ids]
        count = ends[0] if ends else len(token_ids)
        return [np.full(self._num_words, -1, np.int32) for _ in range(count)]

    def _look(self, reader: ReasoningReader | HarmonyParser) -> None:
        """See if it is time to end the reasoning, or if that has ended by itself."""
        if reader.has_ended:
            self._reader = None
        elif reader.is_inside and self._num_left <= 0:
            self._closing = self._tag
