"""The way in: what a caller gives is checked, encoded off the event loop, and queued.

What can be checked at once raises at once; what only encoding shows (a text too long for the
model, a template that refuses) ends the request's stream with the error.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.engine.core import CoreLoop, Submission
from aioserve.engine.mailbox import Mailbox
from aioserve.errors import (
    AioserveError,
    DuplicateRequestError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
    RequestRejectedError,
)
from aioserve.execution.runner import LoadedModel
from aioserve.kv.namespace import namespace_key
from aioserve.plugins import Admission, RequestInfo
from aioserve.request import FinishReason, SamplingParams
from aioserve.text.assembler import TextAssembler
from aioserve.text.chat import validate_messages

__all__ = ["Intake", "Message", "Prompt"]

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

INLINE_CHARS = 512
"""Texts up to this long are encoded on the event loop: it takes less time than a thread switch."""
MAX_CHARS_PER_TOKEN = 128
"""A text of more characters than this times the model's context is refused unread: no vocabulary
has tokens that long on average."""
ENCODER_THREADS = 2
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_TENANT_CHARS = 256
SEED_STRIDE = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, odd: requests without a seed of their own get distinct, scattered keys."""


class _Checked(msgspec.Struct, frozen=True):
    """A request that passed the checks at the edge; its prompt may still have to be encoded."""

    mailbox: Mailbox
    params: SamplingParams
    seed: int
    namespace: bytes
    tenant: str | None
    ttft_target_seconds: float | None
    tpot_target_seconds: float | None


