"""The simulator against a whole engine.

If steps take what the cost model says, both give each request's first and last token at the same
time. Each step has as many pages held and cached in both. The engine runs on an event loop with a
virtual clock. Nothing is left to chance but the order in which its tasks run.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import Engine, SamplingParams, TokenStream
from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ExpertsShape, ModelShape
from aioserve.paging.pages import pages_of_sequence
from aioserve.plugins import PluginRegistry
from aioserve.simulation.cost import CostModel
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, expected_tokens, run_simulated
from aioserve.traces.trace_request import TraceRequest
from tests.tiers import examples

PAGE_SIZE = 4
MAX_MODEL_LEN = 1000
POLICIES = ("fcfs", "round_robin:chunk_size=5", "cache_aware", "shortest_first")


class OddCost:
    """No two different steps take the same time, and none ends when a request comes."""

    def step_seconds(self, plan: StepPlan) -> float:
        context = sum(item.start for item in plan.items)
        return 1.0 + plan.num_tokens / 97 + len(plan.items) / 1013 + context / 10007


MIXTURE = RooflineCost(
    ModelShape(
        layer_params=701,
        head_params=101,
        num_layers=6,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        experts=(ExpertsShape(num_layers=5, num_experts=8, experts_per_token=2, expert_params=31),),
        windows=(8, 8, 8, 8),
    ),
    Hardware("odd", 20_011.0, 10_007.0, 10**9, 1.0, 1.0, 1.0),
    layers_per_page=2,
)
LAYOUTS = ((0, 0), (1, 3), (2, 8), (5, 5))
"""Window groups, and how many tokens they keep."""
LONGEST = 48
"""Tokens of the longest prompt and answer, or more."""
WINDOWS = ("num_window_groups", "window")


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Draw up to ten requests, some at the same moment, some that begin alike."""
    arrivals = draw(st.lists(st.sampled_from([0.0, 0.513, 2.017, 9.031, 50.1]), max_size=10))
    requests = []
    for number, arrival in enumerate(sorted(arrivals)):
        first, blocks = draw(st.integers(0, 2)) * 10, draw(st.integers(0, 6))
        answer = draw(st.integers(1, 20))
        requests.append(
            TraceRequest(
                number,
                arrival,
                blocks * PAGE_SIZE + draw(st.integers(1, 3)),
                answer,
                tuple(range(first, first + blocks)),
                PAGE_SIZE,
                max_tokens=draw(st.sampled_from([None, answer])),
            )
        )
    return requests


def prompts_of(trace: list[TraceRequest]) -> list[list[int]]:
    """The trace's prompts in tokens below 256, of which those of answers are others: the last."""
    ids = [request.prompt_ids() for request in trace]
    known = np.unique(np.concatenate(ids))
    assert len(known) < 128
    return [np.searchsorted(known, one).tolist() for one in ids]


def asked_for(
    trace: list[TraceRequest], prompts: list[list[int]]
) -> tuple[list[TraceRequest], list[SamplingParams]]:
    """Return requests and parameters that bring about just those completions.

    A length ends a completion where the trace has a limit. Otherwise its last token does, at the
    first place where it occurs.
    """
    requests, params = [], []
    for request, prompt in zip(trace, prompts, strict=True):
        last: tuple[int, ...] = ()
        if request.max_tokens is None:
            answer = expected_tokens(prompt, request.output_tokens)
            last = (answer[-1],)
            request = replace(request, output_tokens=1 + answer.index(answer[-1]))
        requests.append(request)
        params.append(
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=last,
                seed=0,
            )
        )
    return requests, params


async def served(
    trace: list[TraceRequest],
    prompts: list[list[int]],
    params: list[SamplingParams],
    policy: str,
    options: dict[str, Any],
    cost: CostModel,
) -> tuple[list[tuple[float, float, int]], list[tuple[int, int]]]:
    """Return the times of each request's first and last token, its cached prompt tokens, and the
    pages of each step.

    Times are those of the virtual clock. Pages are those held and those cached.
    """
    clock = asyncio.get_running_loop()
    pages: list[tuple[int, int]] = []

    def step_seconds(plan: StepPlan) -> float:
        stats = engine.stats()
        held = stats.pages_held_by_requests + stats.pages_fenced
        pages.append((held, stats.pages_cached))
        return cost.step_seconds(plan)

    # As long as the memory allows: the simulator knows no model's context.
    windows = {name: options[name] for name in WINDOWS}
    model = FakeModel(max_model_len=MAX_MODEL_LEN, step_seconds=step_seconds, **windows)
    given = {name: value for name, value in options.items() if name not in WINDOWS}
    engine = Engine(model, policy=policy, **given)
    streams: list[TokenStream] = []

    async def read(stream: TokenStream) -> None:
        async for _ in stream:
            pass

    async with engine, asyncio.TaskGroup() as readers:
        began = clock.time()
        for arrival, together in groupby(trace, attrgetter("arrival_seconds")):
            await asyncio.sleep(began + arrival - clock.time())
            for request in together:
                number = request.number
                streams.append(engine.stream(prompts[number], params[number]))
                readers.create_task(read(streams[-1]))
    times = [
        (
            request.arrival_seconds + (stream.timings.first_token_seconds or 0.0),
            request.arrival_seconds + stream.timings.total_seconds,
            stream.usage.cached_tokens,
        )
        for request, stream in zip(trace, streams, strict=True)
    ]
    return times, pages


@settings(deadline=None, max_examples=examples(120))
@given(
    traces().filter(bool),
    st.sampled_from(POLICIES),
    st.sampled_from([OddCost(), MIXTURE]),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0, 2, 8, 52]),
    st.sampled_from([0, 0, 3, 40]),
    st.integers(1, 4),
    st.integers(4, 40),
    st.booleans(),
    st.integers(0, 9),
)
def test_the_engine_delivers_when_the_simulator_says(
    trace: list[TraceRequest],
    policy: str,
    cost: CostModel,
    overlap: bool,
    layout: tuple[int, int],
    spare_pages: int,
    num_host_pages: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    seed: int,
) -> None:
    options = {
        "page_size": PAGE_SIZE,
        "num_pages": pages_of_sequence(LONGEST, PAGE_SIZE, *layout) + spare_pages,
        "num_host_pages": num_host_pages,
        **dict(zip(WINDOWS, layout, strict=True)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "output_reserve_tokens": 2,
        "prefix_caching": prefix_caching,
        "overlap": overlap,
    }
    prompts = prompts_of(trace)
    trace, params = asked_for(trace, prompts)
    told = simulate(trace, PluginRegistry().policy(policy), cost=cost, **options)
    expected = [(r.first_token_seconds, r.end_seconds, r.cached_tokens) for r in told.requests]
    found, pages = run_simulated(
        lambda: served(trace, prompts, params, policy, options, cost), seed=seed
    )
    for one, told_one in zip(found, expected, strict=True):
        assert one == pytest.approx(told_one)
    timeline = Timeline()
    simulate(trace, PluginRegistry().policy(policy), cost=cost, timeline=timeline, **options)
    assert pages == [(step.pages_held, step.pages_cached) for step in timeline.steps]
