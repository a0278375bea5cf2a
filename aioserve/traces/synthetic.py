"""Made-up workloads: traits of real traces, one at a time, drawn from a seed.

The same name, count, rate and seed give the same trace.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from aioserve.arguments import counted
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.sampling_params import MAX_SEED
from aioserve.traces.checks import check_int, check_number
from aioserve.traces.trace_request import MAX_ARRIVAL_SECONDS, MAX_RATE, TraceRequest

__all__ = ["WORKLOADS", "synthetic_trace"]

MAX_SYNTHETIC_REQUESTS = 1 << 20
BLOCK_TOKENS = 64
MAX_PROMPT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 4_096


def synthetic_trace(
    name: str, num_requests: int = 500, *, rate: float = 4.0, seed: int = 0
) -> list[TraceRequest]:
    """Return a workload of `WORKLOADS` with `num_requests` requests, about `rate` of them a second.

    The last conversations go on for a while when no more begin. Raises `ConfigError` for an unknown
    name, a count, rate or seed outside its range, or a rate that makes the trace too long.
    """
    if type(name) is not str or name not in WORKLOADS:
        raise ConfigError(f"no synthetic workload {shown(name)}; there are: {', '.join(WORKLOADS)}")
    check_int("num_requests", num_requests, 1, MAX_SYNTHETIC_REQUESTS)
    check_number("rate", rate, MAX_RATE)
    check_int("seed", seed, 0, MAX_SEED)
    # The drawn trace may be longer than its mean, but practically never a hundred times.
    if not num_requests / rate <= MAX_ARRIVAL_SECONDS / 100:
        raise ConfigError(
            f"rate {rate} makes {counted(num_requests, 'request')} take {num_requests / rate:g} s; "
            f"it may be at most {MAX_ARRIVAL_SECONDS / 100:g}"
        )
    return WORKLOADS[name](np.random.default_rng(seed), num_requests, rate)


def _prefix_trees(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Four system prompts, eight sets of examples after each, and a question of its own.

    Some system prompts and examples are much more frequent than others.
    """
    outputs = _lengths(rng, count, mean=100, sigma=0.6, most=1024)
    questions = _lengths(rng, count, mean=150, sigma=0.6, most=2048)
    requests = []
    for number, arrival in enumerate(_poisson(rng, count, rate)):
        system = int(rng.choice(4, p=_zipf(4)))
        examples = int(rng.choice(8, p=_zipf(8)))
        ids = [system * 16 + block for block in range(16)]
        ids += [64 + (system * 8 + examples) * 12 + block for block in range(12)]
        prompt = len(ids) * BLOCK_TOKENS + int(questions[number])
        requests.append(_request(number, arrival, prompt, outputs[number], ids))
    return requests


def _conversations(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Conversations of up to eight turns.

    Each turn's prompt is the one before, its answer and something new, some seconds later.
    """
    drafts: list[tuple[float, int, int, list[int], float, int | None]] = []
    began, next_id = 0.0, 0
    while len(drafts) < count:
        began += float(rng.exponential(4.5 / rate))
        arrival, ids, think = began, list[int](), 0.0
        before: int | None = None
        for _ in range(min(int(rng.integers(1, 9)), count - len(drafts))):
            prompt_blocks = len(ids) + int(rng.integers(1, 12))
            output = int(_lengths(rng, 1, mean=200, sigma=0.7, most=1024)[0])
            grown = prompt_blocks + -(-output // BLOCK_TOKENS)
            ids += range(next_id, next_id + grown - len(ids))
            next_id = ids[-1] + 1
            prompt = prompt_blocks * BLOCK_TOKENS
            drafts.append((arrival, prompt, output, ids[:prompt_blocks], think, before))
            before = len(drafts) - 1
            think = 5.0 + float(rng.exponential(20.0))
            arrival += think
    in_time = sorted(range(len(drafts)), key=lambda index: drafts[index][0])
    number_of = {index: number for number, index in enumerate(in_time)}
    requests = []
    for number, index in enumerate(in_time):
        arrival, prompt, output, ids, think, before = drafts[index]
        follows = None if before is None else number_of[before]
        request = _request(number, arrival, prompt, output, ids)
        requests.append(replace(request, follows=follows, think_seconds=think))
    return requests


def _bursts(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Gamma arrivals with a coefficient of variation of 4: long pauses, then many at once."""
    variation = 4.0
    shape = 1 / variation**2
    arrivals = np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))
    prompts = _lengths(rng, count, mean=800, sigma=0.8, most=8192)
    outputs = _lengths(rng, count, mean=120, sigma=0.8, most=1024)
    return [_request(i, arrivals[i], prompts[i], outputs[i]) for i in range(count)]


