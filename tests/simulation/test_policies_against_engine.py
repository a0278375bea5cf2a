"""The simulator against a whole engine under every installed policy, at the lengths of real traces.

There are 240 requests, memory for a few of them, targets that not all can meet, and prompts that
are too long. Both say the same of each request, to a microsecond.

The engine runs on an event loop with a virtual clock. Its model is a fake one whose completions end
where the trace says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from aioserve import Engine, PromptTooLongError, RequestRejectedError, SamplingParams, TokenStream
from aioserve.config import EngineConfig
from aioserve.execution.runner import LoadedModel
from aioserve.paging.pages import pages_of_sequence
from aioserve.plugins import PluginRegistry
from aioserve.request import FinishReason
from aioserve.simulation.records import Ending, RequestRecord, SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, run_simulated
from aioserve.testing.fake_device import VOCAB_SIZE
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import END_TOKEN, TraceRequest, at_rate, with_scaled_lengths
from aioserve.traces.workload import with_targets

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
RECORDED = ("mooncake_conversation.jsonl.gz", "servegen_m_small.csv.gz", "azure2023_code.csv.gz")
POLICIES = (*sorted(PluginRegistry().policies), "round_robin:chunk_size=48")

NUM_REQUESTS = 240
MICROSECOND = 1e-6
RATE = 30.0
TOO_LONG = 0.04
"""Share of the prompts that are too long. The context has room for the longest of the others, and
the memory for one page more."""
PAGE_SIZE = 16
NO_WINDOWS: dict[str, Any] = {"num_window_groups": 0, "window": 0}
QUICK = ("fcfs", "cache_aware")
"""Policies of the runs with windows that aren't slow tests."""
WINDOWS: dict[str, Any] = {"num_window_groups": 2, "window": 100}
TARGETS: dict[str, Any] = {"ttft_target_seconds": 2.0, "tpot_target_seconds": 0.05}


def step_seconds(plan: StepPlan) -> float:
    """Milliseconds, with odd parts: no step ends at the moment at which a request comes."""
    pairs = sum(item.count * item.start for item in plan.items)
    return 0.0031 + plan.num_tokens / 19_997 + len(plan.items) / 80_021 + pairs / 30_000_001


class Machine:
    """The same, as the simulator asks."""

    def step_seconds(self, plan: StepPlan) -> float:
        return step_seconds(plan)