class Intake:
    """Makes submissions for one core loop."""

    def __init__(
        self, config: EngineConfig, model: LoadedModel, core: CoreLoop, admission: Admission
    ) -> None:
        self._config = config
        self._model = model
        self._core = core
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._threads = anyio.CapacityLimiter(ENCODER_THREADS)
        self._encoding: dict[Mailbox, asyncio.Task[None]] = {}
        self._num_requests = 0
        self._asking = False
        """A plugin is being asked about a request, which isn't queued yet."""

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started, wherever they wait."""
        encoding = sum(mailbox.finish_reason is None for mailbox in self._encoding)
        return encoding + self._core.num_waiting

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
    ) -> Mailbox:
        """Check and queue a request. Raises what `Engine.stream` says, and has then changed
        nothing."""
        if self._asking:
            raise EngineError(
                "aioserve_admit can't submit requests to the engine that asks it; do it afterwards"
            )
        params = self._checked_params(params)
        request_id = self._checked_request_id(request_id)
        namespace = self._checked_namespace(cache_salt)
        _check_name("tenant", tenant, MAX_TENANT_CHARS)
        ttft_target_seconds = _checked_target("ttft_target_seconds", ttft_target_seconds)
        tpot_target_seconds = _checked_target("tpot_target_seconds", tpot_target_seconds)
        if self.num_waiting >= self._config.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait; max_waiting is {self._config.max_waiting}"
            )
        text_or_ids = self._checked_prompt(prompt)
        seed = params.seed
        if seed is None:
            seed = (self._config.seed + self._num_requests * SEED_STRIDE) % 2**64
        self._num_requests += 1
        mailbox = Mailbox(
            request_id, self._loop, self._core.owner, self._config.max_buffered_tokens, params.n
        )
        request = _Checked(
            mailbox, params, seed, namespace, tenant, ttft_target_seconds, tpot_target_seconds
        )
        if isinstance(text_or_ids, np.ndarray):
            self._queue(request, text_or_ids)
        elif isinstance(text_or_ids, str) and len(text_or_ids) <= INLINE_CHARS:
            with _failing(mailbox):
                self._queue_encoded(request, self._encode(text_or_ids))
        else:
            # A task, so that it runs in the caller's context.
            task = self._loop.create_task(self._encode_in_thread(request, text_or_ids))
            self._encoding[mailbox] = task
            # Not in the task: one that is cancelled before it starts runs none of its code.
            task.add_done_callback(lambda task: self._encoded(mailbox, task))
        return mailbox

    def abort_all(self, error: AioserveError) -> int:
        """End every request that is being encoded with `error`; how many there were."""
        return sum(
            mailbox.finish(FinishReason.ABORT, type(error)(*error.args))
            for mailbox in self._encoding
        )

    async def wait_idle(self) -> None:
        """Until no prompt is being encoded."""
        while self._encoding:
            await asyncio.wait(list(self._encoding.values()))

    # -- checks at the edge

    def _checked_params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return self._model.defaults
        if not isinstance(params, SamplingParams):
            raise InvalidSamplingError(f"params must be SamplingParams, got {params!r}")
        if params.n > self._config.max_num_seqs:
            raise InvalidSamplingError(
                f"n must be at most max_num_seqs = {self._config.max_num_seqs}, got {params.n}"
            )
        vocab_size = self._model.limits.vocab_size
        for token_id in params.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidSamplingError(
                    f"stop_token_ids must be below the vocabulary size {vocab_size}, got {token_id}"
                )
        return params

    def _checked_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return uuid.uuid4().hex
        _check_name("request_id", request_id, MAX_REQUEST_ID_CHARS)
        encoding = (mailbox.request_id for mailbox in self._encoding)
        if self._core.is_live(request_id) or request_id in encoding:
            raise DuplicateRequestError(f"a live request has the id {request_id!r}")
        return request_id

    def _checked_namespace(self, cache_salt: str | None) -> bytes:
        _check_name("cache_salt", cache_salt, MAX_CACHE_SALT_CHARS)
        return namespace_key(salt=cache_salt)

    def _checked_prompt(self, prompt: Prompt) -> str | Sequence[Message] | npt.NDArray[np.int32]:
        """Token ids as an int32 array; text and messages as they are, not empty."""
        listed = isinstance(prompt, Sequence) or (isinstance(prompt, np.ndarray) and prompt.ndim)
        if not listed or isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidPromptError(
                f"prompt must be a str, token ids or messages, got {type(prompt).__name__}"
            )
        if len(prompt) == 0:
            raise InvalidPromptError(f"prompt must not be empty, got {prompt!r}")
        if isinstance(prompt, str):
            self._check_chars(len(prompt))
            return prompt
        if isinstance(prompt[0], Mapping):
            if self._model.chat_template is None:
                raise InvalidPromptError(
                    f"prompt is a list of messages, but {self._model.name} has no chat template"
                )
            messages = validate_messages(prompt)
            self._check_chars(sum(len(message["content"]) for message in messages))
            return messages
        return self._checked_ids(prompt)

    def _check_chars(self, chars: int) -> None:
        limit = self._model.limits.max_model_len
        if chars > limit * MAX_CHARS_PER_TOKEN:
            raise PromptTooLongError(
                f"prompt has {chars} characters, which can't be fewer than max_model_len = {limit} "
                f"tokens; {limit * MAX_CHARS_PER_TOKEN} are read at most"
            )

    def _checked_ids(self, ids: Any) -> npt.NDArray[np.int32]:
        vocab_size = self._model.limits.vocab_size
        limit = self._model.limits.max_model_len
        if len(ids) >= limit:
            raise PromptTooLongError(
                f"prompt has {len(ids)} tokens; max_model_len is {limit}, and at least one "
                "token must be left for the answer"
            )
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError) as error:
            raise InvalidPromptError(f"prompt must be a flat sequence of ints: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidPromptError(
                "prompt must be a str, a flat sequence of ints or a list of messages, "
                f"got a sequence of {type(ids[0]).__name__}"
            )
        outside = (array < 0) | (array >= vocab_size)
        if outside.any():
            index = int(outside.argmax())
            raise InvalidPromptError(
                f"token ids of the prompt must be in [0, {vocab_size}), "
                f"got {array[index]} at index {index}"
            )
        return array.astype(np.int32)

    # -- encoding

    async def _encode_in_thread(self, request: _Checked, prompt: Any) -> None:
        mailbox = request.mailbox

        def encode_if_wanted() -> list[int]:
            return [] if mailbox.finish_reason is not None else self._encode(prompt)

        with _failing(mailbox):
            ids = await anyio.to_thread.run_sync(encode_if_wanted, limiter=self._threads)
            if mailbox.finish_reason is None:
                self._queue_encoded(request, ids)

    def _encoded(self, mailbox: Mailbox, task: asyncio.Task[None]) -> None:
        del self._encoding[mailbox]
        if task.cancelled():
            error = RequestFailedError("the task that encoded the prompt was cancelled")
            mailbox.finish(FinishReason.ERROR, error)

    def _encode(self, prompt: Any) -> list[int]:
        tokenizer, template = self._model.tokenizer, self._model.chat_template
        if isinstance(prompt, str) or template is None:
            return tokenizer.encode(prompt)
        return tokenizer.encode(template.render(prompt), add_special_tokens=False)

    def _queue_encoded(self, request: _Checked, ids: list[int]) -> None:
        if not ids:
            raise InvalidPromptError("prompt must not be empty, got a text without tokens")
        self._queue(request, self._checked_ids(ids))

    def _queue(self, request: _Checked, ids: npt.NDArray[np.int32]) -> None:
        limits, params = self._model.limits, request.params
        request.mailbox.prompt_tokens = len(ids)
        max_length = limits.max_model_len
        if params.max_tokens is not None:
            max_length = min(max_length, len(ids) + params.max_tokens)
        info = RequestInfo(
            request_id=request.mailbox.request_id,
            tenant=request.tenant,
            prompt_tokens=len(ids),
            max_tokens=max_length - len(ids),
            num_samples=params.n,
            ttft_target_seconds=request.ttft_target_seconds,
            tpot_target_seconds=request.tpot_target_seconds,
            arrival_seconds=request.mailbox.started_seconds,
        )
        self._asking = True
        try:
            self._admission.check(info)
        except RequestRejectedError as error:
            request.mailbox.finish(FinishReason.ERROR, error)
            return
        finally:
            self._asking = False
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= limits.eos_token_ids
        assemblers = tuple(TextAssembler(self._model.tokenizer, params) for _ in range(params.n))
        self._core.submit(
            Submission(
                mailbox=request.mailbox,
                info=info,
                prompt_ids=ids,
                params=params,
                seed=request.seed,
                namespace=request.namespace,
                end_ids=end_ids,
                max_length=max_length,
                assemblers=assemblers,
            )
        )


def _check_name(argument: str, value: object, max_chars: int) -> None:
    """Raise unless it is a str of 1 to `max_chars` characters, or None."""
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= max_chars):
        raise InvalidRequestError(
            f"{argument} must be a str of 1 to {max_chars} characters, got {value!r}"
        )


def _checked_target(argument: str, value: object) -> float | None:
    """A time as a float, or None."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            raise InvalidRequestError(
                f"{argument} must be a number above 0 and finite, got an int too large for a float"
            ) from None
        if 0 < seconds < math.inf:
            return seconds
    raise InvalidRequestError(
        f"{argument} must be a number above 0 and finite, or None, got {value!r}"
    )


@contextmanager
def _failing(mailbox: Mailbox) -> Iterator[None]:
    """Ends the mailbox's request with whatever is raised inside."""
    try:
        yield
    except AioserveError as error:
        mailbox.finish(FinishReason.ERROR, error)
    except Exception as error:
        failed = RequestFailedError(f"the prompt can't be encoded: {error!r}")
        failed.__cause__ = error
        mailbox.finish(FinishReason.ERROR, failed)
