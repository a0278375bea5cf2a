"""Beam search over an engine's own streams: each round adds a token, by a request of one token a
beam.

    round     requests                       log-probabilities of the most likely next tokens
    1         prompt                         a -0.1   b -2.5   c -4.0
    2         prompt a │ prompt b            ...
    3         prompt a x │ prompt a y        ...

Whole pages that one round has computed are found in the prefix tree by the next. Beams share the
pages of their common tokens, and only recompute what follows their last whole page. Pages of
dropped beams are evicted like other cached ones. Without a prefix cache each round computes its
beams anew, with the same result. Knows streams; must not know the scheduler.

The choice of beams is bookkeeping over log-probabilities. Rules and scores are those of
transformers' `generate` with `num_beams` and without sampling (`generation/utils.py`,
`_beam_search`, version 5.23):

    running ──► candidates: every running beam with each of its most likely tokens
                   │  the `width` best that don't end
                   ├──► running
                   │  those of the `width` best that end
                   └──► ended, of which the `width` of the highest score are kept

A stop string ends a beam with the token that completes it. An assembler of the beam's own text
finds that token, as in every other answer.

Penalties and all other edits of logits change the log-probabilities of each beam's next token where
these are computed. A round says where the beam begins in its prompt (`Request.answer_from`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from aioserve.arguments import boolean_or, check, integer, number
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.options import EarlyStopping
from aioserve.engine.params_intake import end_ids_of
from aioserve.engine.prompts import Prompt
from aioserve.engine.stream import TokenStream, yield_before
from aioserve.errors import DeadlineExceededError, InvalidSamplingError
from aioserve.execution.runner import ModelLimits
from aioserve.hints import checked_hints
from aioserve.request import Beam, FinishReason, SamplingParams, TopLogprob
from aioserve.sampling_params import MAX_LOGPROBS
from aioserve.text.assembler import TextAssembler

__all__ = ["Beams", "EndedBeam", "RunningBeam", "beam_search"]

MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10
NO_TIME_SECONDS = 1e-9
"""Deadline of a request whose search has no time left. The request ends as any late one does."""


async def beam_search(
    engine: EngineLifecycle,
    prompt: Prompt,
    params: SamplingParams,
    *,
    beam_width: object,
    length_penalty: object,
    early_stopping: object,
    deadline_seconds: object = None,
    **options: Any,
) -> tuple[Beam, ...]:
    """Return the best ended beams, best first. Any end of the call ends its requests.

    Of `params` it uses `max_tokens`, what ends an answer, and what changes logits. Raises
    `InvalidSamplingError` for an argument outside its range, `InvalidRequestError` for a bad
    deadline, and `DeadlineExceededError` once the deadline has passed.
    """
    error = InvalidSamplingError
    width = check(error, "beam_width", beam_width, integer(1, MAX_BEAM_WIDTH))
    penalties = number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    penalty = check(error, "length_penalty", length_penalty, penalties)
    stopping = check(error, "early_stopping", early_stopping, boolean_or("never"))
    seconds = checked_hints({"deadline_seconds": deadline_seconds}).deadline_seconds
    model = engine.usable().model
    end_ids = end_ids_of(model.limits, params)
    count = _num_candidates(model.limits, width, end_ids, params)
    asked = msgspec.structs.replace(params, temperature=0, logprobs=count)
    rounds = _Rounds(engine, asked, seconds, options)
    try:
        prompt_ids, candidates = await rounds.next([prompt])
        # Made after the first round, which refuses stop strings without a tokenizer.
        assembler = TextAssembler(model.tokenizer, params)
        room = model.limits.max_model_len - len(prompt_ids)
        beams = Beams(
            width,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            end_ids=end_ids,
            length_penalty=penalty,
            early_stopping=stopping,
            assembler=assembler if params.stop else None,
        )
        beams.advance(candidates)
        while beams.running:
            prompts = [(*prompt_ids, *beam.token_ids) for beam in beams.running]
            _, candidates = await rounds.next(prompts)
            beams.advance(candidates)
    except DeadlineExceededError as late:
        raise DeadlineExceededError(
            f"the beam search hadn't ended {seconds:g} s after it was sent (deadline_seconds)",
            deadline_seconds=seconds,
        ) from late
    found: list[Beam] = []
    for beam in beams.ended:
        await engine.turns.take()
        await yield_before(len(beam.token_ids))
        found.append(_with_text(beam, assembler.fork(), params, end_ids))
    return tuple(found)


def _num_candidates(
    limits: ModelLimits, width: int, end_ids: Collection[int], params: SamplingParams
) -> int:
    """Return the number of most likely tokens to ask for after each beam.

    With stop strings it is the largest possible, since any token may complete one. Raises
    `InvalidSamplingError`.
    """
    most = min(MAX_LOGPROBS, limits.vocab_size)
    if width + len(end_ids) > most:
        raise InvalidSamplingError(
            f"beam_width must be at most {most - len(end_ids)} with {len(end_ids)} ids that end an "
            f"answer and a vocabulary of {limits.vocab_size}, got {width}",
            argument="beam_width",
            value=width,
            limit=most - len(end_ids),
        )
    return most if params.stop else width + len(end_ids)


def _with_text(
    beam: EndedBeam, assembler: TextAssembler, params: SamplingParams, end_ids: Collection[int]
) -> Beam:
    """Make a `Beam` with its text. `assembler` has taken no token yet."""
    *before, last = beam.token_ids
    reason, stop_reason, is_end = beam.finish_reason, None, last in end_ids
    text = "".join([assembler.push(id)[0] for id in before])
    text += assembler.push(last, is_end=is_end)[0] + assembler.finish()
    if assembler.matched_stop is not None:
        reason, stop_reason = FinishReason.STOP, assembler.matched_stop
    elif is_end and last in params.stop_token_ids:
        stop_reason = last
    return Beam(
        text=text,
        token_ids=beam.token_ids,
        finish_reason=reason,
        cumulative_logprob=beam.cumulative_logprob,
        score=beam.score,
        stop_reason=stop_reason,
    )


class _Rounds:
    """The requests of one search. Each gets the time left until the deadline of the search."""

    def __init__(
        self,
        engine: EngineLifecycle,
        params: SamplingParams,
        seconds: float | None,
        options: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._params = params
        self._options = options
        self._answer_from: int | None = None
        """Number of prompt tokens, once the prompt is encoded."""
        self._loop = asyncio.get_running_loop()
        self._ends_at = None if seconds is None else self._loop.time() + seconds

    async def next(
        self, prompts: Sequence[Prompt]
    ) -> tuple[tuple[int, ...], list[Sequence[TopLogprob]]]:
        """Return the ids of the first prompt, and the most likely tokens after each prompt."""
        left = None
        if self._ends_at is not None:
            left = max(self._ends_at - self._loop.time(), NO_TIME_SECONDS)
        with ExitStack() as streams_left:
            streams: list[TokenStream] = []
            for prompt in prompts:
                await self._engine.turns.take()
                streams.append(streams_left.enter_context(closing(self._submit(prompt, left))))
            tokens = [token for stream in streams async for token in stream]
        tops: list[Sequence[TopLogprob]] = [
            token.logprobs.top for token in tokens if token.logprobs is not None
        ]
        return streams[0].prompt_token_ids, tops

    def _submit(self, prompt: Prompt, seconds: float | None) -> TokenStream:
        mailbox = self._engine.usable().intake.submit(
            prompt,
            self._params,
            prompt_fields=self._fields,
            deadline_seconds=seconds,
            **self._options,
        )
        return TokenStream(mailbox)

    def _fields(self, prompt_tokens: int) -> dict[str, Any]:
        """Fields of a request for one token. The prompt of the first round is the search's own."""
        if self._answer_from is None:
            self._answer_from = prompt_tokens
        return {
            "answer_from": self._answer_from,
            "edits_logprobs": True,
            "max_length": prompt_tokens + 1,
        }


