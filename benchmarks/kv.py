"""Measures KV memory on the host: microseconds of the scheduler's work in every step.

    python benchmarks/kv.py [--trace mooncake_conversation.jsonl.gz] [--json results.json]

It measures matching, inserting and evicting in the prefix tree, and a recorded trace replayed
through tree and page pool. A prefix tree in plain Python does the same work (`radix_baseline.py`).
The two take turns in one process and must find the same pages. It also measures `Scheduler.plan` of
a step of many running sequences while many more wait.

Of each operation it prints the median, the 99th percentile, and the ratio of the baseline's median
to that of the native tree. The trees hold many other prompts besides. Without a trace in Mooncake's
format (`--trace`, or `../shared/traces` beside the repository), a made-up one of its shape is
replayed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from radix_baseline import RadixTree

from aioserve import _native
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.paging.pages import pages_for
from aioserve.request import Request, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.traces.formats import MOONCAKE_BLOCK_TOKENS, read_mooncake
from aioserve.traces.trace_request import TraceRequest

Ids = npt.NDArray[np.int32]

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation.jsonl.gz"
PAGE_SIZE = 16
CHUNK_TOKENS = 512
VOCABULARY = 150_000
MADE_UP_REQUESTS = 1000


class NativeCache:
    """Cache of a `PrefixTree` over a `PagePool`."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.tree = PrefixTree(self.pool)
        self.acquire = self.pool.acquire

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def match(self, ids: Ids) -> tuple[Any, Ids]:
        """Return the lock of the cached prefix, and its pages."""
        match = self.tree.match(b"", ids, partial=False)
        self.pool.retain(match.page_ids)
        return match.receipt, match.page_ids

    def insert(self, lock: Any, ids: Ids, pages: Ids) -> Any:
        self.tree.insert(lock, ids, pages, 0)
        return lock

    def release(self, lock: Any, published: Ids, own: Ids) -> None:
        """End a request: the tree keeps its published pages, and its own pages are freed."""
        self.tree.release(lock)
        self.pool.release(published, NO_STEP)
        self.pool.release(own, NO_STEP)

    def evict(self, num_pages: int) -> None:
        self.tree.evict(num_pages, 0)


class PythonCache:
    """Cache of the baseline."""

    def __init__(self, num_pages: int) -> None:
        self.tree = RadixTree(num_pages, PAGE_SIZE)
        self.acquire = self.tree.acquire
        self.match = self.tree.match
        self.insert = self.tree.insert
        self.evict = self.tree.evict

    @property
    def num_free(self) -> int:
        return len(self.tree.free)

    def release(self, lock: Any, published: Ids, own: Ids) -> None:
        self.tree.release(lock)
        self.tree.free += own.tolist()


Cache = NativeCache | PythonCache
NOTHING = np.empty(0, np.int32)


