"""Claims of the books about scheduling and memory, tried on the simulator.

A Llama 3 8B on one H100 serves workloads that are drawn from a seed. Scheduler, pages and prefix
tree are the engine's own. The roofline says how long a step takes. The same command prints the same
row on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from book_claims import CORRECTED, HOLDS, IN_PART, NANO, NOT, SCRATCH, Claim, Found
from msgspec.structs import replace
from published import OneBatchAfterAnother, bundled
from published_policies import sarathi, vllm_v0

from aioserve import SchedulingPolicy
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest

PAGE_SIZE = 16
SMALL_MEMORY_TOKENS = 15_008
"""Tokens of an OPT-13B that fit a 40 GB card beside its weights, in whole pages."""
SET_ASIDE_TOKENS = 2048
SEATS = SMALL_MEMORY_TOKENS // SET_ASIDE_TOKENS
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 8192}
"""A budget that no prompt of these workloads exceeds, so that none is computed in chunks."""
LATE_SECONDS = (0.03, 0.1)

Make = Callable[[], SchedulingPolicy]
fcfs: Make = bundled("fcfs").make


def rotation() -> SchedulingPolicy:
    """Prompts in turn, 128 tokens each."""
    return bundled("round_robin:chunk_size=128").make()


@cache
def cost() -> RooflineCost:
    return RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware_preset("h100"))


def run(
    trace: Sequence[TraceRequest], policy: SchedulingPolicy, **options: Any
) -> SimulationResult:
    """One simulation. Memory holds 480,000 tokens unless an option says otherwise."""
    given: dict[str, Any] = {"num_pages": 30_000, "max_tokens": 4096, "cost": cost(), **options}
    return simulate(trace, policy, **given)


def measured(trace: Sequence[TraceRequest], policy: SchedulingPolicy, **options: Any) -> Metrics:
    metrics = metrics_of(run(trace, policy, **options))
    if metrics.policy_faults:
        raise RuntimeError(f"a policy had {metrics.policy_faults} faults")
    return metrics


def asked(
    number: int, prompt_tokens: int, output_tokens: int, arrival_seconds: float = 0.0
) -> TraceRequest:
    """A request with a prompt of its own."""
    return TraceRequest(number, arrival_seconds, prompt_tokens, output_tokens, (), prompt_tokens)


def at_once(output_tokens: Sequence[int], prompt_tokens: int = 3) -> list[TraceRequest]:
    return [asked(number, prompt_tokens, count) for number, count in enumerate(output_tokens)]


# -- batches


def both_steps(output_tokens: Sequence[int], seats: int) -> tuple[int, int]:
    """Steps of static and of continuous batching, for requests that come at once."""
    policies: tuple[SchedulingPolicy, ...] = (OneBatchAfterAnother(), fcfs())
    static, continuous = (
        measured(at_once(output_tokens), policy, max_num_seqs=seats, overlap=False).steps
        for policy in policies
    )
    return static, continuous


def batching_table() -> Found:
    lengths = {
        "alike": [10] * 20,
        "5 or 20": [5 if number % 3 == 0 else 20 for number in range(20)],
        "9 in 10 short": [100 if number % 10 == 9 else 10 for number in range(20)],
    }
    parts = []
    for name, tokens in lengths.items():
        static, continuous = both_steps(tokens, 4)
        parts.append(f"{name}: {static} and {continuous}, {static / continuous:.2f}")
    all_seated = [both_steps(tokens, 20) for tokens in lengths.values()]
    assert all(static == continuous for static, continuous in all_seated)
    here = "; ".join(parts) + " times, on 4 seats; 1.00 where all have a seat"
    why = (
        "A completion of 20 tokens takes 20 steps, so no batch ends after 12, nor one with 100 "
        "after 25. A gain needs requests that wait for a seat"
    )
    return Found(here, CORRECTED, why)


def timeline() -> Found:
    static, continuous = both_steps((1000, 100, 120, 100, 150, 200, 80), 4)
    here = f"{static:,} and {continuous:,} steps, {static / continuous:.2f} times"
    why = "The three that join are done before the longest ends; static batching appends them"
    return Found(here, IN_PART, why)


@cache
def small_memory() -> tuple[float, float, float]:
    """Tokens a second: static batches and continuous ones with all memory set aside, and pages."""
    drawn = np.random.default_rng(0).exponential(128, 128)
    trace = at_once(np.clip(drawn, 1, 1536).astype(int).tolist(), 512)
    pages: dict[str, Any] = {"num_pages": SMALL_MEMORY_TOKENS // PAGE_SIZE}
    static = measured(trace, OneBatchAfterAnother(), max_num_seqs=SEATS, **pages)
    contiguous = measured(trace, fcfs(), max_num_seqs=SEATS, **pages)
    paged = measured(trace, fcfs(), **pages)
    rates = [m.output_tokens_per_second for m in (static, contiguous, paged)]
    return rates[0], rates[1], rates[2]


def twenty_three() -> Found:
    static, contiguous, paged = small_memory()
    here = (
        f"{static:,.0f}, {contiguous:,.0f} and {paged:,.0f} tokens/s: {contiguous / static:.1f} "
        f"times with the batch, {paged / static:.1f} with pages as well"
    )
    why = (
        "The order is theirs. Their static baseline is another engine, without tuned kernels; here "
        "both have the same"
    )
    return Found(here, IN_PART, why)


def two_to_four() -> Found:
    _, contiguous, paged = small_memory()
    ratio = paged / contiguous
    here = f"{contiguous:,.0f} and {paged:,.0f} tokens/s, {ratio:.1f} times"
    verdict = HOLDS if 2 <= ratio <= 4 else IN_PART
    return Found(
        here, verdict, "Seven requests have 2,048 tokens each. In pages, 23 of 640 tokens fit"
    )


def filled() -> Found:
    shares = {}
    for name in ("chatbot", "conversations", "tenants"):
        lengths = [one.prompt_tokens + one.output_tokens for one in synthetic_trace(name, 400)]
        room = sum(-(-length // PAGE_SIZE) * PAGE_SIZE for length in lengths)
        shares[name] = sum(lengths) / room
    here = ", ".join(f"{share:.1%} of {name}" for name, share in shares.items())
    verdict = HOLDS if min(shares.values()) > 0.96 else IN_PART
    return Found(here, verdict, "On average half of each request's last page of 16 tokens is empty")


# -- naive serving


def naive() -> Found:
    # 8 requests of 500 tokens in and 100 out; the naive server computes a prompt for each token.
    anew = [asked(n, 500 + n % 100, 1) for n in range(8 * 100)]
    one = measured(anew, fcfs(), max_num_seqs=1, prefix_caching=False, **WHOLE)
    cached = measured(at_once([100] * 8, 500), fcfs(), max_num_seqs=1, prefix_caching=False)
    many = [asked(n, 500, 100) for n in range(256)]
    rates = [
        800 / one.seconds,
        cached.output_tokens_per_second,
        measured(many, fcfs(), prefix_caching=False).output_tokens_per_second,
    ]
    here = (
        f"{rates[0]:,.0f} tokens/s without a KV cache, {rates[1]:,.0f} with one, {rates[2]:,.0f} "
        f"in batches: {rates[2] / rates[0]:.0f} times"
    )
    why = "256 requests share each read of the weights. Longer contexts gain more, few users less"
    return Found(here, HOLDS if 10 <= rates[2] / rates[0] <= 1000 else NOT, why)


# -- chunks


def mixed(per_second: float) -> list[TraceRequest]:
    """One prompt in ten has 2,000 tokens, the others have 50 to 100."""
    source = np.random.default_rng(0)
    arrivals = np.cumsum(source.exponential(1 / per_second, 400)).tolist()
    lengths = source.integers(50, 101, 400).tolist()
    return [
        asked(n, 2000 if n % 10 == 0 else lengths[n], 30, arrivals[n]) for n in range(len(arrivals))
    ]


def first_tokens(result: SimulationResult, most_prompt_tokens: int = 100) -> list[float]:
    """Milliseconds to the first token of each request with so short a prompt, sorted."""
    return sorted(
        1e3 * (one.first_token_seconds - one.request.arrival_seconds)
        for one in result.requests
        if one.first_token_seconds is not None and one.request.prompt_tokens <= most_prompt_tokens
    )


def short_waits() -> Found:
    trace = mixed(80)
    options: dict[str, Any] = {"prefix_caching": False}
    whole = first_tokens(run(trace, fcfs(), **WHOLE, **options))
    turns = first_tokens(run(trace, rotation(), max_num_batched_tokens=256, **options))
    late = int(0.99 * len(whole))
    ratios = fmean(whole) / fmean(turns), whole[late] / turns[late]
    here = (
        f"mean {fmean(whole):.1f} and {fmean(turns):.1f} ms, {ratios[0]:.1f} times; p99 "
        f"{whole[late]:.1f} and {turns[late]:.1f} ms, {ratios[1]:.1f} times"
    )
    why = (
        "Most short prompts are behind no long one. A long prompt takes 50 ms here instead of "
        "their 200 ms, beside 6 ms for any step"
    )
    return Found(here, IN_PART, why)


def burst() -> Found:
    trace = [asked(n, 8, 200) for n in range(17)]
    trace += [asked(17 + n, count, 10, 0.05) for n, count in enumerate((2000, 50, 100))]
    options: dict[str, Any] = {"prefix_caching": False}
    results = (
        run(trace, fcfs(), **WHOLE, **options),
        run(trace, fcfs(), max_num_batched_tokens=256, **options),
        run(trace, rotation(), max_num_batched_tokens=256, **options),
    )
    waits = [
        [1e3 * ((one.first_token_seconds or 0) - 0.05) for one in result.requests[17:]]
        for result in results
    ]
    short = " / ".join(f"{wait[1]:.0f}" for wait in waits)
    long = " / ".join(f"{wait[0]:.0f}" for wait in waits)
    gain = waits[0][1] / waits[2][1]
    here = (
        f"50 tokens wait {short} ms (whole / chunks / chunks in turn), {gain:.1f} times; 2,000 "
        f"tokens {long} ms"
    )
    why = (
        "Chunks alone gain nothing: turns do. Their 15 ms leave out the prompt itself and the long "
        "prompt pays"
    )
    return Found(here, IN_PART, why)


def chunk_cost() -> Found:
    trace = [replace(one, arrival_seconds=0.0) for one in mixed(1)]
    policies = ((fcfs(), 8192), (fcfs(), 512), (rotation(), 256))
    seconds = [
        measured(trace, policy, max_num_batched_tokens=most, prefix_caching=False).seconds
        for policy, most in policies
    ]
    here = (
        f"{seconds[1] / seconds[0] - 1:+.1%} time with 512 tokens a step, "
        f"{seconds[2] / seconds[0] - 1:+.1%} with 256 in turn"
    )
    verdict = HOLDS if seconds[1] / seconds[0] - 1 <= 0.05 else NOT
    why = "All 400 requests wait from the start. Small steps read the weights more often"
    return Found(here, verdict, why)


# -- the largest rate


def drawn(prompt_tokens: int, output_tokens: int, spread: float) -> list[TraceRequest]:
    """A hundred requests with log-normal lengths around these medians, one a second."""
    source = np.random.default_rng(0)
    prompts, outputs = (
        np.clip(source.lognormal(np.log(median), spread, 100), 4, 8192).astype(int).tolist()
        for median in (prompt_tokens, output_tokens)
    )
    arrivals = np.cumsum(source.exponential(1.0, 100)).tolist()
    return [asked(n, prompts[n], outputs[n], arrivals[n]) for n in range(len(arrivals))]


def largest_rate(
    trace: Sequence[TraceRequest], make: Make, late_seconds: float, **options: Any
) -> float:
    """Most requests a second that keep two limits, to 10 %.

    The 99th percentile of gaps is within `late_seconds`, and half of the first tokens come within a
    second."""
    low, high = 0.5, 64.0
    while high / low > 1.1:
        rate = (low * high) ** 0.5
        faster = [replace(one, arrival_seconds=one.arrival_seconds / rate) for one in trace]
        metrics = measured(faster, make(), prefix_caching=False, **options)
        gaps, firsts = metrics.gap_seconds, metrics.ttft_seconds
        assert gaps is not None
        assert firsts is not None
        if gaps.p99 <= late_seconds and firsts.p50 <= 1:
            low = rate
        else:
            high = rate
    return low


def stall_free() -> Found:
    trace = drawn(1730, 415, 0.6)
    parts, ratios = [], []
    for late in LATE_SECONDS:
        first = largest_rate(trace, vllm_v0.PromptsFirst, late, **WHOLE)
        fair = largest_rate(trace, lambda at=0.9 * late: sarathi.StallFree(tbt_seconds=at), late)
        ratios.append(fair / first)
        parts.append(f"{fair:.1f} to {first:.1f} requests/s, {fair / first:.1f} times, at {late} s")
    verdict = HOLDS if max(ratios) >= 5.6 > 1 < min(ratios) else IN_PART
    why = (
        "Prompts first stop all decodes. The tighter the limit on gaps, the more chunks gain. A "
        "hundred requests, so that overload shows late"
    )
    return Found("; ".join(parts), verdict, why)


def split_fuse() -> Found:
    trace = drawn(2600, 60, 0.3)
    first = largest_rate(trace, vllm_v0.PromptsFirst, 0.1, **WHOLE)
    fused = largest_rate(trace, fcfs, 0.1, max_num_batched_tokens=1024)
    here = f"{fused:.1f} to {first:.1f} requests/s, {fused / first:.1f} times"
    why = "Gaps of at most 0.1 s; the paper's limits are of other hardware"
    return Found(here, HOLDS if fused / first >= 2.3 else IN_PART, why)


# -- prefixes


@cache
def hits_of(workload: str) -> Metrics:
    return measured(synthetic_trace(workload, 300, rate=8), fcfs(), num_pages=100_000)


def workload_hits() -> Found:
    names = ("chatbot", "conversations", "agents", "documents", "unique-prompts")
    here = ", ".join(f"{name} {hits_of(name).token_hit_share or 0:.1%}" for name in names)
    why = (
        "A hit rate is a property of the workload: what share of prompts came before. 300 requests "
        "of `--synthetic`, unbounded memory. No workload here is like code completion (45 %)"
    )
    return Found(here, IN_PART, why)


def agents() -> Found:
    trace = [
        replace(one, arrival_seconds=0.0, think_seconds=0.0)
        for one in synthetic_trace("agents", 300)
    ]
    options: dict[str, Any] = {"closed_loop": True, "num_pages": 100_000}
    cached = measured(trace, fcfs(), **options)
    anew = measured(trace, fcfs(), prefix_caching=False, **options)
    ratio = anew.seconds / cached.seconds
    here = (
        f"{ratio:.1f} times as fast; {anew.tokens_prefilled / cached.tokens_prefilled:.1f} times "
        "fewer prompt tokens computed"
    )
    why = "Decode is as long with the cache as without. The paper compares with other engines, too"
    return Found(here, HOLDS if ratio >= 5 else IN_PART, why)


CLAIMS = (
    Claim(
        "batching-table",
        NANO,
        "10 and 10 steps, 20 and 12, 100 and 25: 1.0, 1.67 and 4.0 times",
        "static to continuous batching, by spread of lengths",
        batching_table,
    ),
    Claim(
        "batching-timeline",
        NANO,
        "1.4 times static batching",
        "its seven requests on four seats, until all are done",
        timeline,
    ),
    Claim(
        "naive",
        NANO,
        "10 to 1,000 times over naive serving",
        "no KV cache, one request at a time",
        naive,
    ),
    Claim(
        "short-waits",
        NANO,
        "short requests wait 8.3 times less on average, 6.7 times less at p99",
        "chunks of 256 tokens, some prompts of 2,000",
        short_waits,
    ),
    Claim(
        "burst",
        NANO,
        "50 tokens behind 2,000 wait 15 ms instead of 200, 13 times less",
        "three prompts at once, 17 that decode",
        burst,
    ),
    Claim("chunk-cost", NANO, "chunks cost 3 to 5 % of throughput", "chunks of 256", chunk_cost),
    Claim(
        "workload-hits",
        NANO,
        "hit rates of 91 % (chatbot), 73 % (documents), 45 % (code), 5 % (unique prompts)",
        "`analyze_cache_hit_rates`",
        workload_hits,
    ),
    Claim(
        "continuous-23x",
        SCRATCH,
        "continuous batching brings 23 times the throughput of static batching",
        "OPT-13B on a card of 40 GB, lengths that vary much",
        twenty_three,
    ),
    Claim(
        "paging-2-to-4x",
        SCRATCH,
        "pages bring 2 to 4 times the throughput (vLLM)",
        "continuous batching with memory set aside for the longest",
        two_to_four,
    ),
    Claim(
        "pages-filled",
        SCRATCH,
        "over 96 % of KV memory holds tokens (vLLM)",
        "pages of 16 tokens",
        filled,
    ),
    Claim(
        "sarathi-5.6x",
        SCRATCH,
        "up to 5.6 times the load within a limit on gaps (Sarathi-Serve)",
        "prompts first, as vLLM did it then",
        stall_free,
    ),
    Claim(
        "fastgen-2.3x",
        SCRATCH,
        "2.3 times the effective throughput (FastGen's SplitFuse)",
        "prompts of 2,600 tokens, 60 out, prompts first",
        split_fuse,
    ),
    Claim(
        "agents-5x",
        SCRATCH,
        "up to 5 times the speed on agents (SGLang)",
        "steps whose prompts grow, all agents at once",
        agents,
    ),
)
