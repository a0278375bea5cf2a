"""Custom scheduling policy: short prompts first, without starving the long ones.

A prompt's rank is its length less the work that the engine has done since it arrived. So short ones
overtake a prompt of 2,000 tokens for at most about 2,000 tokens of work.
"""

import asyncio
from collections.abc import Iterable, Sequence

from aioserve import Engine, RequestView, SamplingParams, SchedulerView, SchedulingPolicy


class ShortestPromptFirst(SchedulingPolicy):
    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        def rank(request: RequestView) -> int:
            waited = view.processed_tokens - request.arrival_processed_tokens
            return request.uncached_tokens - waited

        return sorted(waiting, key=rank)


async def main() -> None:
    prompts = {"long": "x = 1\n" * 60, "middle": "x = 1\n" * 20, "short": "x = 1\n"}
    finished: list[str] = []

    async def read(name: str, engine: Engine) -> None:
        await engine.generate(prompts[name], SamplingParams(max_tokens=8, ignore_eos=True))
        finished.append(name)

    # One sequence at a time, so that the order is visible.
    async with Engine(policy=ShortestPromptFirst(), max_num_seqs=1) as engine:
        await asyncio.gather(*(read(name, engine) for name in prompts))
    print("finished in this order:", ", ".join(finished))


asyncio.run(main())
