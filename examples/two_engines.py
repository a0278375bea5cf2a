"""Run two engines in one event loop, with 64 streams at once, a third of them left in the
middle.
"""

import asyncio

from aioserve import Engine, SamplingParams


async def read(engine: Engine, number: int) -> None:
    async for token in engine.stream(f"def f{number}(", SamplingParams(max_tokens=48)):
        if number % 3 == 0 and token.index == 4:
            break


async def main() -> None:
    async with Engine() as one, Engine() as two:
        await asyncio.gather(*(read((one, two)[n % 2], n) for n in range(64)))
        await asyncio.gather(one.drain(5), two.drain(5))
        print(one.stats(), two.stats(), sep="\n")


asyncio.run(main())
