"""Which beams of a beam search live on, which have ended, and when nothing better can come.

Plain bookkeeping over log-probabilities, with the rules and scores of transformers' `generate` with
`num_beams` and without sampling (`generation/utils.py`, `_beam_search`, version 5.23). Knows no
engine, no model and no text.

    running ──► candidates: every running beam with each of its most likely tokens
                   │  the `width` best that don't end
                   ├──► running
                   │  those of the `width` best that end
                   └──► ended, of which the `width` of the highest score are kept
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from aioserve.request import FinishReason, TopLogprob

__all__ = ["Beams", "EarlyStopping", "EndedBeam", "RunningBeam"]

EarlyStopping = bool | Literal["never"]


class RunningBeam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    cumulative_logprob: float


class EndedBeam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    """The id that ended it included."""
    cumulative_logprob: float
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`."""
    finish_reason: FinishReason


class Beams:
    """The beams of one search, which begins with an empty one.

    `max_tokens`, at least 1, is the most that one may have; an id of `end_ids` ends one. The
    search is over when `max_tokens` is reached, and before that as soon as `width` beams have ended
    and `early_stopping` is True, or the best running beam can't come in any more: with False, if
    it ended as it is; with "never", if it ended at the most favourable length, `max_tokens` where
    `length_penalty` is above 0.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._length_penalty = length_penalty
        self._early_stopping: EarlyStopping = early_stopping
        self.num_tokens: int = 0
        """Of every running beam."""
        self.running: list[RunningBeam] = [RunningBeam((), 0.0)]
        """Best first; none once the search is over."""
        self.ended: list[EndedBeam] = []
        """Best first, at most `width`."""

    def advance(self, candidates: Sequence[Iterable[TopLogprob]]) -> None:
        """One token more. `candidates[i]` are the most likely tokens behind `running[i]`: at least
        `width`, and one more for every id that ends a beam, where the vocabulary has so many."""
        self.num_tokens += 1
        is_last = self.num_tokens >= self._max_tokens
        grown = [
            (beam.cumulative_logprob + token.logprob, beam, token.id)
            for beam, tokens in zip(self.running, candidates, strict=True)
            for token in tokens
        ]
        grown.sort(key=_total, reverse=True)
        for total, beam, token_id in grown[: self._width]:
            if is_last or token_id in self._end_ids:
                self._end(total, (*beam.token_ids, token_id))
        self.ended.sort(key=_score, reverse=True)
        del self.ended[self._width :]
        going_on = [each for each in grown if each[2] not in self._end_ids]
        self.running = [
            RunningBeam((*beam.token_ids, token_id), total)
            for total, beam, token_id in going_on[: self._width]
        ]
        if is_last or self._is_settled():
            self.running = []

    def _end(self, total: float, token_ids: tuple[int, ...]) -> None:
        stops = token_ids[-1] in self._end_ids
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        score = self._score(total, len(token_ids))
        self.ended.append(EndedBeam(token_ids, total, score, reason))

    def _is_settled(self) -> bool:
        """Whether nothing better than what has ended is looked for."""
        if len(self.ended) < self._width:
            return False
        if self._early_stopping is True or not self.running:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if longest else self.num_tokens
        hoped_for = self._score(self.running[0].cumulative_logprob, length)
        return hoped_for <= self.ended[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / length**self._length_penalty


def _total(grown: tuple[float, RunningBeam, int]) -> float:
    return grown[0]


def _score(beam: EndedBeam) -> float:
    return beam.score
