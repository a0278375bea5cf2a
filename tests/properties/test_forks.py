"""Trees of branches under scarce pages: each branch has the tokens of a request that began alike.

Readers fork streams and branches at any moment, leave some, and close some before they fork them.
What a branch must bring follows from its tokens so far and its seed alone, computed without pages.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, FinishReason, SamplingParams, Speculation, TokenStream
from aioserve.testing import FakeModel, check_invariants, count_leaked_pages, run_simulated
from aioserve.testing.fake_model import expected_tokens, random_step_seconds
from aioserve.testing.invariants import scribble_free_pages

MAX_MODEL_LEN = 72
MAX_TOKENS = 40
MOST_BRANCHES = 30
SEEDS = 2**64


@dataclass
class Tree:
    """One run: its engine, what is drawn, and what was seen."""

    engine: Engine
    draw: random.Random
    branches: int = 0
    deepest: int = 0
    cached: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)

    async def grow(
        self, stream: TokenStream, begun: list[int], border: int, seed: int, depth: int
    ) -> None:
        """Read a stream whose prompt is `begun`, of which the completion begins at `border`, and
        fork it now and again."""
        draw, head = self.draw, list[int]()
        most = min(MAX_TOKENS - (len(begun) - border), MAX_MODEL_LEN - len(begun))
        expected = expected_tokens(begun, most, seed)
        leave_after = draw.choice([None, None, draw.randrange(most + 1)])
        self.deepest = max(self.deepest, depth)
        async with asyncio.TaskGroup() as group, stream:
            while len(head) != leave_after:
                if draw.random() < 0.15 and len(head) < most:
                    self._fork(group, stream, [*begun, *head], border, seed, depth)
                if draw.random() < 0.1:
                    await asyncio.sleep(draw.random() / 10)
                tokens = await stream.batch(draw.choice([1, 1, 3]))
                if not tokens:
                    break
                for token in tokens:
                    if token.index != len(begun) + len(head) - border:
                        self.wrong.append(f"depth {depth}: index {token.index}")
                    head.append(token.id)
                if leave_after is not None and len(head) > leave_after:
                    break
            self.cached += stream.usage.cached_tokens > 0 and depth > 0
            self.left += stream.finish_reason is None
            if len(head) < most and draw.random() < 0.5:
                stream.close()
                self._fork(group, stream, [*begun, *head], border, seed, depth)
        ended = stream.finish_reason is FinishReason.LENGTH
        if head != expected[: len(head)] or (ended and head != expected):
            self.wrong.append(f"depth {depth}, seed {seed}: {head} and not {expected}")

    def _fork(
        self,
        group: asyncio.TaskGroup,
        stream: TokenStream,
        begun: list[int],
        border: int,
        seed: int,
        depth: int,
    ) -> None:
        count = self.draw.choice([1, 2, 3])
        if self.branches + count > MOST_BRANCHES:
            return
        sampling, first = None, seed
        if self.draw.random() < 0.3:
            first = self.draw.randrange(SEEDS)
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=first)
        if not stream.prompt_token_ids:
            return
        self.branches += count
        for index, branch in enumerate(stream.fork(count, sampling)):
            growing = self.grow(branch, begun, border, (first + index) % SEEDS, depth + 1)
            group.create_task(growing)


def options_of(draw: random.Random) -> dict[str, Any]:
    page_size = draw.choice([1, 2, 4, 16])
    has_host = draw.random() < 0.4
    options = {
        "page_size": page_size,
        "num_pages": int(MAX_MODEL_LEN / page_size * draw.choice([1.25, 2, 5])) + 1,
        "max_num_seqs": draw.choice([3, 4, 16]),
        "max_num_batched_tokens": draw.choice([5, 32, 256]),
        "output_reserve_tokens": draw.choice([0, 0, 8]),
        "overlap": draw.random() < 0.7,
        "max_buffered_tokens": draw.choice([1, 4, 64]),
        "prefix_caching": True,
        "partial_page_reuse": draw.random() < 0.7,
        "num_host_pages": 60 if has_host else 0,
        "preemption": draw.choice(["swap", "auto"]) if has_host else "recompute",
    }
    if draw.random() < 0.3:
        options["speculation"] = Speculation(drafter="ngram:min_ngram=1", max_tokens=3)
    return options


def run(seed: int) -> tuple[Tree, int, int]:
    """One run: its tree, how many preemptions there were, and how many pages are lost."""
    draw = random.Random(seed)
    model = FakeModel(
        max_model_len=MAX_MODEL_LEN, step_seconds=random_step_seconds(0.0, 0.02, seed=seed)
    )
    engine = Engine(model, **options_of(draw))
    tree = Tree(engine, draw)

    async def main() -> int:
        async with engine:
            checking = asyncio.create_task(check())
            async with asyncio.TaskGroup() as group:
                for _ in range(draw.choice([1, 2])):
                    prompt = [draw.randrange(256) for _ in range(draw.randint(1, 20))]
                    first = draw.choice([0, 5, SEEDS - 1])
                    stream = engine.stream(
                        prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=first)
                    )
                    group.create_task(tree.grow(stream, prompt, len(prompt), first, 0))
            checking.cancel()
            await asyncio.wait([checking])
            if not checking.cancelled():
                checking.result()
            await engine.drain()
            check_invariants(engine)
            return engine.stats().preemptions_total

    async def check() -> None:
        while True:
            await asyncio.sleep(0.03)
            check_invariants(engine)
            scribble_free_pages(engine)

    preemptions = run_simulated(main, seed=seed)
    return tree, preemptions, count_leaked_pages(engine)


@given(st.integers(0, 2**32))
def test_branches_of_branches_have_the_tokens_of_requests_that_began_alike(seed: int) -> None:
    tree, _, leaked = run(seed)
    assert tree.wrong == []
    assert leaked == 0


def test_the_trees_are_deep_share_pages_are_left_and_are_preempted() -> None:
    trees, preemptions, leaked = zip(*map(run, range(12)), strict=True)
    assert sum(leaked) == 0
    assert [tree.wrong for tree in trees] == [[]] * len(trees)
    assert max(tree.deepest for tree in trees) >= 3
    assert sum(tree.branches for tree in trees) > 60
    assert sum(tree.cached for tree in trees) > 20
    assert sum(tree.left for tree in trees) > 5
    assert sum(count > 0 for count in preemptions) > 2
