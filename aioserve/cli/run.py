"""`aioserve run MODEL "PROMPT"`: one completion, token by token, on stdout; counts and speed on
stderr.

A missing prompt is read from stdin. If stdin is a terminal, a chat begins instead.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from aioserve.cli._engine import Opening, RunOptions, given_params, opening, summary_line
from aioserve.cli._models import check_first_word
from aioserve.cli._streams import answer_text, read_prompt
from aioserve.cli.chat import converse
from aioserve.errors import InvalidPromptError, InvalidRequestError

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["run"]


def run(
    model: str,
    prompt: str | None = None,
    /,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    chat: Annotated[bool | None, Parameter(negative="--raw")] = None,
    system: str | None = None,
    chat_template: str | None = None,
    on: RunOptions | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Stream one completion to stdout; without a prompt, talk to the model in turns.

    Options that are not given come from the model's generation_config.json, or its GGUF file.

    Args:

        model: A model directory, a GGUF file, an embedded model (pyhelp), random:30m, or a hub id,
            which is downloaded unless it is in the local cache.
        prompt: Text to answer or complete; "-" reads it from stdin. Not given: stdin, or a
            conversation if stdin is a terminal. A prompt that begins with a hyphen comes after
            "--".
        max_tokens: End after this many tokens.
        temperature: 0 always takes the most likely token; higher is more random.
        top_p: Sample from the smallest set of tokens whose probabilities sum to this.
        top_k: Sample from this many most likely tokens.
        seed: Repeat a sampled answer.
        stop: End before this text; may be given several times.
        chat: Send the prompt as a user message through the chat template (the default for a
            model that has one), or complete it as plain text.
        system: A system message; needs a chat template.
        chat_template: A file with a chat template, in place of the model's own.
        on: Device options of the model.
        verbose: Print on stderr how long each part of the start took.
    """
    given = given_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    if chat is False and system is not None:
        raise InvalidRequestError(
            "--system needs a chat template and can't be used with --raw", argument="system"
        )
    if chat is False and chat_template is not None:
        raise InvalidRequestError(
            "--chat-template has no effect with --raw: leave one of them out",
            argument="chat_template",
        )
    check_first_word(model, prompt)
    opened = opening(model, given, on, chat_template, verbose)
    if prompt is None and sys.stdin.isatty():
        if chat is False:
            raise InvalidRequestError("--raw needs a prompt", argument="prompt")
        asyncio.run(converse(opened, system))
        return
    asyncio.run(_stream(_text(prompt), opened, chat=chat, system=system))


def _text(prompt: str | None) -> str:
    """Return the prompt itself, or the text on stdin."""
    is_read = prompt is None or prompt == "-"
    text = read_prompt() if is_read else prompt
    if not text:
        where = "the prompt on stdin" if is_read else "the prompt"
        raise InvalidPromptError(f"{where} must not be empty")
    return text


async def _stream(text: str, opened: Opening, *, chat: bool | None, system: str | None) -> None:
    async with opened.engine as engine:
        if chat is None and system is None and not engine.has_chat_template:
            print(
                f"aioserve: {opened.model} has no chat template: the prompt is completed as it is. "
                "--chat-template FILE gives it one; --raw completes without this line",
                file=sys.stderr,
                flush=True,
            )
        prompt = _prompt(engine, text, chat=chat, system=system)
        async with engine.stream(prompt, opened.params(engine)) as stream:
            async for token in stream:
                sys.stdout.write(answer_text(token.text))
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(summary_line(stream.usage, stream.timings, stream.finish_reason), file=sys.stderr)


def _prompt(
    engine: Engine, text: str, *, chat: bool | None, system: str | None
) -> str | list[dict[str, str]]:
    if chat is None:
        chat = engine.has_chat_template or system is not None
    if not chat:
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages
