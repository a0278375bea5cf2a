"""Beam search over an engine's own streams: a round of requests of one token for every token.

    round     requests                       log-probabilities of the most likely next tokens
    1         prompt                         a -0.1   b -2.5   c -4.0
    2         prompt a │ prompt b            ...
    3         prompt a x │ prompt a y        ...

The next round finds in the prefix tree what one has computed, as far as it fills whole pages: all
beams share those of the tokens that they have in common, and of each only what follows its last
whole page is computed again. Pages of beams that were left behind go as other cached ones do.
Without that cache a round computes its beams anew, to the same end. Knows streams; must not know
the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from aioserve.arguments import Rule, boolean, boolean_or, check, integer, number, optional
from aioserve.engine.beams import Beams, EarlyStopping, EndedBeam
from aioserve.engine.intake import Prompt
from aioserve.engine.stream import TokenStream
from aioserve.errors import InvalidSamplingError
from aioserve.execution.runner import LoadedModel
from aioserve.request import MAX_LOGPROBS, Beam, FinishReason, SamplingParams, TopLogprob
from aioserve.text.assembler import TextAssembler

__all__ = ["BeamSearch"]

Submit = Callable[[Prompt, SamplingParams], TokenStream]

MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10


class BeamSearch:
    """What one search asks for. Raises `InvalidSamplingError` for an argument outside its range."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        beam_width: object,
        max_tokens: object,
        length_penalty: object,
        early_stopping: object,
        ignore_eos: object,
    ) -> None:
        self._model = model
        self._width: int = _checked("beam_width", beam_width)
        self._max_tokens: int | None = _checked("max_tokens", max_tokens)
        self._length_penalty: float = _checked("length_penalty", length_penalty)
        self._early_stopping: EarlyStopping = _checked("early_stopping", early_stopping)
        limits = model.limits
        eos = () if _checked("ignore_eos", ignore_eos) else limits.eos_token_ids
        self._end_ids = frozenset([id for id in eos if id < limits.vocab_size])
        most = min(MAX_LOGPROBS, limits.vocab_size) - len(self._end_ids)
        if self._width > most:
            raise InvalidSamplingError(
                f"beam_width must be at most {most} with {len(self._end_ids)} end-of-sequence ids "
                f"and a vocabulary of {limits.vocab_size}, got {self._width}",
                argument="beam_width",
                value=self._width,
                limit=most,
            )

    async def run(self, submit: Submit, prompt: Prompt) -> tuple[Beam, ...]:
        """The beams that ended best, the best first. Whatever ends the call ends the requests."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=self._width + len(self._end_ids),
        )
        prompt_ids, candidates = await _round(submit, [prompt], params)
        room = self._model.limits.max_model_len - len(prompt_ids)
        beams = Beams(
            self._width,
            max_tokens=room if self._max_tokens is None else min(room, self._max_tokens),
            end_ids=self._end_ids,
            length_penalty=self._length_penalty,
            early_stopping=self._early_stopping,
        )
        beams.advance(candidates)
        while beams.running:
            prompts = [(*prompt_ids, *beam.token_ids) for beam in beams.running]
            _, candidates = await _round(submit, prompts, params)
            beams.advance(candidates)
        return tuple([self._told(beam) for beam in beams.ended])

    def _told(self, beam: EndedBeam) -> Beam:
        assembler = TextAssembler(self._model.tokenizer, SamplingParams())
        stops = beam.finish_reason is FinishReason.STOP
        ids = beam.token_ids
        pushed = [assembler.push(id, is_end=stops and id in self._end_ids)[0] for id in ids]
        return Beam(
            text="".join(pushed) + assembler.finish(),
            token_ids=ids,
            finish_reason=beam.finish_reason,
            cumulative_logprob=beam.cumulative_logprob,
            score=beam.score,
        )


async def _round(
    submit: Submit, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[tuple[int, ...], list[Sequence[TopLogprob]]]:
    """Ids of the first prompt, and of each the most likely tokens behind it."""
    with ExitStack() as left:
        streams = [left.enter_context(closing(submit(prompt, params))) for prompt in prompts]
        tokens = [token for stream in streams async for token in stream]
    tops: list[Sequence[TopLogprob]] = [
        token.logprobs.top for token in tokens if token.logprobs is not None
    ]
    return streams[0].prompt_token_ids, tops


_RULES: dict[str, Rule[Any]] = {
    "beam_width": integer(1, MAX_BEAM_WIDTH),
    "max_tokens": optional(integer(1)),
    "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": boolean_or("never"),
    "ignore_eos": boolean,
}


def _checked(argument: str, value: object) -> Any:
    return check(InvalidSamplingError, argument, value, _RULES[argument])