class Report:
    """Timings by operation, of the native tree and of the baseline."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(f"{'':<44} {'median us':>10} {'p99 us':>10} {'baseline':>10} {'ratio':>7}")

    def add(self, name: str, ours: list[float], theirs: list[float] | None = None) -> None:
        row: dict[str, Any] = {"name": name, "calls": len(ours)}
        row["median_us"], row["p99_us"] = np.percentile(ours, [50, 99]).tolist()
        line = f"{name:<44} {row['median_us']:>10.1f} {row['p99_us']:>10.1f}"
        if theirs:
            row["baseline_median_us"] = float(np.median(theirs))
            row["ratio"] = row["baseline_median_us"] / row["median_us"]
            line += f" {row['baseline_median_us']:>10.1f} {row['ratio']:>7.1f}"
        self.rows.append(row)
        print(line, flush=True)


def microseconds(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter_ns()
    result = call(*arguments)
    return (time.perf_counter_ns() - start) / 1000, result


def cache_prompt(cache: Cache, ids: Ids, chunk_tokens: int) -> float:
    """Put a prompt of whole pages into the tree, chunk by chunk.

    Its first pages may be there already. Returns the microseconds that `insert` took in all.
    """
    lock, found = cache.match(ids)
    ids = ids[len(found) * PAGE_SIZE :]
    pages = cache.acquire(len(ids) // PAGE_SIZE)
    total = 0.0
    for start in range(0, len(ids), chunk_tokens):
        chunk = ids[start : start + chunk_tokens]
        its_pages = pages[start // PAGE_SIZE :][: len(chunk) // PAGE_SIZE]
        spent, lock = microseconds(cache.insert, lock, chunk, its_pages)
        total += spent
    cache.release(lock, np.concatenate([found, pages]), NOTHING)
    return total


def random_prompts(random: np.random.Generator, count: int, tokens: int) -> Iterator[Ids]:
    for _ in range(count):
        yield random.integers(0, VOCABULARY, tokens, np.int32)


def filled_caches(num_pages: int) -> tuple[NativeCache, PythonCache]:
    """Return caches of `num_pages` pages and as many again, which hold other prompts."""
    caches = NativeCache(2 * num_pages), PythonCache(2 * num_pages)
    random = np.random.default_rng(0)
    tokens = 128 * PAGE_SIZE
    for ids in random_prompts(random, num_pages // 128, tokens):
        for cache in caches:
            cache_prompt(cache, ids, tokens)
    return caches


def measure_match(report: Report, tokens: int, repeats: int) -> None:
    random = np.random.default_rng(1)
    (ids,) = random_prompts(random, 1, tokens)
    for name, branches in ("", 0), (", a branch at each page", tokens // PAGE_SIZE):
        caches = filled_caches(4 * tokens // PAGE_SIZE)
        for cache in caches:
            cache_prompt(cache, ids, CHUNK_TOKENS)
            for page in range(branches):
                cache_prompt(cache, other_at(ids, page), tokens)
        timings: list[list[float]] = [[], []]
        for _ in range(repeats):
            for cache, spent in zip(caches, timings, strict=True):
                microseconds_spent, (lock, pages) = microseconds(cache.match, ids)
                assert len(pages) == tokens // PAGE_SIZE
                cache.release(lock, pages, NOTHING)
                spent.append(microseconds_spent)
        report.add(f"match {tokens:,} tokens{name}", *timings)


def other_at(ids: Ids, page: int) -> Ids:
    """Return a prompt of `page` + 1 pages that begins like `ids` and differs in the last."""
    other = ids[: (page + 1) * PAGE_SIZE].copy()
    other[-PAGE_SIZE:] += 1
    return other


def measure_insert(report: Report, tokens: int, repeats: int) -> None:
    random = np.random.default_rng(2)
    for name, chunk in ("", tokens), (f", in chunks of {CHUNK_TOKENS}", CHUNK_TOKENS):
        caches = filled_caches(repeats * tokens // PAGE_SIZE)
        timings = [
            [cache_prompt(cache, ids, chunk) for ids in random_prompts(random, repeats, tokens)]
            for cache in caches
        ]
        report.add(f"insert {tokens:,} tokens{name}", *timings)


def measure_evict(report: Report, num_pages: int, repeats: int) -> None:
    """Evict from leaves of 128 pages each, and from as many leaves as pages, below a common
    prompt.
    """
    random = np.random.default_rng(3)
    total = num_pages * repeats
    tokens = 128 * PAGE_SIZE
    (common,) = random_prompts(random, 1, tokens)
    tails = [np.concatenate([common, tail]) for tail in random_prompts(random, total, PAGE_SIZE)]
    prompts = {
        ", in leaves of 128": list(random_prompts(random, -(-total // 128), tokens)),
        ", each a leaf": tails,
    }
    for name, ids_of_all in prompts.items():
        caches = NativeCache(total + 256), PythonCache(total + 256)
        for cache in caches:
            for ids in ids_of_all:
                cache_prompt(cache, ids, tokens + PAGE_SIZE)
        timings: list[list[float]] = [[], []]
        for _ in range(repeats):
            for cache, spent in zip(caches, timings, strict=True):
                free = cache.num_free
                spent.append(microseconds(cache.evict, num_pages)[0])
                assert cache.num_free == free + num_pages
        report.add(f"evict {num_pages:,} pages{name}", *timings)


class Replay:
    """Replays requests of a trace through one cache.

    Each finds its prefix, takes pages for the rest and for its answer, publishes its prompt, and
    ends when `num_live` others have come after it.
    """

    def __init__(self, cache: Cache, num_live: int) -> None:
        self.cache = cache
        self.num_live = num_live
        self.live: deque[tuple[Any, Ids, Ids]] = deque()
        self.hit_pages = 0
        self.prompt_pages = 0
        self.timings: dict[str, list[float]] = {}

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        spent, result = microseconds(call, *arguments)
        self.timings.setdefault(name, []).append(spent)
        return result

    def take(self, ids: Ids, output_tokens: int) -> int:
        """Serve the next request; return the number of pages that it found."""
        cache = self.cache
        whole = len(ids) // PAGE_SIZE
        lock, found = self._timed("match", cache.match, ids)
        need = pages_for(len(ids) + output_tokens, PAGE_SIZE) - len(found)
        while self.live and (len(self.live) >= self.num_live or not self._make_free(need)):
            self._timed("release", cache.release, *self.live.popleft())
        self._make_free(need)
        pages = self._timed("acquire", cache.acquire, need)
        first, new = len(found) * PAGE_SIZE, whole - len(found)
        lock = self._timed(
            "insert", cache.insert, lock, ids[first : whole * PAGE_SIZE], pages[:new]
        )
        self.live.append((lock, np.concatenate([found, pages[:new]]), pages[new:]))
        self.hit_pages += len(found)
        self.prompt_pages += whole
        return len(found)

    def _make_free(self, need: int) -> bool:
        short = need - self.cache.num_free
        if short > 0:
            self._timed("evict", self.cache.evict, short)
        return self.cache.num_free >= need


def measure_replay(
    report: Report, requests: list[TraceRequest], pool_tokens: int, num_live: int
) -> dict[str, Any]:
    """Replay the requests. Those that the pool can't hold alone are left out."""
    num_pages = pages_for(pool_tokens, PAGE_SIZE)
    requests = [r for r in requests if r.prompt_tokens + r.output_tokens <= pool_tokens]
    native, python = (
        Replay(cache, num_live) for cache in (NativeCache(num_pages), PythonCache(num_pages))
    )
    for request in requests:
        ids = request.prompt_ids()
        found = [replay.take(ids, request.output_tokens) for replay in (native, python)]
        if found[0] != found[1]:
            raise AssertionError(f"request {request.number}: {found} pages found")
    for name, timings in native.timings.items():
        report.add(f"replay: {name}", timings, python.timings[name])
    seconds = [sum(map(sum, replay.timings.values())) / 1e6 for replay in (native, python)]
    result = {
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "pool_tokens": pool_tokens,
        "hit_share": native.hit_pages / native.prompt_pages,
        "us_per_request": 1e6 * seconds[0] / len(requests),
        "baseline_us_per_request": 1e6 * seconds[1] / len(requests),
        "ratio": seconds[1] / seconds[0],
    }
    print(
        f"replay of {result['requests']:,} requests, {result['prompt_tokens']:,} prompt tokens, "
        f"through a pool of {pool_tokens:,}: {result['hit_share']:.3f} of the pages found, "
        f"{result['us_per_request']:.1f} us per request, baseline "
        f"{result['baseline_us_per_request']:.1f} ({result['ratio']:.1f} times)"
    )
    return result


