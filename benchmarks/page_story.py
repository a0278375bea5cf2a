"""The page story of "Mini SGLang (Part 1)": requests at one token to a page, step by step.

Three requests, one after the other: a prompt of 16 tokens, the same again, and one that has its
first 12 tokens. Each asks for 16 tokens. A fake model computes them, so nothing depends on the
machine; scheduler, pages and prefix tree are the engine's.

    python benchmarks/page_story.py
"""

from __future__ import annotations

from aioserve import Engine, SamplingParams
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, run_simulated

__all__ = ["Told", "main", "tell"]

PROMPT = list(range(1, 17))
OUTPUT_TOKENS = 16
REQUESTS = {
    "first request": PROMPT,
    "second request, the same prompt": PROMPT,
    "third request, 12 tokens in common": [*PROMPT[:12], 50, 51, 52, 53],
}


class Told:
    """One request: what its steps did, and the pages afterwards."""

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.steps: list[tuple[int, int, int, int]] = []
        """Number, tokens computed, pages that the request holds and free pages of each step."""
        self.found: int = 0
        """Prompt tokens whose pages the prefix tree had."""
        self.computed: int = 0
        """Prompt tokens that were computed."""
        self.cached_pages: int = 0
        """Pages that the prefix tree holds when the request has ended."""
        self.free_pages: int = 0


async def tell(num_pages: int = 64) -> list[Told]:
    """Serve the requests one by one, and tell of each."""
    story: list[Told] = []

    def take_down(plan: StepPlan) -> float:
        stats = engine.stats()
        tokens = sum(item.count for item in plan.items)
        held = stats.pages_held_by_requests
        if plan.items:
            story[-1].steps.append((plan.step, tokens, held, stats.pages_free))
        return 0.01

    model = FakeModel(num_pages=num_pages, step_seconds=take_down)
    async with Engine(model, page_size=1, overlap=False) as engine:
        for name, prompt in REQUESTS.items():
            story.append(Told(name))
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, ignore_eos=True)
            completion = await engine.generate(prompt, params)
            stats = engine.stats()
            told = story[-1]
            told.found = completion.usage.cached_tokens
            told.computed = len(prompt) - told.found
            told.cached_pages, told.free_pages = stats.pages_cached, stats.pages_free
    return story


def lines(told: Told) -> list[str]:
    """One request in words."""
    (_, tokens, held, free), *others = told.steps
    _, _, last_held, last_free = others[-1]
    last = 1 + len(others)
    return [
        told.name,
        f"  the prefix tree has {told.found} of 16 tokens; {told.computed} to compute",
        f"  step 1       computes {tokens:2}     holds {held} pages   {free} free",
        f"  steps 2-{last}   compute 1 each  holds {last_held} pages   {last_free} free",
        f"  ended        the tree has {told.cached_pages} pages        {told.free_pages} free",
    ]


def main() -> None:
    for told in run_simulated(tell):
        print("\n".join(lines(told)))


if __name__ == "__main__":
    main()
