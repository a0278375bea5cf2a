"""A tree of thought: three ways to write each next line, of which the two likeliest go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aioserve import Engine, SamplingParams, TokenStream

PROMPT = "import json\n\n\ndef load(path):\n"
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=200, logprobs=0, ignore_eos=True)
DEPTH, WAYS, KEPT = 3, 3, 2


@dataclass
class Thought:
    stream: TokenStream
    line: str = ""
    logprob: float = 0.0
    num_tokens: int = 0
    branches: list[Thought] = field(default_factory=list)

    async def think(self) -> None:
        """Read one line."""
        async with self.stream:
            async for token in self.stream:
                self.line += token.text
                self.logprob += token.logprob or 0.0
                self.num_tokens += 1
                if "\n" in token.text and self.line.strip():
                    break

    @property
    def value(self) -> float:
        """Log-probability per token."""
        return self.logprob / self.num_tokens

    def draw(self, indent: str = "") -> None:
        """Print the tree below, with the tokens that each branch found in the cache."""
        for place, thought in enumerate(self.branches, 1):
            is_last = place == len(self.branches)
            usage = thought.stream.usage
            print(
                f"{indent}{'└' if is_last else '├'}── {thought.line.strip()!r:.36} "
                f"{thought.value:.2f}, {usage.cached_tokens} of {usage.prompt_tokens} cached"
            )
            thought.draw(indent + ("    " if is_last else "│   "))


async def main() -> None:
    async with Engine("pyhelp", page_size=4) as engine:
        root = Thought(engine.stream(PROMPT, PARAMS))
        await root.stream.started()
        level = [root]
        for _ in range(DEPTH):
            for thought in level:
                thought.branches = [Thought(branch) for branch in thought.stream.fork(WAYS)]
            every = [one for thought in level for one in thought.branches]
            await asyncio.gather(*[one.think() for one in every])
            level = sorted(every, key=lambda one: one.value, reverse=True)[:KEPT]
        root.stream.close()
        print(repr(PROMPT))
        root.draw()
        print(
            f"{engine.stats().tokens_prefilled_total} prompt tokens computed, "
            f"{engine.stats().tokens_cached_total} found in the cache"
        )


if __name__ == "__main__":
    asyncio.run(main())