def made_up_trace(count: int) -> list[TraceRequest]:
    """Return chats in turns: a request continues an earlier one, less its last block, or is new."""
    random = np.random.default_rng(4)
    requests: list[TraceRequest] = []
    next_id = 0
    for number in range(count):
        earlier = requests[random.integers(number)].block_ids[:-1] if number else ()
        shared = earlier if random.random() < 0.4 else ()
        tokens = max(int(random.lognormal(8.0, 1.0)), 1)
        new = pages_for(tokens, MOONCAKE_BLOCK_TOKENS)
        ids = (*shared, *range(next_id, next_id + new))
        next_id += new
        length = len(shared) * MOONCAKE_BLOCK_TOKENS + tokens
        output = int(random.integers(1, 800))
        requests.append(
            TraceRequest(number, float(number), length, output, ids, MOONCAKE_BLOCK_TOKENS)
        )
    return requests


def measure_plan(report: Report, num_running: int, num_waiting: int, repeats: int) -> None:
    """Measure steps that decode while others wait without a seat, or with seats and no room."""
    for name, seats in ("", num_running), (", seats but no room", 2 * num_running):
        scheduler = decoding_scheduler(num_running, seats, repeats)
        step = scheduler.plan(0.0)
        too_long = np.zeros((scheduler.memory.pool.num_free + 1) * PAGE_SIZE, np.int32)
        submit(scheduler, [too_long] * num_waiting, 1)
        plans: list[float] = []
        commits: list[float] = []
        for _ in range(repeats):
            spent, next_step = microseconds(scheduler.plan, 0.0)
            plans.append(spent)
            if step is None or next_step is None or len(next_step.items) != num_running:
                raise AssertionError(f"not {num_running} sequences decode")
            commits.append(microseconds(scheduler.commit, step, outcome_of(step), 0.0)[0])
            step = next_step
        what = f"{num_running:,} running, {num_waiting:,} waiting{name}"
        report.add(f"plan, {what}", plans)
        report.add(f"commit, {what}", commits)


