"""The token ids of a prompt for their own sake: encoded as a request's are, and not queued."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from aioserve.arguments import boolean, check
from aioserve.engine.encoding import BareText
from aioserve.engine.intake import ChatArguments, Intake, Prompt
from aioserve.errors import InvalidPromptError, InvalidRequestError
from aioserve.execution.answers import settle

__all__ = ["ids_of_prompt"]


async def ids_of_prompt(
    intake: Intake, prompt: Prompt, chat: ChatArguments, *, add_special_tokens: bool
) -> list[int]:
    """Raises what `Engine.stream` says of a prompt, `QueueFullError`, and `EngineClosedError` where
    the engine is closed meanwhile. Cancelled, a prompt that waits for a thread is forgotten."""
    check(InvalidPromptError, "add_special_tokens", add_special_tokens, boolean)
    checked = intake.checked_prompt(prompt, chat)
    if not isinstance(checked, str) and not add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens=False goes with text alone: messages are framed by their template",
            argument="add_special_tokens",
            value=False,
        )
    if isinstance(checked, np.ndarray):
        return checked.tolist()
    num_chars = len(checked) if isinstance(checked, str) else checked.num_chars
    intake.encoder.check_room(num_chars)
    encoded: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    if isinstance(checked, str) and not add_special_tokens:
        checked = BareText(checked)
    encoding = intake.encoder.submit(checked, num_chars, partial(settle, encoded))
    try:
        return list(await encoded)
    finally:
        encoding.cancel()