def _tenants(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Eight tenants of very unequal size, each with prompts and answers of its own typical length.
    The largest sends twice as much in the middle third."""
    share = _zipf(8)
    surge = share * np.where(np.arange(8) == 0, 2.0, 1.0)
    means = rng.uniform(100, 1500, 8), rng.uniform(30, 300, 8)
    requests = []
    for number, arrival in enumerate(_poisson(rng, count, rate)):
        middle = count <= 3 * number < 2 * count
        tenant = int(rng.choice(8, p=surge / surge.sum() if middle else share))
        prompt = _lengths(rng, 1, mean=means[0][tenant], sigma=0.5, most=8192)[0]
        output = _lengths(rng, 1, mean=means[1][tenant], sigma=0.5, most=1024)[0]
        requests.append(_request(number, arrival, prompt, output, tenant=f"tenant-{tenant}"))
    return requests


def _heavy_tails(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Pareto lengths (shape 1.2): most requests are short, and a few have much of all tokens."""
    prompts = np.minimum(100 * (1 + rng.pareto(1.2, count)), MAX_PROMPT_TOKENS)
    outputs = np.minimum(25 * (1 + rng.pareto(1.2, count)), MAX_OUTPUT_TOKENS)
    arrivals = _poisson(rng, count, rate)
    return [_request(i, arrivals[i], prompts[i], outputs[i]) for i in range(count)]


def _chatbot(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """One system prompt of 1,024 tokens, and a question behind it of about 100."""
    system = list(range(16))
    outputs = _lengths(rng, count, mean=120, sigma=0.6, most=1024)
    questions = _lengths(rng, count, mean=100, sigma=0.6, most=1024)
    arrivals = _poisson(rng, count, rate)
    first_own = len(system) * BLOCK_TOKENS
    return [
        _request(i, arrivals[i], first_own + questions[i], outputs[i], system) for i in range(count)
    ]


def _documents(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Questions about 64 documents of 2,048 tokens, some of which are asked about more often."""
    chances = _zipf(64)
    outputs = _lengths(rng, count, mean=80, sigma=0.6, most=1024)
    questions = _lengths(rng, count, mean=60, sigma=0.6, most=1024)
    requests = []
    for number, arrival in enumerate(_poisson(rng, count, rate)):
        document = int(rng.choice(64, p=chances))
        ids = [document * 32 + block for block in range(32)]
        prompt = len(ids) * BLOCK_TOKENS + questions[number]
        requests.append(_request(number, arrival, prompt, outputs[number], ids))
    return requests


def _agents(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Agents with 1,024 tokens of tools in common, each of up to 24 steps. The prompt of a step is
    the one before with what the agent has seen since, one to eight blocks, a second or so later."""
    drafts: list[tuple[float, int, list[int], float, int | None]] = []
    began, next_id = 0.0, 16
    while len(drafts) < count:
        began += float(rng.exponential(12.5 / rate))
        arrival, ids, think = began, list(range(16)), 0.0
        before: int | None = None
        for _ in range(min(int(rng.integers(1, 25)), count - len(drafts))):
            seen = int(rng.integers(1, 9))
            ids += range(next_id, next_id + seen)
            next_id += seen
            output = _lengths(rng, 1, mean=60, sigma=0.6, most=512)[0]
            drafts.append((arrival, output, ids.copy(), think, before))
            before = len(drafts) - 1
            think = 0.5 + float(rng.exponential(1.0))
            arrival += think
    in_time = sorted(range(len(drafts)), key=lambda index: drafts[index][0])
    number_of = {index: number for number, index in enumerate(in_time)}
    requests = []
    for number, index in enumerate(in_time):
        arrival, output, ids, think, before = drafts[index]
        follows = None if before is None else number_of[before]
        request = _request(number, arrival, len(ids) * BLOCK_TOKENS, output, ids)
        requests.append(replace(request, follows=follows, think_seconds=think))
    return requests


def _unique_prompts(rng: np.random.Generator, count: int, rate: float) -> list[TraceRequest]:
    """Prompts of about 600 tokens that have nothing in common, as those of translations."""
    prompts = _lengths(rng, count, mean=600, sigma=0.6, most=8192)
    outputs = _lengths(rng, count, mean=400, sigma=0.6, most=2048)
    arrivals = _poisson(rng, count, rate)
    return [_request(i, arrivals[i], prompts[i], outputs[i]) for i in range(count)]


WORKLOADS: dict[str, Callable[[np.random.Generator, int, float], list[TraceRequest]]] = {
    "prefix-trees": _prefix_trees,
    "conversations": _conversations,
    "bursts": _bursts,
    "tenants": _tenants,
    "heavy-tails": _heavy_tails,
    "chatbot": _chatbot,
    "documents": _documents,
    "agents": _agents,
    "unique-prompts": _unique_prompts,
}


def _request(
    number: int,
    arrival: float,
    prompt: float,
    output: float,
    ids: list[int] | None = None,
    *,
    tenant: str = "",
) -> TraceRequest:
    return TraceRequest(
        number,
        float(arrival),
        max(1, int(prompt)),
        max(1, int(output)),
        tuple(ids or ()),
        BLOCK_TOKENS if ids else max(1, int(prompt)),
        tenant=tenant,
    )


def _poisson(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    return np.cumsum(rng.exponential(1 / rate, count)).tolist()


def _lengths(
    rng: np.random.Generator, count: int, *, mean: float, sigma: float, most: int
) -> list[int]:
    """Return log-normal lengths that have this mean before they are cut at `most`."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 1, most).astype(int).tolist()


def _zipf(count: int) -> np.ndarray:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()
