"""An engine for programs without an event loop: scripts and notebooks.

    with LLM("pyhelp") as llm:
        for completion in llm.generate(["import os\\n", "import sys\\n"]):
            print(completion.text)

Each call runs on an event loop in a thread of this object's own, and waits for its end. Several
threads may call at once: their requests share steps.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from aioserve.engine.batches import Progress
from aioserve.engine.chat_stream import ChatCompletion
from aioserve.engine.engine import Engine
from aioserve.engine.engine_arguments import DEFAULT_MODEL, EngineArguments, takes_arguments
from aioserve.engine.options import (
    STREAM_DEFAULTS,
    StreamOptions,
    takes,
)
from aioserve.engine.prompts import Prompt
from aioserve.errors import EngineClosedError
from aioserve.request import Completion, SamplingParams
from aioserve.text.messages import Message

__all__ = ["LLM"]

T = TypeVar("T")


class LLM:
    """An `Engine` that is called without `await`. It takes what `Engine` takes, and loads at once.

    Raises what making and entering an engine raise. After its end, calls raise `EngineClosedError`.
    If an exception like Ctrl-C's interrupts a call, its requests are cancelled. `close`, or the end
    of `with`, ends everything. An unclosed object ends with the program, or when it is collected.
    """

    @takes_arguments(EngineArguments)
    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        self.engine: Engine = Engine(model, **options)
        """The underlying engine, for further calls. They belong on its own event loop."""
        self._thread = _LoopThread()
        self._close = weakref.finalize(self, _close, self.engine, self._thread)
        try:
            self._thread.call(self.engine.__aenter__())
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every request, and the thread. May be called again."""
        self._close()

    def __repr__(self) -> str:
        return f"LLM({self.engine!r})"

    # Python keeps all overloads forever, and with them this module and everything it holds.
    if TYPE_CHECKING:

        @overload
        def generate(
            self,
            prompt: Prompt,
            params: SamplingParams | None = None,
            **options: Unpack[StreamOptions],
        ) -> Completion: ...
        @overload
        def generate(
            self,
            prompt: Sequence[Prompt],
            params: SamplingParams | Sequence[SamplingParams] | None = None,
            *,
            progress: Progress = None,
            **options: Unpack[StreamOptions],
        ) -> list[Completion]: ...

    @takes(StreamOptions, STREAM_DEFAULTS)
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress = None,
        **options: Unpack[StreamOptions],
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or a list of completions of several, with a progress
        bar.

        Arguments and errors are those of `Engine.generate`.
        """
        generate = cast("Any", self.engine.generate)
        return self._thread.call(generate(prompt, params, progress=progress, **options))

    def chat(self, messages: Sequence[Message], **options: Any) -> ChatCompletion:
        """Return the answer to messages, with its reasoning and tool calls: see `Engine.chat`."""

        async def chat() -> ChatCompletion:
            return await self.engine.chat(messages, **options).completion()

        return self._thread.call(chat())

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> npt.NDArray[np.float32]:
        """Return vectors of prompts: see `Engine.embed`."""
        return self._thread.call(self.engine.embed(prompts, **options))


class _LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aioserve-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. An exception that ends the wait,
        such as KeyboardInterrupt, cancels it."""
        if self.loop.is_closed():
            coroutine.close()
            raise EngineClosedError("this LLM is closed", state="closed")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("an LLM can't be called on its own thread: await its engine there")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, and end the thread.

        Both happen later if the garbage collector calls this on the thread itself.
        """

        async def end() -> None:
            try:
                await ending
            finally:
                self.loop.stop()

        if threading.current_thread() is self._thread:
            self._ending = self.loop.create_task(end())
            return
        asyncio.run_coroutine_threadsafe(end(), self.loop)
        self._thread.join()


def _close(engine: Engine, thread: _LoopThread) -> None:
    """Close the engine and its thread. Holds no reference to the `LLM`, which may be gone."""
    thread.close(engine.__aexit__(None, None, None))
