"""Intake: a caller's arguments are checked, encoded off the event loop, and queued.

Errors that can be found at once are raised at once. Others need the encoded prompt, like a text too
long for the model, or a template that refuses. They end the request's stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import Rule, check, name, optional, plain_str, shown
from aioserve.config import EngineConfig
from aioserve.engine.begun import BegunAnswer, Origin
from aioserve.engine.chat_stream import ChatFormat
from aioserve.engine.compiling import Compiled, GrammarCompiler
from aioserve.engine.core import CoreLoop
from aioserve.engine.encoding import Encoded, Encoder
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.options import MESSAGE_DEFAULTS, TRUNCATION_DEFAULTS
from aioserve.engine.params_intake import ParamsIntake
from aioserve.engine.prompts import (
    ContinuedPrompt,
    PredictedPrompt,
    Prompt,
    checked_ids,
    kind_of,
)
from aioserve.engine.queue_room import QueueRoom
from aioserve.engine.requests import LiveRequest
from aioserve.engine.truncation import TruncatedPrompt, Truncation, checked_truncation
from aioserve.errors import (
    AioserveError,
    DuplicateRequestError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    RequestFailedError,
    RequestRejectedError,
)
from aioserve.execution.runner import CheckedRequest, LoadedModel
from aioserve.grammars.grammar import CompiledGrammar
from aioserve.hints import checked_hints
from aioserve.kv.namespace import namespace_key
from aioserve.plugins import Admission, info_of
from aioserve.request import FinishReason, Request, SamplingParams
from aioserve.text.assembler import TextAssembler
from aioserve.text.conversation import Conversation, conversation_of
from aioserve.text.output_parsers.registry import OutputParsers

__all__ = ["Intake", "PromptFields"]

PromptFields = Callable[[int], dict[str, Any]]
"""Callback that makes fields of the `Request` from the number of prompt tokens. It serves
requests that want something of the prompt itself, like scores."""

INLINE_CHARS = 512
"""Texts up to this length are encoded on the event loop: it takes less time than a thread
switch."""
MAX_PREDICTED_TOKENS = 2**17
"""Most predicted tokens of a request, over all its answers. Each answer indexes the prediction."""
CHARS_PER_TOKEN = 4
"""Estimated characters per token, as for English text, until a text is encoded."""
NAME_OR_NONE: Rule[str | None] = optional(name)
SEED_STRIDE = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, odd. Gives requests without a seed distinct, scattered keys."""


class _Checked(msgspec.Struct, frozen=True):
    """A request that has passed the checks, without its prompt's token ids."""

    live: LiveRequest
    params: SamplingParams
    fields: dict[str, Any]
    """Fields of the later `Request`."""
    chat_format: ChatFormat | None = None
    prompt_fields: PromptFields | None = None
    truncation: Truncation | None = None
    thinks_in: ChatFormat | None = None
    """Format of the reasoning that has a budget."""
    predicted: PredictedPrompt | None = None
    """Prompt of a request with a predicted answer."""
    begun: BegunAnswer | None = None
    """The prompt and the tokens so far, where another request began the answer."""


