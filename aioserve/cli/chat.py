"""`aioserve chat MODEL`: a conversation in the terminal.

Ctrl-C stops an answer that is being written and keeps what was said; at the prompt it leaves, as
Ctrl-D does.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.cli._device_options import DeviceOptions
from aioserve.cli._engine import open_engine, print_start, sampling_params, summary_line
from aioserve.cli._prompt import LinePrompt
from aioserve.errors import AioserveError, InvalidRequestError
from aioserve.request import SamplingParams

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["chat", "converse"]

HELP = """\
/reset        forget the conversation
/system TEXT  set the system message; without TEXT, remove it
/help         show this
/exit         leave, like Ctrl-D; Ctrl-C stops an answer"""


def chat(
    model: str = "pyhelp",
    /,
    *,
    system: str | None = None,
    chat_template: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    on: DeviceOptions | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Talk to a model in turns; /help lists the commands.

    Args:
        model: A model directory, an embedded model (pyhelp), or a hub id, which is downloaded where
            it isn't in the local cache.
        system: The system message.
        max_tokens: End each answer after this many tokens.
        temperature: 0 always takes the most likely token; higher is more random.
        top_p: Sample from the smallest set of tokens with this probability in sum.
        top_k: Sample from this many most likely tokens.
        seed: Repeat sampled answers.
        chat_template: A file with a chat template, in place of the model's own.
        on: Where the model runs.
        verbose: Say on stderr what the start took, by part.
    """
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)  # a value out of range is reported before the model is loaded
    opening = open_engine(
        model,
        on_start=print_start if verbose else None,
        chat_template=chat_template,
        **(on or DeviceOptions()).of_engine(),
    )
    asyncio.run(converse(model, opening, system, given))


async def converse(
    model: str,
    opening: AbstractAsyncContextManager[Engine],
    system: str | None,
    given: dict[str, Any],
) -> None:
    """Answer lines until there are no more. `given` are sampling parameters by name.

    Raises `InvalidRequestError` for a model without a chat template.
    """
    with LinePrompt() as prompt:
        async with opening as engine:
            engine.tokenizer  # noqa: B018  # raises for a model without one, which has no template
            if not engine.has_chat_template:
                raise InvalidRequestError(
                    f"{model} has no chat template: type a prompt behind it, as in "
                    f'aioserve run {shlex.quote(model)} "..."',
                    argument="model",
                    value=model,
                )
            conversation = _Conversation(engine, system, given)
            with _Interrupts() as interrupts:
                while (line := await interrupts.stoppable(prompt.read("> "))) is not None:
                    if line.startswith("/"):
                        if not conversation.command(line):
                            break
                    elif line.strip():
                        await interrupts.stoppable(conversation.turn(line))


class _Interrupts:
    """Ctrl-C cancels the one thing that is being waited for, not the program."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> _Interrupts:
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)

    async def stoppable(self, work: Any) -> Any:
        """The result of a coroutine; None when Ctrl-C ended it."""
        self._task = task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
        finally:
            self._task = None
            task.cancel()  # only does something when this program itself is being cancelled
        return None if task.cancelled() else task.result()

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Conversation:
    """The messages so far, and how one more turn goes."""

    def __init__(self, engine: Engine, system: str | None, given: dict[str, Any]) -> None:
        self._engine = engine
        self._params = sampling_params(engine, **given)
        self._system = system
        self._messages: list[dict[str, str]] = []

    def command(self, line: str) -> bool:
        """Obey a line that starts with a slash; False ends the chat."""
        name, _, rest = line.strip().partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self._messages.clear()
            _note("the conversation is forgotten")
        elif name == "/system":
            self._system = rest.strip() or None
            _note("system message set" if self._system else "no system message")
        elif name == "/help":
            _note(HELP)
        else:
            _note(f"unknown command {name}; /help lists them")
        return True

    async def turn(self, text: str) -> None:
        """Send one user message and write the answer as it comes."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        try:
            async with self._engine.stream(system + asked, self._params) as stream:
                async for token in stream:
                    answer += token.text
                    sys.stdout.write(token.text)
                    sys.stdout.flush()
            sys.stdout.write("\n")
            _note(summary_line(stream.usage, stream.timings, stream.finish_reason))
        except asyncio.CancelledError:
            sys.stdout.write("\n")
            _note("[stopped]")
            raise
        except AioserveError as error:
            _note(f"aioserve: {error}")
        finally:
            # A turn without an answer is forgotten: templates expect the roles to alternate.
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]


def _note(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
