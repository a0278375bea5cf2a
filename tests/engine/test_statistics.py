"""Statistics of an engine: sums that must agree, and plain counts beside them."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import (
    Engine,
    EngineStats,
    Observer,
    ObserverSpec,
    SamplingParams,
    StepInfo,
    TokenStream,
    hookimpl,
)
from aioserve.capacity.models import ModelShape, read_model
from aioserve.engine.measures import MAX_REMEMBERED, EndedRequests
from aioserve.paging.format import KV_FORMATS
from aioserve.request import FinishReason
from aioserve.testing import run_simulated
from aioserve.testing.fake_model import FakeModel
from tests.waits import until

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 20),  # answer tokens
        st.integers(1, 3),  # samples
        st.one_of(st.none(), st.integers(0, 5)),  # tokens before its reader leaves
    ),
    min_size=1,
    max_size=8,
)


def filled_by_page(dump: dict[str, Any], page_size: int) -> dict[int, int]:
    """Count the filled slots of each page that sequences hold, from their dumped pages."""
    filled: dict[int, int] = defaultdict(int)
    for sequence in dump["sequences"]:
        for index, page in enumerate(sequence["pages"]):
            used = sequence["computed_tokens"] - index * page_size
            filled[page] = max(filled[page], min(page_size, max(0, used)))
    return filled


@given(requests=REQUESTS, page_size=st.sampled_from([1, 4, 16]), overlap=st.booleans())
def test_sums_agree(
    requests: list[tuple[int, int, int, int | None]], page_size: int, overlap: bool
) -> None:
    fills = 0

    async def main() -> EngineStats:
        nonlocal fills
        model = FakeModel(num_pages=512, step_seconds=lambda plan: 0.01)
        async with Engine(model, page_size=page_size, overlap=overlap) as engine:

            async def ask(prompt: int, answer: int, samples: int, leaves: int | None) -> None:
                nonlocal fills
                params = SamplingParams(max_tokens=answer, n=samples, ignore_eos=True)
                async with engine.stream([7] * prompt, params) as stream:
                    async for token in stream:
                        stats = engine.stats()
                        filled = filled_by_page(engine.dump(), page_size)
                        held = stats.pages_held_by_requests * page_size
                        assert stats.slots_held_by_requests == held
                        assert len(filled) * page_size == held
                        assert stats.slots_filled == sum(filled.values())
                        fills += 1
                        if token.index == leaves:
                            break

            await asyncio.gather(*[ask(*each) for each in requests])
            await engine.drain(60)
            return engine.stats()

    stats = run_simulated(main)
    assert fills
    finished = stats.requests_finished_total
    assert set(finished) == {reason.value for reason in FinishReason}
    assert sum(finished.values()) == len(requests)
    phases = (stats.prefill, stats.decode)
    assert sum(phase.tokens_total for phase in phases) == stats.tokens_computed_total
    assert sum(phase.seconds_total for phase in phases) == pytest.approx(stats.step_seconds_total)
    assert stats.prefill.tokens_total == stats.tokens_prefilled_total
    if all(leaves is None for *_, leaves in requests):
        assert finished == dict.fromkeys(finished, 0) | {"length": len(requests)}
        firsts = sum(samples for _, _, samples, _ in requests)
        assert stats.decode.tokens_total == stats.tokens_generated_total - firsts
        assert stats.latency_mean_seconds is not None
    assert stats.tokens_per_step == stats.tokens_computed_total / stats.steps_total
    assert (stats.slots_held_by_requests, stats.fill_ratio) == (0, None)
    for phase in phases:  # the sizes of a fake model are unknown
        assert (phase.flops_total, phase.bytes_total, phase.compute_use) == (None, None, None)


class PlainWork(Observer):
    """Counts operations and bytes of each step, token by token."""

    def __init__(self, shape: ModelShape, weight_bytes: int) -> None:
        self._shape, self._weight_bytes = shape, weight_bytes
        self.flops = {False: 0, True: 0}
        self.moved = {False: 0.0, True: 0.0}

    @hookimpl
    def aioserve_observers(self) -> list[ObserverSpec]:
        return [ObserverSpec("plain_work", lambda: self, "counts anew")]

    def step_finished(self, step: StepInfo) -> None:
        shape = self._shape
        entry = shape.kv_bytes_per_token // shape.num_layers
        pair = shape.pair_flops // shape.num_layers
        for part in step.parts:
            share = part.num_tokens / sum([one.num_tokens for one in step.parts])
            self.moved[part.is_decode] += share * self._weight_bytes
            self.flops[part.is_decode] += 2 * shape.head_params * part.num_sampled
            places = range(part.start_tokens, part.start_tokens + part.num_tokens)
            for window, layers in shape.layers_by_window.items():
                seen = [
                    set(range(max(0, at + 1 - window) if window else 0, at + 1)) for at in places
                ]
                read = len(set().union(*seen))
                self.moved[part.is_decode] += layers * entry * (read + part.num_tokens)
                self.flops[part.is_decode] += layers * pair * sum(map(len, seen))
            self.flops[part.is_decode] += 2 * shape.layer_params * part.num_tokens


@pytest.mark.asyncio
async def test_operations_and_bytes_are_those_of_a_plain_count() -> None:
    limits: dict[str, Any] = {"peak_flops_per_second": 1e12, "peak_bytes_per_second": 1e10}
    async with Engine("pyhelp", dtype="float32", num_pages=64, **limits) as engine:
        dump = engine.dump()["model"]
    shape = replace(ModelShape.of(read_model("pyhelp")), kv_format=KV_FORMATS["float32"])
    plain = PlainWork(shape, 0)
    options: dict[str, Any] = {"num_pages": 256, "max_num_batched_tokens": 16, "plugins": [plain]}
    async with Engine("pyhelp", dtype="float32", **options, **limits) as engine:
        lengths = [1, 5, 40, 17]
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        await asyncio.gather(*[engine.generate([9] * each, params) for each in lengths])
        await engine.drain(30)
        stats = engine.stats()
    prefill, decode = stats.prefill, stats.decode
    assert (prefill.flops_total, decode.flops_total) == (plain.flops[False], plain.flops[True])
    assert prefill.bytes_total is not None
    assert decode.bytes_total is not None
    weights = prefill.bytes_total + decode.bytes_total - sum(plain.moved.values())
    held = sum(dump["weight_bytes"].values())
    # All weights once a step, but for the embedding's table.
    assert 0.3 * held * stats.steps_total < weights <= held * stats.steps_total
    assert weights / stats.steps_total == pytest.approx(round(weights / stats.steps_total))
    for phase in (prefill, decode):
        assert phase.flops_total is not None
        assert phase.bytes_total is not None
        assert phase.compute_use == pytest.approx(phase.flops_total / phase.seconds_total / 1e12)
        used = phase.bytes_total / phase.seconds_total / 1e10
        assert phase.bandwidth_use == pytest.approx(used)


@pytest.mark.asyncio
async def test_uses_are_unknown_where_a_limit_is() -> None:
    async with Engine("pyhelp", num_pages=64, peak_bytes_per_second=1e10) as engine:
        assert engine.stats().decode.bandwidth_use is None  # it has taken no time
        await engine.generate([9, 9], SamplingParams(max_tokens=4, ignore_eos=True))
        decode = engine.stats().decode
    assert decode.flops_total
    assert decode.bandwidth_use
    assert decode.compute_use is None


async def slow_reader(stream: TokenStream) -> None:
    async for _ in stream:
        await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_a_request_beyond_its_deadline_is_counted_as_aborted() -> None:
    async with Engine(FakeModel(num_pages=64)) as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=1000), deadline_seconds=0.01)
        with pytest.raises(Exception, match="deadline"):
            await slow_reader(stream)
        finished = engine.stats().requests_finished_total
    assert finished == {"stop": 0, "length": 0, "abort": 1, "error": 0}


ENDS = st.lists(
    st.tuples(
        st.sampled_from(FinishReason),
        st.sampled_from([None, "a", "b", "c"]),
        st.floats(0, 100),
        st.floats(0, 10),
    ),
    max_size=40,
)


@given(ends=ENDS, opened=st.lists(st.tuples(st.sampled_from([None, "a", "d"]), st.floats(0, 10))))
def test_latency_and_service_are_those_of_a_plain_count(
    ends: list[tuple[FinishReason, str | None, float, float]],
    opened: Sequence[tuple[str | None, float]],
) -> None:
    ended = EndedRequests()
    for each in ends:
        ended.ended(*each)
    assert sum(ended.counts.values()) == len(ends)
    whole = [seconds for reason, _, seconds, _ in ends if reason in ("stop", "length")]
    mean, variance = ended.latency()
    if whole:
        assert mean == pytest.approx(statistics.fmean(whole))
        assert variance == pytest.approx(statistics.pvariance(whole), abs=1e-9)
    else:
        assert (mean, variance) == (None, None)
    served: dict[str | None, float] = defaultdict(float)
    for _, tenant, _, device in ends:
        served[tenant] += device
    for tenant, device in opened:
        served[tenant] += device
    gap = ended.service_gap(opened)
    if len(served) < 2:
        assert gap is None
    else:
        assert gap == pytest.approx(max(served.values()) - min(served.values()))


def test_only_the_last_requests_are_remembered_and_all_are_counted() -> None:
    ended = EndedRequests()
    ended.ended(FinishReason.STOP, "a", 1e6, 1e6)
    for _ in range(MAX_REMEMBERED):
        ended.ended(FinishReason.STOP, "b", 2.0, 1.0)
    assert ended.counts["stop"] == MAX_REMEMBERED + 1
    assert ended.latency() == (2.0, 0.0)
    assert ended.service_gap([]) is None


@pytest.mark.asyncio
async def test_a_tenant_that_only_waits_is_in_the_gap() -> None:
    model = FakeModel(num_pages=256, step_seconds=lambda plan: 0.001)
    async with Engine(model, max_num_seqs=1) as engine:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        first = engine.stream([1, 2, 3], params, tenant="first")
        async with first, engine.stream([4, 5], params, tenant="second") as second:
            await until(lambda: engine.stats().steps_total > 20)
            stats = engine.stats()
            served = first.timings.device_seconds
            assert 0 < (stats.service_gap_seconds or 0) <= served
            assert second.timings.device_seconds == 0
