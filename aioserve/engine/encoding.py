"""Encodes prompts to token ids, off the event loop.

    submit ──► waiting ──► on a thread ──► then(ids)
                  │             │
                  └── cancel ───┘

An encode can't be interrupted, and a huge text takes many seconds. So only one of two threads takes
long texts, and no short prompt waits for a long one. Long texts are encoded one after the other.
`MAX_LONG_CHARS` bounds those that wait, and `max_waiting` the short ones. A thread whose ids no
request wants any more isn't waited for. It ends when the library returns.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.engine.begun import BegunAnswer
from aioserve.engine.prompts import ContinuedPrompt, PredictedPrompt, too_long
from aioserve.engine.truncation import TruncatedPrompt
from aioserve.errors import (
    EngineClosedError,
    InvalidPromptError,
    PromptTooLongError,
    QueueFullError,
)
from aioserve.execution.handler_thread import HandlerThread
from aioserve.execution.runner import LoadedModel
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import Conversation
from aioserve.text.tokenizer import Tokenizer

__all__ = ["BareText", "Encoded", "Encoder", "Encoding", "Framed"]

MAX_CHARS_PER_TOKEN = 128
"""Most characters per token of the model's context. Longer texts are refused unread: no
vocabulary has tokens that long on average. (Some have runs of 128 spaces or dashes.)"""
LONG_CHARS = 2**15
"""Longer texts are encoded one by one, on one thread. A text of this length takes about 10 ms,
and in the worst case, a single word, about 100 ms."""
EXIT_SECONDS = 0.5
"""Time that interpreter exit waits for an encode."""
MAX_LONG_CHARS = 2**26
"""Most characters of long texts that are encoded or wait, if there are several."""

Encoded = list[int] | npt.NDArray[np.int32] | BaseException


class BareText(msgspec.Struct, frozen=True):
    """A text to encode without the special tokens that the model expects around a prompt."""

    text: str


class Framed(msgspec.Struct, frozen=True):
    """Messages for another template than the model's own."""

    conversation: Conversation
    template: ChatTemplate


class Encoding:
    """One prompt on its way to token ids. Used on the event loop's thread only."""

    __slots__ = ("_encoder", "context", "is_waiting", "num_chars", "prompt", "then")

    def __init__(
        self, encoder: Encoder, prompt: Any, num_chars: int, then: Callable[[Encoded], None]
    ) -> None:
        self._encoder = encoder
        self.prompt: Any = prompt
        self.num_chars: int = num_chars
        self.then: Callable[[Encoded], None] | None = then
        """Callback of the request. Cleared once it was called or cancelled."""
        self.context: contextvars.Context = contextvars.copy_context()
        """Context of the caller. Its prompt is encoded there, and `then` is called there."""
        self.is_waiting: bool = True

    def run(self) -> Encoded:
        """Encode the prompt. Runs on a thread."""
        return self.context.run(self._run)

    def _run(self) -> Encoded:
        try:
            return self._encoder.encode(self.prompt)
        except BaseException as error:  # a panic in Rust code is a BaseException
            return error

    def cancel(self) -> None:
        """Never call `then`. Safe at any moment: the garbage collector may call it."""
        if self.then is not None:
            self.then = None
            self._encoder.left(self)