class Intake:
    """Makes submissions for one core loop. `logits_processor` is that of `ParamsIntake`."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        core: CoreLoop,
        admission: Admission,
        logits_processor: Callable[[str], int],
        parsers: OutputParsers,
    ) -> None:
        self._config = config
        self._model = model
        self._core = core
        self.room: QueueRoom = QueueRoom(config, core)
        self._admission = admission
        self._parsers = parsers
        self._params = ParamsIntake(model, config, logits_processor)
        self.encoder: Encoder = Encoder(
            model, special_tokens_in_messages=config.special_tokens_in_messages
        )
        self.compiler: GrammarCompiler = GrammarCompiler(model)
        self._num_requests = 0
        self._asking = False
        """True while a plugin is asked about a request, which isn't queued yet."""

    def submit(
        self,
        prompt: Prompt | ContinuedPrompt | BegunAnswer,
        params: SamplingParams | None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        *,
        chat_format: ChatFormat | None = None,
        prompt_fields: PromptFields | None = None,
        **options: Any,
    ) -> Mailbox:
        """Check and queue a request.

        `chat_format` reads completions of messages. `prompt_fields` is for requests that want
        something of the prompt. `options` are the others of `StreamOptions`. A `ContinuedPrompt` or
        a `BegunAnswer` was checked before. Raises what `Engine.stream` says; nothing is changed
        then.
        """
        if self._asking:
            raise EngineError(
                "aioserve_admit can't submit requests to the engine that asks it; do it afterwards"
            )
        if prompt_fields is None:
            self.check_generates()
        params = self._params.checked(params)
        processors = self._params.processors(params)
        request_id = self._checked_request_id(request_id)
        salt = check(InvalidRequestError, "cache_salt", cache_salt, NAME_OR_NONE)
        chat = {name: options.pop(name) for name in MESSAGE_DEFAULTS if name in options}
        truncation = self.truncation_of(options, params)
        hints = checked_hints(
            {name: value for name, value in options.items() if name not in TRUNCATION_DEFAULTS}
        )
        self.room.check_count()
        begun = prompt if isinstance(prompt, BegunAnswer) else None
        if isinstance(prompt, ContinuedPrompt | BegunAnswer):
            text_or_ids = prompt
        else:
            text_or_ids = self.checked_prompt(prompt, chat, truncation)
        if chat_format is not None:
            if not isinstance(text_or_ids, Conversation):
                raise InvalidPromptError(
                    f"messages must be a list of messages, got {shown(prompt)}", value=prompt
                )
            self._check_answers(chat_format, text_or_ids, params)
        thinks_in = self._thinks_in(params, chat_format)
        num_chars, num_tokens = _size(text_or_ids)
        if params.prediction is not None:
            self.encoder.check_text("prediction", params.prediction)
            num_chars += len(params.prediction)
            num_tokens += len(params.prediction) // CHARS_PER_TOKEN
        self.encoder.check_room(num_chars)
        self.room.check_tokens(num_tokens, hints.deadline_seconds)
        live = LiveRequest(
            request_id,
            self._core.delivery.reader_did,
            capacity=self._config.max_buffered_tokens,
            num_samples=params.n,
            ended_requests=self._core.table.ended_requests,
        )
        live.mailbox.tenant = hints.tenant
        drafts = 0 if prompt_fields is not None else self._params.max_draft_tokens(params)
        fields = {
            "max_draft_tokens": drafts,
            "seed": self._seed_of(params),
            "namespace": namespace_key(salt=salt),
            "logits_processors": processors,
            "hints": hints,
        }
        if begun is not None:
            stops = self._params.stops(params)
            begun.assembled_by(partial(TextAssembler, self._model.tokenizer, params, stops=stops))
            fields["answer_from"], fields["script"] = len(begun.prompt_ids), begun.script
        elif self._model.script is not None:
            parser = None if chat_format is None else chat_format.tool_parser
            asked = CheckedRequest(text_or_ids, params, prompt_fields is None, parser)
            fields["script"] = self._model.script(asked)
        if chat_format is None and prompt_fields is None:
            live.mailbox.origin = Origin(
                params=params,
                seed=fields["seed"],
                cache_salt=salt,
                hints=hints,
                script=fields.get("script"),
                answer_from=fields.get("answer_from"),
            )
        checked = _Checked(
            live, params, fields, chat_format, prompt_fields, truncation, thinks_in, begun=begun
        )
        self._core.table.enter(live, num_tokens)
        self._core.delivery.watch_deadline(live, hints.deadline_seconds)
        try:
            self._encode(checked, text_or_ids, num_chars)
        except BaseException:
            self._core.table.end(live)
            raise
        return live.mailbox

    def _seed_of(self, params: SamplingParams) -> int:
        drawn = (self._config.seed + self._num_requests * SEED_STRIDE) % 2**64
        self._num_requests += 1
        return drawn if params.seed is None else params.seed

    # -- checks at the edge

    def check_generates(self) -> None:
        """Raise `InvalidRequestError` for a model that only makes hidden states."""
        if not self._model.generates:
            raise InvalidRequestError(
                f"{self._model.name} can't generate text, or score it: its checkpoint has no "
                "output layer. It makes embeddings",
                argument="prompt",
            )

    def _checked_request_id(self, request_id: str | None) -> str:
        request_id = check(InvalidRequestError, "request_id", request_id, NAME_OR_NONE)
        if request_id is None:
            return uuid.uuid4().hex
        if self._core.table.is_taken(request_id):
            raise DuplicateRequestError(
                f"a live request has the id {request_id!r}", value=request_id
            )
        return request_id

    def _check_answers(
        self, chat_format: ChatFormat, conversation: Conversation, params: SamplingParams
    ) -> None:
        chat_format.conversation_is(conversation)
        held = chat_format.held
        if held is not None and not self._params.end_ids(params):
            for argument, named in held.names.items():
                if named:
                    raise InvalidRequestError(
                        f"{argument} must be empty where no token id ends an answer",
                        argument=argument,
                    )

    def truncation_of(
        self, options: Mapping[str, Any], params: SamplingParams
    ) -> Truncation | None:
        """Return the checked truncation of a prompt; see `checked_truncation`."""
        return checked_truncation(options, params, self._model.limits)

    def _thinks_in(
        self, params: SamplingParams, chat_format: ChatFormat | None
    ) -> ChatFormat | None:
        """Return the format of the reasoning that the params limit; None if they limit none.

        Raises `InvalidSamplingError` if the model's format is unknown.
        """
        held = None if chat_format is None else chat_format.held
        is_whole = params.structured_output is not None and (held is None or held.form is None)
        if chat_format is not None and chat_format.has_channels:
            is_whole = False
        if params.thinking_token_budget is None or is_whole:
            return None
        thinks_in = chat_format or ChatFormat.of(
            self._model, self._config, self._parsers, None, "none", "auto"
        )
        if not thinks_in.has_reasoning or self._model.tokenizer is None:
            raise InvalidSamplingError(
                "thinking_token_budget isn't supported by this model: nothing tells how it writes "
                "reasoning. Its chat template has no tags, and no reasoning_parser is named",
                argument="thinking_token_budget",
                value=params.thinking_token_budget,
            )
        return thinks_in

    def checked_prompt(
        self, prompt: Prompt, chat: Mapping[str, Any], truncation: Truncation | None = None
    ) -> str | Conversation | npt.NDArray[np.int32]:
        """Return token ids as an int32 array, cut by `truncation`; text and messages stay as they
        are.

        `chat` has unchecked `MessageOptions`.
        """
        kind = kind_of(prompt)
        if kind != "messages":
            _check_no_message_options(chat, kind)
        if kind == "text":
            text = plain_str(prompt)
            if not text:
                raise InvalidPromptError("prompt must not be empty, got ''")
            self.encoder.check_text("prompt", text)
            return text
        if kind == "messages":
            self.encoder.tokenizer_for("prompt")
            if self._model.chat_template is None:
                raise InvalidPromptError(
                    f"{self._model.name} has no chat template; the option chat_template gives one"
                )
            conversation = conversation_of(prompt, max_chars=self.encoder.max_chars, **chat)
            self._model.chat_template.check_read(conversation)
            return conversation
        if truncation is None:
            return self._checked_ids(prompt)
        return truncation.cut(self._checked_ids(prompt, truncation.max_whole_tokens + 1))

    def _checked_ids(self, ids: object, max_model_len: int | None = None) -> npt.NDArray[np.int32]:
        limits = self._model.limits
        return checked_ids(
            ids,
            vocab_size=limits.vocab_size,
            max_model_len=max_model_len or limits.max_model_len,
        )

    # -- encoding

    def _encode(
        self,
        checked: _Checked,
        prompt: str | Conversation | npt.NDArray[np.int32] | ContinuedPrompt | BegunAnswer,
        num_chars: int,
    ) -> None:
        prediction = checked.params.prediction
        if isinstance(prompt, np.ndarray) and prediction is None:
            self._queue(checked, prompt)
            return
        with self._failing(checked.live):
            is_quick = self._model.tokenizer is None or self._model.tokenizer.is_quick
            is_quick &= num_chars <= INLINE_CHARS
            is_quick &= isinstance(prompt, str) or _has_no_messages(prompt)
            whole: Any = prompt
            if checked.truncation is not None and not isinstance(prompt, np.ndarray):
                whole = TruncatedPrompt(prompt, checked.truncation)
            if prediction is not None:
                whole = PredictedPrompt(whole, prediction)
                checked = msgspec.structs.replace(checked, predicted=whole)
            if is_quick:
                self._queue_encoded(checked, self.encoder.encode(whole))
            else:
                then = partial(self._encoded, checked)
                checked.live.encoding = self.encoder.submit(whole, num_chars, then)

    def _encoded(self, checked: _Checked, encoded: Encoded) -> None:
        checked.live.encoding = None
        with self._failing(checked.live):
            if isinstance(encoded, BaseException):
                raise encoded
            self._queue_encoded(checked, encoded)

    def _queue_encoded(self, checked: _Checked, ids: list[int] | npt.NDArray[np.int32]) -> None:
        if not len(ids):
            raise InvalidPromptError("prompt must not be empty, got a text without tokens")
        self._queue(checked, self._checked_ids(ids))

    def _queue(self, checked: _Checked, ids: npt.NDArray[np.int32]) -> None:
        chat_format, output = checked.chat_format, checked.params.structured_output
        prompt_ids = ids if checked.begun is None else checked.begun.prompt_ids
        for each in (chat_format, checked.thinks_in):
            if each is not None:
                each.prompt_is(prompt_ids, self._model.tokenizer)
        if chat_format is not None:
            output = chat_format.output() or output
        if output is None:
            self._guide(checked, None)
            self._queue_ready(checked, ids)
            return
        if output is not checked.params.structured_output:
            params = msgspec.structs.replace(checked.params, structured_output=output)
            checked = msgspec.structs.replace(checked, params=params)
        with self._failing(checked.live, "structured_output can't be compiled"):
            then = partial(self._compiled, checked, ids)
            checked.live.encoding = self.compiler.submit(output, then)

    def _compiled(self, checked: _Checked, ids: npt.NDArray[np.int32], compiled: Compiled) -> None:
        checked.live.encoding = None
        with self._failing(checked.live, "structured_output can't be compiled"):
            if isinstance(compiled, BaseException):
                raise compiled
            self._guide(checked, compiled)
            self._queue_ready(checked, ids)

    def _guide(self, checked: _Checked, grammar: CompiledGrammar | None) -> None:
        checked.live.grammar = grammar
        most = checked.params.thinking_token_budget
        if checked.thinks_in is not None and most is not None:
            checked.live.grammar = checked.thinks_in.budget(most, self._model, grammar)

    def _queue_ready(self, checked: _Checked, ids: npt.NDArray[np.int32]) -> None:
        live, params, limits = checked.live, checked.params, self._model.limits
        live.mailbox.prompt_ids = ids
        most = limits.max_model_len
        if params.max_tokens is not None:
            before = len(ids) if checked.begun is None else len(checked.begun.prompt_ids)
            most = min(most, before + params.max_tokens)
        fields: dict[str, Any] = {"max_length": most, **checked.fields}
        if checked.prompt_fields is not None:
            fields |= checked.prompt_fields(len(ids))
        if checked.predicted is not None:
            predicted = checked.predicted.predicted_ids
            if params.n * len(predicted) > MAX_PREDICTED_TOKENS:
                raise InvalidSamplingError(
                    f"prediction must have at most {MAX_PREDICTED_TOKENS} tokens for n={params.n} "
                    f"answers together, got {len(predicted)} for each",
                    argument="prediction",
                    value=len(predicted),
                    limit=MAX_PREDICTED_TOKENS // params.n,
                )
            fields["predicted_ids"] = predicted
        if checked.prompt_fields is None and params.prompt_logprobs is not None:
            fields["score_from"] = 1
            live.mailbox.prompt_logprobs = [None]
        request = Request(
            request_id=live.request_id,
            prompt_ids=ids,
            params=params,
            end_ids=self._params.end_ids(params),
            bad_word_ids=self._params.bad_word_ids(params),
            arrival_seconds=live.mailbox.started_seconds,
            **fields,
        )
        self._asking = True
        self._core.table.ask(live, len(ids))
        try:
            self._admission.check(info_of(request))
        except RequestRejectedError as error:
            self._fail(live, error)
            return
        finally:
            self._asking = False
        tokenizer, chat_format = self._model.tokenizer, checked.chat_format
        texts_shown = None if chat_format is None else chat_format.shown
        stops = self._params.stops(params)
        if checked.begun is not None:
            live.assemblers = (checked.begun.assembler(),)
            live.mailbox.first_index = len(checked.begun.answer_ids)
        else:
            live.assemblers = tuple(
                [TextAssembler(tokenizer, params, texts_shown, stops) for _ in range(params.n)]
            )
        live.request = request
        self._core.submit(live)

    @contextmanager
    def _failing(
        self, live: LiveRequest, what: str = "the prompt can't be encoded"
    ) -> Iterator[None]:
        """End a request with any exception raised inside."""
        try:
            yield
        except AioserveError as error:
            self._fail(live, error)
        except BaseException as error:  # a panic in Rust code is a BaseException
            failed = RequestFailedError(f"{what}: {shown(error)}")
            self._fail(live, failed.with_cause(error))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    def _fail(self, live: LiveRequest, error: AioserveError) -> None:
        self._core.table.end(live)
        live.mailbox.finish(FinishReason.ERROR, error)


