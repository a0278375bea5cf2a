"""`aioserve chat MODEL`: a conversation in the terminal.

Ctrl-C stops an answer that is being written and keeps its text. At the prompt it leaves, like
Ctrl-D.

Each read of a line has a daemon thread of its own. Nothing can wake a thread that waits for a key,
and it must not keep the program from ending. With a terminal on both sides the line can be edited
(readline). Otherwise bytes are read unbuffered: a thread inside a buffered stdin would abort the
interpreter's shutdown.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.cli._engine import Opening, RunOptions, given_params, opening, summary_line
from aioserve.cli._streams import answer_text, decoded
from aioserve.errors import AioserveError, InvalidPromptError, InvalidRequestError
from aioserve.request import SamplingParams

if TYPE_CHECKING:
    from aioserve import Engine

try:
    import termios
except ImportError:  # not a POSIX system: there are no terminal settings to restore
    termios = None


__all__ = ["chat", "converse"]

MAX_LINE_BYTES = 1 << 20
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
    on: RunOptions | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Talk to a model in turns; /help lists the commands.

    Args:

        model: A model directory, a GGUF file, an embedded model (pyhelp), or a hub id, which is
            downloaded unless it is in the local cache.
        system: The system message.
        max_tokens: End each answer after this many tokens.
        temperature: 0 always takes the most likely token; higher is more random.
        top_p: Sample from the smallest set of tokens whose probabilities sum to this.
        top_k: Sample from this many most likely tokens.
        seed: Repeat sampled answers.
        chat_template: A file with a chat template, in place of the model's own.
        on: Device options of the model.
        verbose: Print on stderr how long each part of the start took.
    """
    given = given_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    asyncio.run(converse(opening(model, given, on, chat_template, verbose), system))


async def converse(opening: Opening, system: str | None) -> None:
    """Answer lines until there are no more.

    Raises `InvalidRequestError` for a model without a chat template.
    """
    with LinePrompt() as prompt:
        async with opening.engine as engine:
            engine.tokenizer  # noqa: B018  # raises for a model without one, which has no template
            if not engine.has_chat_template:
                raise InvalidRequestError(
                    f"{opening.model} has no chat template: type a prompt behind it, as in "
                    f'aioserve run {shlex.quote(opening.model)} "...", which completes it, or give '
                    "a template with --chat-template FILE",
                    argument="model",
                    value=opening.model,
                )
            conversation = _Conversation(engine, system, opening.params(engine))
            with _Interrupts() as interrupts:
                while (line := await interrupts.stoppable(prompt.read("> "))) is not None:
                    if line.startswith("/"):
                        if not conversation.command(line):
                            break
                    elif line.strip():
                        await interrupts.stoppable(conversation.turn(line))


class _Interrupts:
    """Ctrl-C cancels the task that is being waited for, not the program."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> _Interrupts:
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)

    async def stoppable(self, work: Any) -> Any:
        """Return the result of a coroutine; None if Ctrl-C ended it."""
        self._task = task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
        finally:
            self._task = None
            task.cancel()  # only has an effect if this program itself is being cancelled
        return None if task.cancelled() else task.result()

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Conversation:
    """Messages so far, and the exchange of one more turn."""

    def __init__(self, engine: Engine, system: str | None, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
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
                    sys.stdout.write(answer_text(token.text))
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


class LinePrompt:
    """Reader of lines that a person types. On exit it restores the terminal's
    settings.
    """

    def __init__(self) -> None:
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._settings: list[Any] | None = None

    def __enter__(self) -> LinePrompt:
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (importing it gives input() line editing)
            if termios is not None:
                self._settings = termios.tcgetattr(sys.stdin)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A read that was abandoned by Ctrl-C leaves the terminal in readline's raw mode.
        if self._settings is not None and termios is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    async def read(self, prompt: str) -> str | None:
        """Return the next line without its end; None at the end of input (Ctrl-D).

        Raises `InvalidPromptError` for a line that is too long or no text.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str | None] = loop.create_future()

        def deliver(line: str | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is None:
                result.set_result(line)
            else:
                result.set_exception(error)

        def work() -> None:
            line, error = None, None
            try:
                line = self._read(prompt)
            except BaseException as caught:
                error = caught
            _call_in(loop, deliver, line, error)

        threading.Thread(target=work, name="aioserve-prompt", daemon=True).start()
        try:
            return await result
        except asyncio.CancelledError:
            print(file=sys.stderr)
            raise

    def _read(self, prompt: str) -> str | None:
        if not self._interactive:
            return _read_unbuffered(sys.stdin.fileno())
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            return decoded(error.object, error.encoding, "line")  # raises the named error


def _read_unbuffered(descriptor: int) -> str | None:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise InvalidPromptError(
                f"the line on stdin must have at most {MAX_LINE_BYTES} bytes, got more"
            )
    return None if not line and not byte else decoded(line, sys.stdin.encoding, "line")


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # the loop closed while the person was typing
        loop.call_soon_threadsafe(function, *args)