class Encoder:
    """Encodes the prompts of one engine. Used only on the event loop that it is made on."""

    def __init__(self, model: LoadedModel, *, special_tokens_in_messages: bool) -> None:
        self._model = model
        self._special_tokens_in_messages = special_tokens_in_messages
        self._loop = asyncio.get_running_loop()
        self._short: deque[Encoding] = deque()
        self._long: deque[Encoding] = deque()
        self._long_chars = 0
        self._lanes = (
            _Lane(f"aioserve-encode-{model.name}", (self._long, self._short)),
            _Lane(f"aioserve-encode-{model.name}", (self._short,)),
        )
        self._wanted: dict[Encoding, None] = {}
        """Encodings whose ids are wanted, in order of arrival."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def max_chars(self) -> int:
        """Most characters of one prompt."""
        return self._model.limits.max_model_len * MAX_CHARS_PER_TOKEN

    def tokenizer_for(self, argument: str) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidPromptError` if there is none."""
        if self._model.tokenizer is None:
            raise InvalidPromptError(
                f"{argument} must be token ids, got text: {self._model.why_no_tokenizer}",
                argument=argument,
            )
        return self._model.tokenizer

    def check_text(self, argument: str, text: str) -> None:
        """Raise `PromptTooLongError` for a text too long to fit the model, and
        `InvalidPromptError` without a tokenizer."""
        if (chars := len(text)) > self.max_chars:
            raise PromptTooLongError(
                f"{argument} has {chars} characters, which can't be fewer than max_model_len = "
                f"{self._model.limits.max_model_len} tokens; {self.max_chars} are read at most",
                argument=argument,
                value=chars,
                limit=self.max_chars,
                unit="characters",
            )
        self.tokenizer_for(argument)

    def encode(self, prompt: Any) -> list[int] | npt.NDArray[np.int32]:
        """Return the token ids of a prompt of any kind; ids are returned as they are.

        Runs on any thread, for as long as it takes.
        """
        if isinstance(prompt, np.ndarray):
            return prompt
        if isinstance(prompt, BegunAnswer):
            return prompt.encode()
        if isinstance(prompt, PredictedPrompt):
            prompt.predicted_ids = self._prediction_ids(prompt.prediction)
            return self.encode(prompt.prompt)
        if isinstance(prompt, ContinuedPrompt):
            return prompt.encode(self._encode, self._model.limits.max_model_len - 1)
        if isinstance(prompt, TruncatedPrompt):
            whole, most = prompt.prompt, prompt.truncation.max_whole_tokens
            framed = isinstance(whole, str)
            frame = self.tokenizer_for("prompt").frame if framed else (0, 0)
            return prompt.truncation.cut(self._ids_of(whole, most), frame)
        return self._encode(prompt)

    def _prediction_ids(self, prediction: str) -> npt.NDArray[np.int32]:
        """Encode a prediction to int32 ids that the model has logits for.

        A tokenizer may know further ids, which never occur in a completion.
        """
        ids = np.array(self._encode(BareText(prediction), "prediction"), np.int32)
        return ids[ids < self._model.limits.vocab_size]

    def _ids_of(
        self, prompt: Any, max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        template, tokenizer = self._model.chat_template, self.tokenizer_for("prompt")
        if isinstance(prompt, BareText):
            prompt, add_special_tokens = prompt.text, False
        if isinstance(prompt, Framed):
            prompt, template = prompt.conversation, prompt.template
        if isinstance(prompt, str) or template is None:
            return tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        return template.encode(
            prompt,
            tokenizer,
            special_tokens_in_messages=self._special_tokens_in_messages,
            max_chars=self.max_chars,
            max_tokens=max_tokens,
        )

    def _encode(
        self, prompt: Any, argument: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        max_model_len = self._model.limits.max_model_len
        try:
            return self._ids_of(prompt, max_model_len - 1, add_special_tokens=add_special_tokens)
        except PromptTooLongError as error:
            if error.unit == "tokens" and error.value is not None:
                raise too_long(error.value, max_model_len, argument) from None
            raise

    # -- the queues

    def check_room(self, num_chars: int) -> None:
        """Raise `QueueFullError` if a prompt of `num_chars` characters can't even wait."""
        # One is always taken: a prompt that fits the model is never refused for its length.
        wait = self._long_chars
        if num_chars > LONG_CHARS and wait and wait + num_chars > MAX_LONG_CHARS:
            raise QueueFullError(
                f"long prompts of {wait} characters are being encoded or wait to be; with "
                f"{num_chars} more there would be more than {MAX_LONG_CHARS}",
                value=wait,
                limit=MAX_LONG_CHARS,
                unit="characters",
                retry_after_seconds=None,  # the time that a text takes is unknown
            )

    def submit(self, prompt: Any, num_chars: int, then: Callable[[Encoded], None]) -> Encoding:
        """Encode a prompt of `num_chars` characters on a thread.

        `then` is called with its ids or the error, in the caller's context. Raises `RuntimeError`,
        and changes nothing, if the system can't start a thread.
        """
        encoding = Encoding(self, prompt, num_chars, then)
        if num_chars > LONG_CHARS:
            self._long_chars += num_chars
            self._long.append(encoding)
        else:
            self._short.append(encoding)
        self._wanted[encoding] = None
        self._idle.clear()
        try:
            self._start()
        except RuntimeError:
            self._forget(encoding)
            encoding.cancel()
            raise
        return encoding

    def left(self, encoding: Encoding) -> None:
        """Drop an encoding that no request wants. A running one keeps its thread; a waiting one
        frees its text."""
        if encoding.is_waiting:
            self._forget(encoding)
        self._wanted.pop(encoding, None)
        if not self._wanted:
            self._idle.set()

    def _forget(self, encoding: Encoding) -> None:
        encoding.prompt = None
        if encoding.num_chars > LONG_CHARS:
            self._long_chars -= encoding.num_chars

    def _start(self) -> None:
        """Let every free thread begin with a prompt that it may take."""
        for lane in self._lanes:
            if lane.future is None and (encoding := lane.next_encoding()) is not None:
                encoding.is_waiting = False
                lane.future = self._loop.run_in_executor(lane, encoding.run)
                lane.future.add_done_callback(partial(self._ended, lane, encoding))

    def _ended(self, lane: _Lane, encoding: Encoding, future: asyncio.Future[Encoded]) -> None:
        if future.cancelled():  # by `aclose`
            return
        lane.future = None
        self._forget(encoding)
        self._start()
        if (then := encoding.then) is not None:
            encoding.cancel()
            encoding.context.run(then, future.result())

    async def wait_idle(self) -> None:
        """Wait until no request waits for an encoding."""
        await self._idle.wait()

    def abort_all(self, error: EngineClosedError) -> None:
        """Give `error` to everything that waits for ids. Bypasses the callers' contexts, since a
        thread may have entered one of them."""
        for encoding in list(self._wanted):
            if (then := encoding.then) is not None:
                encoding.cancel()
                then(error)

    async def aclose(self) -> None:
        """End the threads, and all encodings with `EngineClosedError`.

        A running encode is left alone: it touches nothing of the engine, and its thread ends when
        the library returns.
        """
        closed = "the engine was closed before this prompt was encoded"
        self.abort_all(EngineClosedError(closed, state="closed"))
        for lane in self._lanes:
            if lane.future is not None:
                lane.future.cancel()
            if lane.worker is not None:
                lane.worker.end()
                if lane.future is None:
                    await lane.worker.aclose()


class _Lane(Executor):
    """One thread, and the queues that it takes from, in order. It starts with the first call.

    Unlike a `ThreadPoolExecutor`, it doesn't hold up interpreter exit for long.
    """

    def __init__(self, name: str, queues: Sequence[deque[Encoding]]) -> None:
        self.future: asyncio.Future[Encoded] | None = None
        """Encoding that occupies the thread."""
        self.worker: HandlerThread[Any] | None = None
        self._name = name
        self._queues = queues

    def next_encoding(self) -> Encoding | None:
        for waiting in self._queues:
            while waiting:
                encoding = waiting.popleft()
                if encoding.then is not None:
                    return encoding
        return None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.worker is None:
            self.worker = HandlerThread(self._name, _call, exit_seconds=EXIT_SECONDS)
        future: Future[Any] = Future()
        self.worker.put((future, fn, args))
        return future


def _call(entry: tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]) -> None:
    future, fn, args = entry
    if future.set_running_or_notify_cancel():
        future.set_result(fn(*args))
