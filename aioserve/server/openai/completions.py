"""`/v1/completions`: prompts of text or token ids, continued.

    completions_request ──► together ──► answered ──► PromptChoices ──► one body, or chunks

One `PromptChoices` makes the choices of one prompt, with the same content whole and in pieces.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from aioserve.engine.interface import ModelFacts, TokenStreamLike
from aioserve.engine.stream import collect, with_best_of
from aioserve.request import Completion as EngineCompletion
from aioserve.request import FinishReason, Sample, SamplingParams, Token, Usage
from aioserve.server.answer_sizes import AnswerSize, most_tokens_of
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import OWN_ENDS, Writer, answered
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import as_named
from aioserve.server.json_parts import ENCODED_BYTES_PER_UNIT, LongJson, long_ids
from aioserve.server.openai.beams import beams_of
from aioserve.server.openai.completions_request import CompletionRequest, prompts_of
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import Chunks, UsageBody, usage_of
from aioserve.server.openai.logprobs import (
    CompletionLogprobs,
    EncodedLogprobs,
    PromptLogprob,
    TextOffsets,
    TokenTexts,
    prompt_logprobs,
)
from aioserve.server.openai.multi_request import Batch, Merged, all_of
from aioserve.server.pace import Pace

__all__ = [
    "Completion",
    "CompletionChoice",
    "CompletionPiece",
    "CompletionWriter",
    "PromptChoices",
    "completions",
]


ENTRY_BYTES = 36
"""Bytes of one log-probability, about."""
PROMPT_UNITS = 256
"""Units of work to submit a prompt."""
CHOICE_UNITS = 32
"""Units of work for a choice, besides its lists."""
IDS_PER_UNIT = 4
"""Token ids that become text in one unit of work."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt."""

    index: int
    """Index over all prompts: first the choices of the first prompt, then those of the second."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """Stop string or stop id that ended it."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a choice that one chunk adds."""

    index: int
    text: str
    finish_reason: FinishReason | None
    """Set in the last piece."""
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    """Set in the first piece."""
    token_ids: list[int] | None = None


class _Choice:
    """State of one choice, as far as it was sent."""

    __slots__ = ("has_begun", "has_ended", "offsets")

    def __init__(self, texts: TokenTexts, chars: int) -> None:
        self.offsets = TextOffsets(texts, chars=chars)
        self.has_begun = False
        self.has_ended = False


