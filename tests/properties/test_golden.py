"""The golden property: the tokens of a request don't depend on how they were computed.

Whole engines on a simulated loop, under every combination of policy, page size, chunk size,
overlap, prefix cache, partial pages, host pool and preemption. Pools are so small that most runs
preempt. The fake model's tokens depend only on the prompt and the seed, so all runs must give
those.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, SamplingParams, SchedulingPolicy, Verdict
from aioserve.testing import FakeModel, expected_tokens, run_simulated
from tests.tiers import examples

MAX_MODEL_LEN = 48
LONG_PROMPT = [(i * i) % 256 for i in range(MAX_MODEL_LEN)]


class Shuffled(SchedulingPolicy):
    """Any order, chunks of any size, any victim; any request may displace any other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def order(self, waiting, view):
        return self.random.sample(waiting, len(waiting))

    def admit(self, request, view):
        return self.random.choice([Verdict.NOW, Verdict.LATER])

    def chunk(self, request, budget_tokens, view):
        return self.random.randint(0, budget_tokens)

    def victim(self, running, need_pages, view):
        return self.random.choice(running)

    def precedence(self, request):
        return self.random.randint(-2, 2)

    def displaces(self, request, running, view):
        return self.random.sample(running, self.random.randint(0, len(running)))


requests = st.tuples(
    st.integers(1, 30),
    st.lists(st.integers(0, 1), max_size=3),
    st.integers(1, 12),
    st.sampled_from([1, 1, 1, 3]),
    st.sampled_from([None, None, "a"]),
    st.integers(-1, 1),
)
engines = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 16, 64]),
        "max_num_batched_tokens": st.sampled_from([1, 5, 64]),
        "max_num_seqs": st.integers(3, 8),
        "output_reserve_tokens": st.sampled_from([0, 8]),
        "overlap": st.booleans(),
        "prefix_caching": st.booleans(),
        "partial_page_reuse": st.booleans(),
        "num_host_pages": st.sampled_from([0, 4, 60]),
        "eviction": st.sampled_from(["lru", "lfu", "fifo", "slru"]),
    }
)


async def serve(options, batch, spare_pages, whim):
    num_pages = -(-MAX_MODEL_LEN // options["page_size"]) + spare_pages
    if options["num_host_pages"]:
        options = {**options, "preemption": "swap"}
    if not options["prefix_caching"]:
        options = {**options, "eviction": "lru"}
    policy = whim if isinstance(whim, str) else Shuffled(whim)
    model = FakeModel(num_pages=num_pages, max_model_len=MAX_MODEL_LEN)
    async with Engine(model, policy=policy, **options) as engine:
        answers = await asyncio.gather(
            *(
                engine.generate(
                    [*LONG_PROMPT[:length], *tail],
                    SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, seed=7),
                    cache_salt=salt,
                    priority=priority,
                )
                for length, tail, max_tokens, n, salt, priority in batch
            )
        )
    return [[list(sample.token_ids) for sample in answer.samples] for answer in answers]


@settings(max_examples=examples(100), deadline=None)
@given(
    options=engines,
    batch=st.lists(requests, min_size=1, max_size=8),
    spare_pages=st.integers(0, 6),
    whim=st.sampled_from(["fcfs", "priority"]) | st.integers(0, 100),
    seed=st.integers(0, 2**16),
)
def test_answers_depend_on_the_prompt_and_the_seed_alone(options, batch, spare_pages, whim, seed):
    answers = run_simulated(lambda: serve(options, batch, spare_pages, whim), seed=seed)

    assert answers == [
        [expected_tokens([*LONG_PROMPT[:length], *tail], count, 7 + i) for i in range(n)]
        for length, tail, count, n, *_ in batch
    ]