class EndingModel(FakeModel):
    """A fake model with the vocabulary of traces, which ends each answer where its trace does."""

    def __init__(self, trace: list[TraceRequest], windows: dict[str, Any]) -> None:
        super().__init__(
            max_model_len=1 << 20,
            **windows,
            eos_token_ids=frozenset({END_TOKEN}),
            step_seconds=step_seconds,
            disturb=self._end,
        )
        self.ends = {r.number: r.prompt_tokens + max(1, r.output_tokens) - 1 for r in trace}
        """Position of the last token of each completion, by the request's number."""
        self.owners: dict[int, int] = {}
        """Number of the request in each slot. Requests have it as their seed."""

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await super().load(config, num_slots=num_slots)
        return replace(loaded, limits=replace(loaded.limits, vocab_size=END_TOKEN + 1))

    def _end(self, index: int, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
        self.owners.update((start.slot, start.seed) for start in plan.started_slots)
        positions = [(i.start + r.offset + 1, r.slot) for i in plan.items for r in i.rows]
        token_ids = [
            END_TOKEN if position == self.ends[self.owners[slot]] else token_id
            for (position, slot), token_id in zip(positions, outcome.token_ids, strict=True)
        ]
        return replace(outcome, token_ids=tuple(token_ids))


class Outcome(NamedTuple):
    """Outcome of a request, as its caller sees it."""

    ending: Ending
    first_token_seconds: float | None
    end_seconds: float
    output_tokens: int
    cached_tokens: int

    @classmethod
    def simulated(cls, record: RequestRecord) -> Outcome:
        assert record.ending is not None
        assert record.end_seconds is not None
        return cls(
            record.ending,
            record.first_token_seconds,
            record.end_seconds,
            record.output_tokens,
            record.cached_tokens,
        )


def prompt_of(request: TraceRequest) -> list[int]:
    """Its tokens, none of which the fake model answers with."""
    ids = request.prompt_ids().astype(np.int64)
    return np.where(ids > END_TOKEN // 2, ids - VOCAB_SIZE, ids + VOCAB_SIZE).tolist()


def submitted(engine: Engine, request: TraceRequest) -> TokenStream | None:
    """Its stream; None where its prompt is too long."""
    try:
        return engine.stream(
            prompt_of(request),
            SamplingParams(max_tokens=request.max_tokens, temperature=0.0, seed=request.number),
            cache_salt=request.session or None,
            tenant=request.tenant or None,
            priority=request.priority,
            **TARGETS,
        )
    except PromptTooLongError:
        return None


async def outcome_of(stream: TokenStream | None, arrival: float, began: float) -> Outcome:
    if stream is None:
        return Outcome(Ending.TOO_LONG, None, arrival, 0, 0)
    try:
        async for _ in stream:
            pass
    except RequestRejectedError:
        refused_seconds = asyncio.get_running_loop().time() - began
        return Outcome(Ending.REFUSED, None, refused_seconds, 0, 0)
    timings = stream.timings
    assert timings.first_token_seconds is not None
    at_its_end = stream.finish_reason is FinishReason.STOP
    return Outcome(
        Ending.FINISHED if at_its_end else Ending.CUT_SHORT,
        arrival + timings.first_token_seconds,
        arrival + timings.total_seconds,
        stream.usage.completion_tokens,
        stream.usage.cached_tokens,
    )


async def served(
    trace: list[TraceRequest], policy: str, options: dict[str, Any], windows: dict[str, Any]
) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    readers: list[asyncio.Task[Outcome]] = []
    async with Engine(EndingModel(trace, windows), policy=policy, **options) as engine:
        began = loop.time()
        for arrival, together in groupby(trace, attrgetter("arrival_seconds")):
            await asyncio.sleep(began + arrival - loop.time())
            for request in together:
                reading = outcome_of(submitted(engine, request), arrival, began)
                readers.append(asyncio.create_task(reading))
        return [await reader for reader in readers]


def asked_for(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Return the trace for a small machine: an eighth of its lengths, and one private token in each
    prompt.

    It adds tenants and priorities where the trace has none, and limits that end some completions
    too soon.
    """
    whole = at_rate(with_scaled_lengths(trace, 1 / 8), RATE)
    return [
        replace(
            request,
            number=number,
            prompt_tokens=request.prompt_tokens + 1,
            tenant=request.tenant or f"tenant-{number % 5}",
            priority=number % 3,
            max_tokens=(None, request.output_tokens or 1, 16)[number % 3],
        )
        for number, request in enumerate(whole)
    ]


def options_for(
    trace: list[TraceRequest], overlap: bool, windows: dict[str, Any] = NO_WINDOWS
) -> dict[str, Any]:
    longest = np.quantile([request.prompt_tokens for request in trace], 1 - TOO_LONG)
    return {
        "page_size": PAGE_SIZE,
        "num_pages": pages_of_sequence(int(longest), PAGE_SIZE, **windows) + 1,
        "max_model_len": int(longest) + 1,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "output_reserve_tokens": 4,
        "overlap": overlap,
    }


def compared(
    trace: list[TraceRequest],
    policy: str,
    options: dict[str, Any],
    windows: dict[str, Any] = NO_WINDOWS,
) -> SimulationResult:
    """The run as simulated, which is just what an engine makes of it."""
    chosen = PluginRegistry().policy(policy)
    told = simulate(with_targets(trace, **TARGETS), chosen, cost=Machine(), **options, **windows)
    found = run_simulated(lambda: served(trace, policy, options, windows))
    assert len(found) == len(told.requests) == NUM_REQUESTS
    for outcome, record in zip(found, told.requests, strict=True):
        expected = Outcome.simulated(record)
        place = f"request {record.request.number}"
        assert outcome.end_seconds == pytest.approx(expected.end_seconds, rel=0, abs=MICROSECOND), (
            place
        )
        if expected.first_token_seconds is not None:
            assert outcome.first_token_seconds == pytest.approx(
                expected.first_token_seconds, rel=0, abs=MICROSECOND
            ), place
        assert outcome[3:] == expected[3:], place
        assert outcome.ending is expected.ending, place
    return told


def check_all_happened(told: SimulationResult, policy: str) -> None:
    """Check that the run had every kind of event that is compared."""
    endings = Counter(record.ending for record in told.requests)
    assert set(endings) >= {Ending.FINISHED, Ending.CUT_SHORT, Ending.TOO_LONG}
    assert told.preemptions
    assert told.tokens_cached
    assert bool(endings[Ending.REFUSED]) == policy.startswith("deadline")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "overlap",
    [
        pytest.param(True, id="overlap"),
        pytest.param(False, id="one-by-one", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_no_time_differs_by_over_a_microsecond(
    policy: str, overlap: bool
) -> None:
    trace = asked_for(synthetic_trace("conversations", NUM_REQUESTS))
    check_all_happened(compared(trace, policy, options_for(trace, overlap)), policy)


@pytest.mark.more
@pytest.mark.parametrize("num_host_pages", [0, 200])
@pytest.mark.parametrize(
    "policy",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in POLICIES],
)
def test_nor_does_any_of_a_model_with_windows(policy: str, num_host_pages: int) -> None:
    trace = asked_for(synthetic_trace("conversations", NUM_REQUESTS))
    options = options_for(trace, overlap=True, windows=WINDOWS)
    told = compared(trace, policy, options | {"num_host_pages": num_host_pages}, WINDOWS)
    check_all_happened(told, policy)
    if num_host_pages:
        assert told.pages_swapped_in


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RECORDED)
def test_on_recorded_traces_no_time_differs_by_over_a_microsecond(name: str, policy: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"no {name} beside the repository")
    trace = asked_for(read_trace(TRACES / name)[:NUM_REQUESTS])
    compared(trace, policy, options_for(trace, overlap=True))
