"""`aioserve run "PROMPT"`: one answer, token by token, on stdout; counts and speed on stderr."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.cli._device_options import DeviceOptions
from aioserve.cli._engine import open_engine, print_start, sampling_params, summary_line
from aioserve.cli._streams import read_prompt
from aioserve.errors import InvalidPromptError, InvalidRequestError
from aioserve.request import SamplingParams

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["run"]


def run(
    prompt: str,
    /,
    *,
    model: str = "pyhelp",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    chat: Annotated[bool | None, Parameter(negative="--raw")] = None,
    system: str | None = None,
    chat_template: str | None = None,
    on: DeviceOptions | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Stream one answer to stdout.

    Options that are not given come from the model's generation_config.json.

    Args:
        prompt: What to answer or complete; "-" reads it from stdin.
        model: A model directory, an embedded model, a hub id in the local cache, or random:30m.
        max_tokens: End after this many tokens.
        temperature: 0 always takes the most likely token; higher is more random.
        top_p: Sample from the smallest set of tokens with this probability in sum.
        top_k: Sample from this many most likely tokens.
        seed: Repeat a sampled answer.
        stop: End before this text; may be given several times.
        chat: Send the prompt as a user message through the chat template (the default for a
            model that has one), or complete it as plain text.
        system: A system message; needs a chat template.
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
        "stop": stop,
    }
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)  # a value out of range is reported before the model is loaded
    if chat is False and system is not None:
        raise InvalidRequestError(
            "--system needs a chat template and can't be used with --raw", argument="system"
        )
    if chat is False and chat_template is not None:
        raise InvalidRequestError(
            "--chat-template has no effect with --raw: leave one of them out",
            argument="chat_template",
        )
    text = read_prompt() if prompt == "-" else prompt
    if not text:
        raise InvalidPromptError("the prompt must not be empty")
    opening = open_engine(
        model,
        on_start=print_start if verbose else None,
        chat_template=chat_template,
        **(on or DeviceOptions()).of_engine(),
    )
    asyncio.run(_stream(text, opening, given, chat=chat, system=system))


async def _stream(
    text: str,
    opening: AbstractAsyncContextManager[Engine],
    given: dict[str, Any],
    *,
    chat: bool | None,
    system: str | None,
) -> None:
    async with opening as engine:
        prompt = _prompt(engine, text, chat=chat, system=system)
        params = sampling_params(engine, **given)
        async with engine.stream(prompt, params) as stream:
            async for token in stream:
                sys.stdout.write(token.text)
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