class PromptChoices:
    """Choices of one prompt. The first of them has the index `first_index`."""

    def __init__(
        self,
        facts: ModelFacts,
        body: CompletionRequest,
        prompt: str | list[int],
        first_index: int,
        pace: Pace,
    ) -> None:
        self._body = body
        self._pace = pace
        self._prompt = prompt
        self._first = first_index
        self._texts = TokenTexts(facts, as_ids=body.return_tokens_as_token_ids)
        self._num_choices = body.n or facts.default_params.n
        self._echoed: EncodedLogprobs | None = None
        """Log-probabilities of the prompt, if they are wanted: all choices begin with them."""
        self._echo = ""
        """Text of the prompt, if it is wanted: all choices begin with it."""
        self._prompt_ids: Any = None
        """Ids of the prompt in JSON, if a stream returns them."""
        self._choices: list[_Choice] = []

    async def begin(self, stream: TokenStreamLike) -> None:
        """Prepare the choices, once the first tokens of `stream` are there. Comes before anything
        else."""
        if self._body.echo:
            self._echo = await self._text_of_prompt(stream)
        if self._body.return_token_ids and self._body.stream:
            ids = list(stream.prompt_token_ids)
            await self._pace.before(len(ids) // IDS_PER_UNIT)
            self._prompt_ids = msgspec.Raw(msgspec.json.encode(ids))
        if self._body.echo and self._body.logprobs is not None:
            scored = [
                (token_id, one and msgspec.structs.replace(one, top=one.top[: self._body.logprobs]))
                for token_id, one in zip(
                    stream.prompt_token_ids, stream.prompt_logprobs, strict=True
                )
            ]
            text = await self._text_of_prompt(stream)
            self._echoed = await EncodedLogprobs.of(self._texts, scored, self._pace, echoed=text)
        chars = 0 if self._echoed is None else self._echoed.chars
        self._choices = [_Choice(self._texts, chars) for _ in range(self._num_choices)]

    # -- whole

    async def whole(
        self, samples: Sequence[Sample], stream: TokenStreamLike
    ) -> AsyncGenerator[CompletionChoice, None]:
        """Yield the choices one by one. `stream` is the ended stream that the samples came from."""
        await self.begin(stream)
        of_prompt: Any = msgspec.UNSET
        prompt_ids: Any = msgspec.UNSET
        if (top := self._body.prompt_logprobs) is not None:
            found = stream.prompt_token_ids, stream.prompt_logprobs
            of_prompt = await prompt_logprobs(self._texts, *found, top, self._pace)
        if self._body.return_token_ids:
            prompt_ids = await long_ids(stream.prompt_token_ids, self._pace)
        for number, sample in enumerate(samples):
            yield await self._whole(number, sample, of_prompt, prompt_ids)

    async def _whole(
        self, number: int, sample: Sample, of_prompt: Any, prompt_ids: Any
    ) -> CompletionChoice:
        body = self._body
        ids = () if body.is_of_prompt else sample.token_ids
        logprobs = None
        if body.logprobs is not None:
            own = list(zip(ids, sample.logprobs or (), strict=False))
            echoed = self._echoed or EncodedLogprobs(0)
            logprobs = echoed.long_with(
                await EncodedLogprobs.of(self._texts, own, self._pace, chars=echoed.chars)
            )
        own_ids: Any = msgspec.UNSET
        if body.return_token_ids:
            own_ids = await long_ids(ids, self._pace)
        await self._pace.before(CHOICE_UNITS)
        text = "" if body.is_of_prompt else sample.text
        return CompletionChoice(
            index=self._first + number,
            text=self._echo + text,
            logprobs=logprobs,
            finish_reason=FinishReason.LENGTH if body.is_of_prompt else sample.finish_reason,
            stop_reason=None if body.is_of_prompt else sample.stop_reason,
            prompt_logprobs=of_prompt,
            prompt_token_ids=prompt_ids,
            token_ids=own_ids,
        )

    # -- in pieces

    @property
    def is_long(self) -> bool:
        """True if first pieces may be long, because they repeat the prompt."""
        return self._echoed is not None or self._prompt_ids is not None

    def pieces(self, batch: Batch, stream: TokenStreamLike) -> Iterator[CompletionPiece]:
        """Yield the pieces that a batch of `stream` adds to the choices, and the ends of choices.
        Each piece is made when it is asked for."""
        tokens, reasons = batch.tokens, batch.finish_reasons
        by_sample: dict[int, list[Token]] = {}
        if len(tokens) == 1 or self._num_choices == 1:
            if tokens:
                by_sample[tokens[0].sample] = tokens
        else:
            for token in tokens:
                by_sample.setdefault(token.sample, []).append(token)
        for number, choice in enumerate(self._choices):
            if choice.has_ended:
                continue
            reason = reasons[number] if reasons[number] in OWN_ENDS else None
            its = by_sample.get(number, ())
            if its or reason is not None:
                piece = self._piece(number, choice, its, reason, stream)
                if piece is not None:
                    yield piece

    def _piece(
        self,
        number: int,
        choice: _Choice,
        tokens: Sequence[Token],
        reason: FinishReason | None,
        stream: TokenStreamLike,
    ) -> CompletionPiece | None:
        """Return a piece; None if it would be empty."""
        body = self._body
        is_first, choice.has_begun, choice.has_ended = not choice.has_begun, True, bool(reason)
        text = self._echo if is_first else ""
        stop_reason = None if reason is None else stream.stop_reasons[number]
        if body.is_of_prompt:
            tokens, stop_reason = (), None
            reason = None if reason is None else FinishReason.LENGTH
        text += tokens[0].text if len(tokens) == 1 else "".join([each.text for each in tokens])
        logprobs = ids = prompt_ids = None
        if body.logprobs is not None:
            logprobs = choice.offsets.logprobs_of([(each.id, each.logprobs) for each in tokens])
            if is_first and self._echoed is not None:
                logprobs = self._echoed.with_more(logprobs)
        if body.return_token_ids:
            ids = [token.id for token in tokens]
            prompt_ids = self._prompt_ids if is_first else None
        if not (text or reason or logprobs or ids or prompt_ids):
            return None
        return CompletionPiece(
            index=self._first + number,
            text=text,
            finish_reason=reason,
            logprobs=logprobs,
            stop_reason=stop_reason,
            prompt_token_ids=prompt_ids,
            token_ids=ids,
        )

    # -- of the prompt

    async def _text_of_prompt(self, stream: TokenStreamLike) -> str:
        if isinstance(self._prompt, str) and self._body.truncate_prompt_tokens is None:
            return self._prompt
        # Special tokens of a prompt are part of it, as in a prompt of text.
        ids = stream.prompt_token_ids
        await self._pace.before(len(ids) // IDS_PER_UNIT)
        return self._texts.joined(ids)

    def counted(self, usage: Usage) -> Usage:
        """Usage without tokens that weren't asked for."""
        if not self._body.is_of_prompt:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0)


class AboutCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all chunks have in common."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str


def _about(call: Call, body: CompletionRequest) -> AboutCompletion:
    return AboutCompletion(
        id=f"cmpl-{call.call_log.call_id}",
        created=call.created_seconds,
        model=call.app_state.served_name(body.model),
        system_fingerprint=call.app_state.fingerprint,
    )


class Completion(AboutCompletion, frozen=True, kw_only=True):
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionWriter(Writer[tuple[int, Batch]]):
    """Writer of the choices of one request."""

    def __init__(
        self,
        call: Call,
        body: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[Any],
        merged: Merged,
    ) -> None:
        super().__init__(merged.batches)
        n = params.n
        self._params = params
        self._merged = merged
        self._about = _about(call, body)
        self._chunks = Chunks(self._about, body.stream_options)
        self._makers = [
            PromptChoices(call.facts, body, prompt, place * n, call.pace)
            for place, prompt in enumerate(prompts)
        ]
        self._begun: set[int] = set()
        self._pace = call.pace
        self._token_units = 1 + (body.logprobs or 0)

    async def whole(self) -> Completion:
        streams = self._merged.streams
        answers: list[EngineCompletion] = await all_of(
            [partial(collect, stream, self._params, self._pace.before) for stream in streams]
        )

        async def made() -> AsyncGenerator[CompletionChoice, None]:
            for maker, answer, stream in zip(self._makers, answers, streams, strict=True):
                async for choice in maker.whole(answer.samples, stream):
                    yield choice

        choices: Any = LongJson.of_list(made)
        about = msgspec.structs.asdict(self._about)
        return Completion(**about, choices=choices, usage=self._counted(self._merged.usage))

    async def written(self, batch: tuple[int, Batch]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a batch, choice by choice if they may be long."""
        place, its = batch
        maker, stream = self._makers[place], self._merged.streams[place]
        await self._pace.before(len(its.tokens) * self._token_units)
        if place not in self._begun:
            self._begun.add(place)
            await maker.begin(stream)
        counts = self._counted(self._merged.given_usage) if self._chunks.counts_always else None
        pieces = maker.pieces(its, stream)
        if not maker.is_long:
            yield self._chunks.joined(list(pieces), counts)
            return
        for piece in pieces:
            event = self._chunks.joined([piece], counts)
            self._pace.spend(len(event) // ENCODED_BYTES_PER_UNIT)
            yield event
            await self._pace.before(CHOICE_UNITS)

    def end(self) -> bytes:
        return self._chunks.end(self._counted(self._merged.usage))

    def _counted(self, usage: Usage) -> UsageBody:
        return usage_of(self._makers[0].counted(usage))


@endpoint(
    OPENAI_ERRORS,
    "/v1/completions",
    "Continue prompts",
    method="POST",
    answer=Completion,
    streams="if asked",
)
async def completions(call: Call, body: CompletionRequest) -> object:
    body.check(call)
    prompts = body.filled_in(call.facts, prompts_of(body.prompt, call.settings.max_prompts))
    names = body.names
    if body.use_beam_search:
        return await _beams(call, body, prompts)
    with as_named(names):
        params = body.params_of(call.default_params, call.settings)
        options = body.options(call)
        call.kept.begin(_size(call, body, params, prompts))
        # A wrong prompt is refused before any of them is answered.
        merged = await Merged.begun(
            [
                partial(call.engine.stream, each, with_best_of(params), **options)
                for each in prompts
            ],
            names,
            partial(call.pace.before, PROMPT_UNITS + CHOICE_UNITS * (params.best_of or params.n)),
        )
    writer = CompletionWriter(call, body, params, prompts, merged)
    return await answered(call, merged, writer, stream=body.stream)


def _size(
    call: Call, body: CompletionRequest, params: SamplingParams, prompts: Sequence[Any]
) -> AnswerSize:
    config, limits = call.engine.config, call.facts.limits
    n, of_prompts = params.best_of or params.n, 0
    tells_prompts = body.prompt_logprobs is not None or body.return_token_ids
    if body.echo or tells_prompts:
        of_prompts = params.n * most_tokens_of(prompts, limits.max_model_len)
    return AnswerSize(
        prompts=len(prompts),
        n=n,
        tokens=min(params.max_tokens or limits.max_model_len, limits.max_model_len),
        says_tokens=params.max_tokens is not None,
        buffered_tokens=config.max_buffered_tokens if body.stream else None,
        echoed_tokens=of_prompts if body.echo else 0,
        logprobs=body.logprobs,
        prompt_tokens=of_prompts if tells_prompts else 0,
        prompt_logprobs=body.prompt_logprobs,
        entry_bytes=ENTRY_BYTES,
    )


async def _beams(call: Call, body: CompletionRequest, prompts: Sequence[Any]) -> Completion:
    found, usage = await beams_of(
        call,
        body,
        prompts,
        body.max_tokens,
        harmless={"best_of": (1,), "echo": (False,), "logprobs": ()},
        names=body.names,
    )
    choices: list[CompletionChoice] = []
    for one in found:
        for beam in one.beams:
            choice = CompletionChoice(
                index=len(choices),
                text=beam.text,
                logprobs=None,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
                prompt_token_ids=one.prompt_ids if body.return_token_ids else msgspec.UNSET,
                token_ids=list(beam.token_ids) if body.return_token_ids else msgspec.UNSET,
            )
            choices.append(choice)
    about = msgspec.structs.asdict(_about(call, body))
    return Completion(**about, choices=choices, usage=usage_of(usage))
