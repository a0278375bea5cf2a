"""Requests on a fake model and a simulated loop, with each step taken down: what tests of the books
look at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aioserve import Engine, EngineStats, SamplingParams, TokenStream, Usage
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, check_invariants, run_simulated

__all__ = ["Served", "serve"]


class Served:
    """All that came of some requests."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        """Plans of steps that compute something, in order."""
        self.tokens: list[tuple[int, ...]] = []
        """Token ids of each completion, in the order of the requests."""
        self.usages: list[Usage] = []
        self.stats: list[EngineStats] = []
        """Statistics at each of these steps, and at the end."""

    @property
    def counts(self) -> list[dict[int, int]]:
        """Tokens computed in each step, by request, from 0."""
        return [{item.sequence_id - 1: item.count for item in plan.items} for plan in self.plans]


def serve(
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    *,
    later: dict[int, float] | None = None,
    num_pages: int = 256,
    **options: Any,
) -> Served:
    """Serve prompts that come at once, in their order, or `later`, the last of them, by so many
    seconds. A step takes 0.01 s. Request
    `i` has the seed `i`, so that `expected_tokens(prompt, count, i)` are its tokens."""
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    served = Served()

    async def run() -> None:
        def take_down(plan: StepPlan) -> float:
            if plan.items:
                served.plans.append(plan)
                served.stats.append(engine.stats())
            return 0.01

        model = FakeModel(num_pages=num_pages, max_model_len=4096, step_seconds=take_down)
        options.setdefault("overlap", False)
        async with Engine(model, **options) as engine:

            def submit(number: int) -> TokenStream:
                params = SamplingParams(max_tokens=counts[number], seed=number, ignore_eos=True)
                return engine.stream(list(prompts[number]), params)

            async def read(number: int, stream: TokenStream | None) -> TokenStream:
                if stream is None:
                    await asyncio.sleep(delays[number])
                    stream = submit(number)
                served.tokens[number] = tuple([token.id async for token in stream])
                return stream

            delays = later or {}
            served.tokens = [()] * len(prompts)
            streams = [
                None if number in delays else submit(number) for number in range(len(prompts))
            ]
            ended = await asyncio.gather(*map(read, range(len(prompts)), streams))
            served.usages += [stream.usage for stream in ended]
            served.stats.append(engine.stats())
            check_invariants(engine)

    run_simulated(run)
    return served
