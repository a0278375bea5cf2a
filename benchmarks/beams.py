"""Counts the KV pages that a beam search has in use, against copies of what its beams read.

The embedded model runs a beam search for a prompt of `--prompt-tokens` random ids. For every step
that computes all beams, it counts the distinct pages of all beams, and the pages if each had its
own. It also counts the prompts' computed tokens, and those found in the cache.

At last it counts, over `--questions` of the embedded model's questions, the beams that are one of
the round before with its likeliest token. It counts the rounds in which all beams are, too. Draft
tokens can save no more than these.

    python benchmarks/beams.py
    python benchmarks/beams.py --beam-width 8 --prompt-tokens 100 --max-tokens 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple
from unittest.mock import patch

import msgspec

from aioserve import Engine
from aioserve.assets import model_path
from aioserve.config import EngineConfig
from aioserve.engine import beam_search
from aioserve.execution import loading
from aioserve.execution.runner import LoadedModel, Runner
from aioserve.paging.pages import pages_for
from aioserve.request import TopLogprob
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.plan import StepPlan


class CountingRunner:
    """Runner that remembers for each step which pages its sequences read."""

    def __init__(self, runner: Runner, page_size: int, num_slots: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._tables = SlotPageTables(num_slots)
        self.steps: list[list[list[int]]] = []
        """Pages by step and item."""

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        self._tables.take(plan)
        named = [(item.slot, pages_for(item.end, self._page_size)) for item in plan.items]
        self.steps.append([self._tables.page_ids(slot)[:count].tolist() for slot, count in named])
        return self._runner.launch(plan, masks)

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._runner.wake_delays_seconds

    async def aclose(self) -> None:
        await self._runner.aclose()


class Counted:
    """Embedded model with a `CountingRunner`."""

    runner: CountingRunner

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await loading.load("pyhelp", config, num_slots=num_slots)
        self.runner = CountingRunner(loaded.runner, config.page_size, num_slots)
        return msgspec.structs.replace(loaded, runner=self.runner)


class WatchedBeams(beam_search.Beams):
    """Beams that count how they go on, over all searches."""

    beams = likeliest = rounds = all_likeliest = 0

    def advance(self, candidates: Sequence[Iterable[TopLogprob]]) -> None:
        tops = [list(tokens) for tokens in candidates]
        tokens = [max(top, key=attrgetter("logprob")).id for top in tops]
        told = {(*beam.token_ids, id) for beam, id in zip(self.running, tokens, strict=True)}
        super().advance(tops)
        if not self.running or self.num_tokens == 1:  # the first round has only the empty beam
            return
        found, kind = sum([beam.token_ids in told for beam in self.running]), WatchedBeams
        kind.beams += len(self.running)
        kind.likeliest += found
        kind.rounds += 1
        kind.all_likeliest += found == len(self.running)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beam-width", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--questions", type=int, default=40)
    options = parser.parse_args()
    asyncio.run(search(options))
    with patch.object(beam_search, "Beams", WatchedBeams):
        asyncio.run(ask(options))


class Pages(NamedTuple):
    """Pages that the beams of a search name, counted in each step that computes all of them."""

    shared: list[int]
    """Distinct pages."""
    copies: list[int]
    """The same with a copy for each beam."""
    seconds: float
    computed_tokens: int
    cached_tokens: int


async def search(options: argparse.Namespace) -> None:
    pages = await count_pages(options)
    print("| pages of all beams in a step | shared | as copies | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name, of in (("mean", lambda counts: sum(counts) / len(counts)), ("most", max)):
        ratio = of(pages.copies) / of(pages.shared)
        print(f"| {name} | {of(pages.shared):.1f} | {of(pages.copies):.1f} | {ratio:.2f} |")
    print()
    print(f"{len(pages.shared)} steps with {options.beam_width} beams, {pages.seconds:.2f} s")
    print(f"{pages.computed_tokens} tokens computed, {pages.cached_tokens} found in the cache")


async def count_pages(options: argparse.Namespace) -> Pages:
    """One search of the embedded model, of a random prompt."""
    model = Counted()
    source = random.Random(0)
    async with Engine(model, page_size=options.page_size, num_pages=4096) as engine:
        vocab_size = engine.limits.vocab_size
        prompt = [source.randrange(vocab_size) for _ in range(options.prompt_tokens)]
        started = time.perf_counter()
        await engine.beam_search(
            prompt,
            beam_width=options.beam_width,
            max_tokens=options.max_tokens,
            ignore_eos=True,
            early_stopping="never",
        )
        seconds = time.perf_counter() - started
        stats = engine.stats()
    full = [step for step in model.runner.steps if len(step) == options.beam_width]
    return Pages(
        [len({page for pages in step for page in pages}) for step in full],
        [sum([len(pages) for pages in step]) for step in full],
        seconds,
        stats.tokens_prefilled_total,
        stats.tokens_cached_total,
    )


async def ask(options: argparse.Namespace) -> None:
    directory = model_path("pyhelp")
    assert directory is not None
    pairs = json.loads((directory / "questions.json").read_text(encoding="utf-8"))
    async with Engine("pyhelp") as engine:
        for question, _ in pairs[: options.questions]:
            prompt = await engine.encode([{"role": "user", "content": question}])
            await engine.beam_search(
                prompt, beam_width=options.beam_width, max_tokens=options.max_tokens
            )
    watched = WatchedBeams
    print(
        f"{watched.likeliest / watched.beams:.2f} of beams had their likeliest token, and all of "
        f"them in {watched.all_likeliest / watched.rounds:.2f} of {watched.rounds} rounds"
    )


if __name__ == "__main__":
    main()
