"""Runs an engine with a fake model that has answers, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aioserve import Engine, SamplingParams
from aioserve.testing import FakeModel, run_simulated
from tests.engine.idle import all_given_back

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "climate")
]
OSLO = {"name": "weather", "arguments": {"city": "Oslo \u00c5 \U0001f30d"}}


def served(
    model: FakeModel, main: Callable[[Engine], Any], *, seed: int | None = 0, **options: Any
) -> Any:
    """Return the result of `main` with an engine, and check that the engine then has nothing left
    to do.

    The loop is simulated. With `seed=None` it is one of asyncio's own, on which forms are compiled.
    """

    async def running() -> Any:
        async with Engine(model, **options) as engine:
            result = await main(engine)
            assert await all_given_back(engine)
            return result

    return asyncio.run(running()) if seed is None else run_simulated(running, seed=seed)


def asked(
    model: FakeModel, *prompts: Any, params: SamplingParams | None = None, **options: Any
) -> list[Any]:
    """Answers' texts, or errors, of requests that come one after the other."""

    async def main(engine: Engine) -> list[Any]:
        found: list[Any] = []
        for prompt in prompts:
            try:
                completion = await engine.generate(prompt, params)
            except Exception as error:
                found.append(error)
            else:
                found.append(completion.text)
        return found

    return served(model, main, **options)
