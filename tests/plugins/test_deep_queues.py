"""The bundled policies where hundreds of requests wait at once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.testing import check_policy
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest, at_rate
from aioserve_plugins._waiting_prompts import WaitingPrompts
from aioserve_plugins.cache_aware import CacheAware
from aioserve_plugins.shortest_first import ShortestFirst
from tests import made_up_traces

AT_ONCE = 1e5


class LongestMatch(SchedulingPolicy):
    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: -request.cached_tokens)


def run(requests: list[TraceRequest], policy: SchedulingPolicy, *, num_pages: int) -> Metrics:
    shape = ModelShape.of(read_model("llama-3-8b"))
    cost = RooflineCost(shape, hardware_preset("h100"))
    return metrics_of(simulate(requests, policy, cost=cost, num_pages=num_pages))


def shares_found(requests: list[TraceRequest], *, num_pages: int) -> list[float]:
    policies = SchedulingPolicy(), CacheAware(), LongestMatch()
    shares = [run(requests, one, num_pages=num_pages).block_hit_share for one in policies]
    return [share for share in shares if share is not None]


def test_cache_aware_finds_what_the_longest_match_finds_among_prefix_trees() -> None:
    requests = synthetic_trace("prefix-trees", 200, rate=AT_ONCE, seed=2)
    plain, mine, most = shares_found(requests, num_pages=600)
    assert mine >= 0.95 * most
    assert plain < 0.9 * most


def test_cache_aware_finds_what_the_longest_match_finds_in_conversations(tmp_path: Path) -> None:
    requests = at_rate(read_trace(made_up_traces.mooncake(tmp_path, num_conversations=30)), AT_ONCE)
    plain, mine, most = shares_found(requests, num_pages=1500)
    assert mine >= 0.95 * most
    assert plain < 0.8 * most


def p90_of_short_prompts(requests: list[TraceRequest], policy: SchedulingPolicy) -> float:
    shape = ModelShape.of(read_model("llama-3-8b"))
    cost = RooflineCost(shape, hardware_preset("h100"))
    result = simulate(requests, policy, cost=cost, num_pages=27_439)
    waits = sorted(
        record.first_token_seconds - record.request.arrival_seconds
        for record in result.requests
        if record.first_token_seconds is not None and record.request.prompt_tokens <= 2048
    )
    return waits[len(waits) * 9 // 10]


def test_shortest_first_keeps_its_claim_for_prompts_of_up_to_2048_tokens() -> None:
    drawn = random.Random(5)
    requests = [
        TraceRequest(number, 0.0, min(8000, int(drawn.lognormvariate(6.6, 1.0))), 2, (), 1)
        for number in range(1500)
    ]
    plain = p90_of_short_prompts(requests, SchedulingPolicy())
    assert p90_of_short_prompts(requests, ShortestFirst()) < 0.6 * plain
    assert p90_of_short_prompts(requests, ShortestFirst(patience=64)) > 0.6 * plain


class Counted(CacheAware):
    """Fails if it knows of requests that don't wait, or has looked up too many in a step."""

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        order = super().order(waiting, view)
        first = next(order, None)
        assert self._prompts._prompts.keys() == set(waiting)
        if first is not None:
            yield first
        yield from order
        assert len(self._prompts._fresh) <= self.lookups


def test_a_step_has_its_number_of_lookups_and_what_is_known_is_of_those_that_wait() -> None:
    check_policy(lambda: Counted(patience=2.5, lookups=3), max_examples=10)


class Prompt:
    """The part of a request that its lookups need."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.arrival_index = self.arrival_processed_tokens = self.generated_tokens = 0
        self.prompt_tokens = len(self.ids)
        self.held: Sequence[int] = ()
        """Tokens that the cache holds."""
        self.num_lookups = 0

    @property
    def cached_tokens(self) -> int:
        self.num_lookups += 1
        pairs = zip(self.ids[:-1], self.held, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def prefix_key(self, num_tokens: int) -> bytes:
        return repr(self.ids[:num_tokens]).encode()


def test_one_lookup_tells_what_the_cache_has_lost_of_all_that_begin_alike() -> None:
    requests = [Prompt([*[7] * 32, *[number] * 8]) for number in range(20)]
    view: Any = SimpleNamespace(page_size=4)
    prompts = WaitingPrompts(8, lambda prompt, *_: (prompt.index,), lambda *_: math.inf)

    def known(held: int) -> set[int]:
        for request in requests:
            request.held, request.num_lookups = [7] * held, 0
        prompts.begin(cast("Any", requests), view)
        in_turn = {prompt.cached for prompt in prompts.in_turn(0)}
        assert sum(request.num_lookups for request in requests) <= 8
        return in_turn

    for _ in range(6):
        found = known(held=30)
    assert found == {30}
    assert known(held=12) == {12}
    assert known(held=0) == {0}
    for _ in range(6):
        found = known(held=25)
    assert found == {25}