class RunningBeam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    assembler: TextAssembler | None = None
    """Assembler of its text, with all tokens of the beam pushed; None without stop strings."""


class EndedBeam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    """Tokens of the beam, with the id that ended it or completed a stop string."""
    cumulative_logprob: float
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`."""
    finish_reason: FinishReason


class Beams:
    """The beams of one search, which begins with an empty one.

    A beam has at most `max_tokens` tokens, at least 1. An id of `end_ids` ends it, and so does a
    stop string that `assembler` finds. `assembler` has taken no token; None means no stop strings.
    A token of log-probability -inf is no candidate.

    The search is over when `max_tokens` is reached or no candidate goes on. It ends earlier once
    `width` beams have ended, depending on `early_stopping`:

    - True: at once.
    - False: when the best running beam, ended as it is, would score no better than the worst kept
      one.
    - "never": the same at its most favourable length, which is `max_tokens` for a `length_penalty`
      above 0.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
        assembler: TextAssembler | None = None,
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._length_penalty = length_penalty
        self._early_stopping: EarlyStopping = early_stopping
        self.num_tokens: int = 0
        """Tokens of every running beam."""
        self.running: list[RunningBeam] = [RunningBeam((), 0.0, assembler)]
        """Best first; empty once the search is over."""
        self.ended: list[EndedBeam] = []
        """Best first, at most `width`."""

    def advance(self, candidates: Sequence[Iterable[TopLogprob]]) -> None:
        """Grow the beams by one token. `candidates[i]` are the most likely tokens after
        `running[i]`.

        Each needs at least `width` candidates, plus one for every id that ends a beam, as far as
        the vocabulary has them. With fewer, or if stop strings end more, fewer beams go on.
        """
        self.num_tokens += 1
        is_last = self.num_tokens >= self._max_tokens
        grown = [
            (beam.cumulative_logprob + token.logprob, beam, token.id)
            for beam, tokens in zip(self.running, candidates, strict=True)
            for token in tokens
            if token.logprob > -math.inf
        ]
        grown.sort(key=itemgetter(0), reverse=True)
        self.running = []
        for rank, (total, beam, token_id) in enumerate(grown):
            assembler, stops = self._pushed(beam, token_id)
            token_ids = (*beam.token_ids, token_id)
            if rank < self._width and (stops or is_last):
                self._end(total, token_ids, stops=stops)
            if not stops:
                self.running.append(RunningBeam(token_ids, total, assembler))
            if len(self.running) == self._width:
                break
        self.ended.sort(key=attrgetter("score"), reverse=True)
        del self.ended[self._width :]
        if is_last or self._is_settled():
            self.running = []

    def _pushed(self, beam: RunningBeam, token_id: int) -> tuple[TextAssembler | None, bool]:
        """Return the beam's assembler with the token pushed, and True if the token ends the
        beam."""
        if token_id in self._end_ids or beam.assembler is None:
            return None, token_id in self._end_ids
        assembler = beam.assembler.fork()
        _, stops = assembler.push(token_id)
        return assembler, stops

    def _end(self, total: float, token_ids: tuple[int, ...], *, stops: bool) -> None:
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        score = self._score(total, len(token_ids))
        self.ended.append(EndedBeam(token_ids, total, score, reason))

    def _is_settled(self) -> bool:
        """True if the search is over before `max_tokens`."""
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
