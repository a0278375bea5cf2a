"""Beam search over an engine's own streams: a round of requests of one token for every token.

    round     requests                       log-probabilities of the most likely next tokens
    1         prompt                         a -0.1   b -2.5   c -4.0
    2         prompt a │ prompt b            ...
    3         prompt a x │ prompt a y        ...

The next round finds in the prefix tree what this one has computed, as far as it fills whole pages.
All beams share the pages of tokens that they have in common, and only what follows the last whole
page of each is computed again. Pages of beams that were left behind go as other cached ones do.
Without that cache a round computes its beams anew, to the same end. Knows streams; must not know
the scheduler.

Which beams go on is bookkeeping over log-probabilities, with the rules and scores of transformers'
`generate` with `num_beams` and without sampling (`generation/utils.py`, `_beam_search`, version
5.23):

    running ──► candidates: every running beam with each of its most likely tokens
                   │  the `width` best that don't end
                   ├──► running
                   │  those of the `width` best that end
                   └──► ended, of which the `width` of the highest score are kept
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from operator import attrgetter, itemgetter
from typing import Literal

import msgspec

from aioserve.arguments import boolean, boolean_or, check, integer, number, optional
from aioserve.engine.prompts import Prompt
from aioserve.engine.stream import TokenStream
from aioserve.errors import InvalidSamplingError
from aioserve.execution.runner import LoadedModel
from aioserve.request import MAX_LOGPROBS, Beam, FinishReason, SamplingParams, TopLogprob
from aioserve.text.assembler import TextAssembler

__all__ = ["Beams", "EarlyStopping", "EndedBeam", "RunningBeam", "beam_search"]

Submit = Callable[[Prompt, SamplingParams], TokenStream]
EarlyStopping = bool | Literal["never"]

MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10


async def beam_search(
    model: LoadedModel,
    submit: Submit,
    prompt: Prompt,
    *,
    beam_width: object,
    max_tokens: object,
    length_penalty: object,
    early_stopping: object,
    ignore_eos: object,
) -> tuple[Beam, ...]:
    """Return the beams that ended best, the best first. Whatever ends the call ends the requests.
    Raises `InvalidSamplingError` for an argument outside its range."""
    error, limits = InvalidSamplingError, model.limits
    width = check(error, "beam_width", beam_width, integer(1, MAX_BEAM_WIDTH))
    most_tokens = check(error, "max_tokens", max_tokens, optional(integer(1)))
    penalties = number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    penalty = check(error, "length_penalty", length_penalty, penalties)
    stopping = check(error, "early_stopping", early_stopping, boolean_or("never"))
    eos = () if check(error, "ignore_eos", ignore_eos, boolean) else limits.eos_token_ids
    end_ids = frozenset([id for id in eos if id < limits.vocab_size])
    widest = min(MAX_LOGPROBS, limits.vocab_size) - len(end_ids)
    if width > widest:
        raise InvalidSamplingError(
            f"beam_width must be at most {widest} with {len(end_ids)} end-of-sequence ids "
            f"and a vocabulary of {limits.vocab_size}, got {width}",
            argument="beam_width",
            value=width,
            limit=widest,
        )
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=width + len(end_ids)
    )
    prompt_ids, candidates = await _round(submit, [prompt], params)
    room = limits.max_model_len - len(prompt_ids)
    beams = Beams(
        width,
        max_tokens=room if most_tokens is None else min(room, most_tokens),
        end_ids=end_ids,
        length_penalty=penalty,
        early_stopping=stopping,
    )
    beams.advance(candidates)
    while beams.running:
        prompts = [(*prompt_ids, *beam.token_ids) for beam in beams.running]
        _, candidates = await _round(submit, prompts, params)
        beams.advance(candidates)
    return tuple([_with_text(beam, model, end_ids) for beam in beams.ended])


def _with_text(beam: EndedBeam, model: LoadedModel, end_ids: Collection[int]) -> Beam:
    assembler = TextAssembler(model.tokenizer, SamplingParams())
    stops = beam.finish_reason is FinishReason.STOP
    pushed = [assembler.push(id, is_end=stops and id in end_ids)[0] for id in beam.token_ids]
    return Beam(
        text="".join(pushed) + assembler.finish(),
        token_ids=beam.token_ids,
        finish_reason=beam.finish_reason,
        cumulative_logprob=beam.cumulative_logprob,
        score=beam.score,
    )


async def _round(
    submit: Submit, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[tuple[int, ...], list[Sequence[TopLogprob]]]:
    """Return ids of the first prompt, and the most likely tokens behind each prompt."""
    with ExitStack() as left:
        streams = [left.enter_context(closing(submit(prompt, params))) for prompt in prompts]
        tokens = [token for stream in streams async for token in stream]
    tops: list[Sequence[TopLogprob]] = [
        token.logprobs.top for token in tokens if token.logprobs is not None
    ]
    return streams[0].prompt_token_ids, tops


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
        """Number of tokens of every running beam."""
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
        grown.sort(key=itemgetter(0), reverse=True)
        for total, beam, token_id in grown[: self._width]:
            if is_last or token_id in self._end_ids:
                self._end(total, (*beam.token_ids, token_id))
        self.ended.sort(key=attrgetter("score"), reverse=True)
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
        """Whether the search is over before `max_tokens`."""
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
