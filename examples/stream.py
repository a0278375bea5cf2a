"""Stream one answer, token by token, from the model that comes with aioserve."""

import asyncio

from aioserve import Engine


async def main() -> None:
    async with Engine() as engine:
        async for token in engine.stream([{"role": "user", "content": "What does json.dumps do?"}]):
            print(token.text, end="", flush=True)
        print()


asyncio.run(main())