def _check_no_message_options(chat: Mapping[str, Any], kind: str) -> None:
    """Raise `InvalidRequestError` for options that have no effect."""
    for argument, value in chat.items():
        if value is not MESSAGE_DEFAULTS[argument]:
            raise InvalidRequestError(
                f"{argument} goes with a prompt of messages alone, got {shown(value)} beside "
                f"{'token ids' if kind == 'ids' else 'text'}",
                argument=argument,
                value=value,
            )


def _has_no_messages(prompt: Any) -> bool:
    if isinstance(prompt, BegunAnswer):
        return True
    parts = prompt.parts if isinstance(prompt, ContinuedPrompt) else (prompt,)
    return not [part for part in parts if not isinstance(part, str | np.ndarray)]


def _size(prompt: Any) -> tuple[int, int]:
    """Characters of a prompt that are to be encoded, and its tokens, about. A token whose text is
    put together once more counts as a character."""
    num_chars = num_tokens = 0
    if isinstance(prompt, BegunAnswer):
        return len(prompt.answer_ids), prompt.num_tokens
    for part in prompt.parts if isinstance(prompt, ContinuedPrompt) else (prompt,):
        if isinstance(part, np.ndarray):
            num_tokens += len(part)
        else:
            chars = len(part) if isinstance(part, str) else part.num_chars
            num_chars += chars
            num_tokens += max(1, chars // CHARS_PER_TOKEN)
    return num_chars, num_tokens