def decoding_scheduler(num_running: int, seats: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose sequences have prompts of up to 32 pages and `num_steps` to go."""
    random = np.random.default_rng(6)
    lengths = random.integers(1, 32 * PAGE_SIZE, num_running).tolist()
    budget = max(2048, 2 * num_running)
    answer = num_steps + 3 + 2 * sum(lengths) // budget  # the first decode while others prefill
    scheduler = Scheduler(
        KVMemory.of([sum(pages_for(n + answer, PAGE_SIZE) for n in lengths)], PAGE_SIZE),
        SchedulingPolicy(),
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        output_reserve_tokens=0,
    )
    submit(scheduler, [next(random_prompts(random, 1, n)) for n in lengths], answer)
    while any(sequence.remaining != 1 for sequence in scheduler.state.sequences.values()):
        step = scheduler.plan(0.0)
        if step is None:
            raise AssertionError("nothing to compute")
        scheduler.commit(step, outcome_of(step), 0.0)
    return scheduler


def submit(scheduler: Scheduler, prompts: list[Ids], output_tokens: int) -> None:
    for number, ids in enumerate(prompts):
        scheduler.submit(
            Request(
                request_id=f"request {number}",
                prompt_ids=ids,
                max_length=len(ids) + output_tokens,
                params=SamplingParams(),
            )
        )


def outcome_of(step: StepPlan) -> StepOutcome:
    tokens = [item.start for item in step.items for _ in item.rows]
    return StepOutcome(step=step.step, token_ids=tuple(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description="KV memory on the host, in microseconds.")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt, in whole pages")
    parser.add_argument("--evict-pages", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--trace", type=Path, help="in Mooncake's format, plain or .gz")
    parser.add_argument("--requests", type=int, help="of the trace, from its start; default all")
    parser.add_argument("--pool-tokens", type=int, default=2**22)
    parser.add_argument("--live", type=int, default=64, help="requests of the trace at once")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    if options.tokens % PAGE_SIZE:
        parser.error(f"--tokens must be a multiple of {PAGE_SIZE}, got {options.tokens}")
    if options.requests is not None and options.requests < 1:
        parser.error(f"--requests must be at least 1, got {options.requests}")
    trace = options.trace or (TRACE if TRACE.exists() else None)
    requests = read_mooncake(trace) if trace else made_up_trace(MADE_UP_REQUESTS)

    cpu = _native.cpu_info()
    print(f"{cpu}, pages of {PAGE_SIZE} tokens, trace: {trace.name if trace else 'made up'}")
    report = Report()
    measure_match(report, options.tokens, options.repeats)
    measure_insert(report, options.tokens, options.repeats)
    measure_evict(report, options.evict_pages, max(options.repeats // 5, 1))
    measure_plan(report, options.running, options.waiting, options.repeats)
    replay = measure_replay(report, requests[: options.requests], options.pool_tokens, options.live)
    if options.json:
        results = {"cpu": cpu, "rows": report.rows, "replay": replay}
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
