"""Options of simulated runs, each declared once, with checks before anything is simulated.

Flags and help of `aioserve simulate` and `aioserve sweep` are made from these fields, and so are
the arguments of `replay` and `simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

from aioserve.arguments import counted
from aioserve.config import MAX_BATCHED_TOKENS, MAX_COUNT, MAX_SEQS, Preemption
from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.kv.eviction import Eviction, EvictionStrategy, StrategyCalls
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.paging.pages import pages_for
from aioserve.sampling_params import MAX_DRAFT_TOKENS, MAX_SEED
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.cost import CostModel, check_windows
from aioserve.simulation.records import recorded_length
from aioserve.simulation.speculation import acceptance_by_place
from aioserve.simulation.timeline import Timeline
from aioserve.traces.checks import check_int, named
from aioserve.traces.trace_request import TraceRequest, checked_requests
from aioserve.traces.workload import WorkloadOptions

__all__ = [
    "SchedulerOptions",
    "SimulationOptions",
    "TrialOptions",
    "by_name",
    "check_options",
    "in_order",
    "large_pool",
    "pages_needed",
]

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
Options = TypeVar("Options")
R = TypeVar("R")

LEAST_UNBOUNDED_PAGES = 1 << 16
MAX_PAGES = 1 << 25
"""Most pages. Each takes 17 bytes, and 4 for each of its cached tokens."""
MAX_WINDOW_GROUPS = 1024
MAX_GROUP_PAGES = 1 << 27
"""Most window pages beside all pages, of 4 bytes each."""
LIMITS = {
    "num_pages": (1, MAX_PAGES),
    "page_size": (1, 1 << 16),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, MAX_BATCHED_TOKENS),
    "output_reserve_tokens": (0, MAX_COUNT),
    "max_tokens": (1, MAX_COUNT),
    "max_model_len": (2, MAX_COUNT),
    "num_host_pages": (0, MAX_PAGES),
    "num_window_groups": (0, MAX_WINDOW_GROUPS),
    "window": (0, MAX_COUNT),
    "speculation_max_tokens": (0, MAX_DRAFT_TOKENS),
    "acceptance_seed": (0, MAX_SEED),
}
MAY_BE_NONE = ("num_pages", "max_tokens", "max_model_len")


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of the scheduler, its KV memory, and of requests."""

    num_pages: int | None = None
    """KV pages. Not given: as many as the devices' memory holds, or that of the machine that a cost
    table was measured on.
    """
    num_host_pages: int = 0
    """Pages of the host's memory, to which cached pages and preempted requests are swapped."""
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one step."""
    output_reserve_tokens: int = 64
    """Tokens of answer that a request needs room for, beside its prompt, to be started."""
    max_tokens: int | None = None
    """Most tokens of an answer, for requests of the trace without a limit of their own. Not given:
    as many as the KV memory holds.
    """
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer. Not given: what a cost table says, or as many as the
    KV memory holds.
    """
    prefix_caching: bool = True
    """Start requests from their cached prefixes."""
    eviction: Eviction = "lru"
    """Cached pages that go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    preemption: Preemption = "auto"
    """Treatment of a preempted request's pages: swap, recompute, or auto."""
    overlap: bool = True
    """Plan a step while the one before is running."""
    speculation_max_tokens: int = 0
    """Most draft tokens of a sequence in one step; 0: no drafter."""
    acceptance: float | str | None = None
    """Chance that a draft token is right if those before it in its step are. It may be a chance for
    each place, with commas between them; the last is that of all further places. Not given: that of
    the trace.
    """


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(SchedulerOptions):
    """Options of `simulate`, which knows no machine: without `num_pages` memory has no limit."""

    cost: CostModel
    num_pages: int | None = field()
    num_window_groups: int = 0
    """Groups of layers whose pages leave with the window, as in `KVLayout`. Each page of the others
    comes with one page of each group while a request sees it.
    """
    window: int = 0
    """Last positions that these groups keep, in tokens; 0 without window groups."""
    closed_loop: bool = False
    noise_seed: int | None = None
    """Seed of the noise of a cost table's steps; None: each takes its mean."""
    acceptance_seed: int = 0
    """Seed of the draws that decide which draft tokens are right."""
    timeline: Timeline | None = None
    """Empty timeline that records every step; None: nothing is recorded."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with the requests that have ended and all requests, at most once a step."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions(SchedulerOptions, WorkloadOptions):
    """Options of a simulated run, except its trace and its policy."""

    model: str | None = None
    """A preset, llama-3-8b when not given, a config.json, a model directory, an embedded model or a
    cached hub id. Its weights aren't read.
    """
    hardware: str | None = None
    """Hardware: h200, h100 (when not given), a100, l4, or cpu, which is a rough guess."""
    num_devices: int | None = None
    """Devices that share model and memory evenly, 1 when not given. Time for communication between
    them isn't counted.
    """
    cost_table: str | None = None
    """File of measured steps, in place of the roofline of model and hardware. These then only
    determine the number of pages. It is a file of `aioserve calibrate`, or a splitwise latency
    profile as FILE:MODEL,HARDWARE,TENSOR_PARALLEL.
    """
    step_noise: bool | None = None
    """Vary steps of a cost table as they varied when measured, drawn from the seed. On by default
    for a table with noise. Off: each step takes its mean.
    """
    unbounded_cache: bool = False
    """Simulate KV memory without a limit."""
    cost: CostModel | None = None
    """Cost model in place of a model and its hardware, or of a table's file."""


def by_name(
    options: Callable[P, Options],
) -> Callable[[Callable[[A, B, Options], R]], Callable[Concatenate[A, B, P], R]]:
    """Let a function of a trace, a policy and options take the fields of its options by name."""

    def decorated(function: Callable[[A, B, Options], R]) -> Callable[Concatenate[A, B, P], R]:
        call, made = function.__name__, options.__qualname__

        @wraps(function)
        def named(trace: A, policy: B, *args: P.args, **values: P.kwargs) -> R:
            if args:
                given = 2 + len(args)
                raise TypeError(f"{call}() takes 2 positional arguments but {given} were given")
            try:
                own = options(*args, **values)
            except TypeError as error:  # its message names the dataclass, which no caller wrote
                raise TypeError(str(error).replace(f"{made}.__init__()", f"{call}()")) from None
            return function(trace, policy, own)

        own, fields = signature(function), signature(options)
        first = list(own.parameters.values())[:2]
        shown = own.replace(parameters=[*first, *fields.parameters.values()])
        setattr(named, "__signature__", shown)  # noqa: B010
        hints = {**function.__annotations__, **get_type_hints(options)}
        named.__annotations__ = {name: hints[name] for name in (*shown.parameters, "return")}
        return named

    return decorated


def check_options(policy: Any, options: SimulationOptions) -> None:
    """Raise `ConfigError` for an option outside its range, or without effect beside another."""
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if value is not None or name not in MAY_BE_NONE:
            check_int(name, value, least, most)
    _check_objects(policy, options.cost, options.timeline, options.on_progress)
    for name in ("prefix_caching", "overlap", "closed_loop"):
        if type(flag := getattr(options, name)) is not bool:
            raise ConfigError(f"{name} must be a bool, got {shown(flag)}")
    _check_windows(options)
    _check_eviction(options.eviction, options.prefix_caching, options.num_pages)
    _check_host(options)
    _check_speculation(options)


def _check_objects(policy: Any, cost: Any, timeline: Any, on_progress: Any) -> None:
    with named("simulate"):
        if not isinstance(policy, SchedulingPolicy):
            raise ConfigError(f"policy must be a SchedulingPolicy, got {shown(policy)}")
        if isinstance(cost, type) or not callable(getattr(cost, "step_seconds", None)):
            raise ConfigError(f"cost must have a method step_seconds, got {shown(cost)}")
        if timeline is not None and (not isinstance(timeline, Timeline) or len(timeline)):
            raise ConfigError(f"timeline must be an empty Timeline, got {shown(timeline)}")
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress must be callable, got {shown(on_progress)}")


def _check_windows(options: SimulationOptions) -> None:
    """Raise for window groups without a window or a window without groups, and for invalid page
    counts.

    There must be at least one page of each group, and at most as many as can be recorded.
    """
    groups = options.num_window_groups
    check_windows(groups, options.window)
    for name, least in (("num_pages", 1 + groups), ("num_host_pages", 0)):
        if (pages := getattr(options, name)) is not None:
            check_int(f"with num_window_groups={groups}, {name}", pages, least, _most_pages(groups))


def _most_pages(num_window_groups: int) -> int:
    return min(MAX_PAGES, MAX_GROUP_PAGES // max(1, num_window_groups))


def _check_host(options: SimulationOptions) -> None:
    """Raise for an unknown kind of preemption, for one that needs host pages that aren't there, and
    for host pages without use.
    """
    num_host_pages, preemption = options.num_host_pages, options.preemption
    if type(preemption) is not str or preemption not in get_args(Preemption):
        known = ", ".join(get_args(Preemption))
        raise ConfigError(f"preemption must be one of {known}, got {shown(preemption)}")
    if num_host_pages == 0:
        if preemption == "swap":
            raise ConfigError("preemption='swap' needs num_host_pages of at least 1, got 0")
        return
    idle = "without a limit of pages" if options.num_pages is None else None
    if not options.prefix_caching and preemption == "recompute":
        idle = "with prefix_caching=False and preemption='recompute'"
    if idle is not None:
        raise ConfigError(
            f"num_host_pages={num_host_pages} has no effect {idle}: nothing is ever copied to the "
            "host, so leave one of them out"
        )


def _check_speculation(options: SimulationOptions) -> None:
    """Raise for an invalid chance, and for one without draft tokens."""
    acceptance_by_place(options.acceptance)
    if options.acceptance is not None and not options.speculation_max_tokens:
        raise ConfigError(
            f"acceptance={shown(options.acceptance)} has no effect with speculation_max_tokens=0: "
            "nothing drafts, so leave one of them out"
        )


def _check_eviction(eviction: Any, prefix_caching: Any, num_pages: int | None) -> None:
    """Raise for an invalid eviction strategy, and for one that has nothing to decide."""
    with named("eviction"):
        if type(eviction) is str:
            if eviction not in EVICTION_STRATEGIES:
                known = ", ".join(EVICTION_STRATEGIES)
                raise ConfigError(f"eviction must be one of {known}, got {shown(eviction)}")
        elif isinstance(eviction, type | str) or not isinstance(
            eviction, StrategyCalls | EvictionStrategy
        ):
            raise ConfigError(
                f"eviction must be a name or have a method key, got {shown(eviction)}"
            )
    if eviction == "lru":
        return
    idle = "without a limit of pages: none is ever evicted" if num_pages is None else None
    if not prefix_caching:
        idle = "with prefix_caching=False: no page is cached"
    if idle is not None:
        name = eviction.label if isinstance(eviction, StrategyCalls) else shown(eviction)
        raise ConfigError(f"eviction={name} has no effect {idle}, so leave one of them out")


def in_order(trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return requests by arrival. Raises `TraceError` for an invalid trace."""
    requests = checked_requests(trace)
    numbers: set[int] = set()
    for place, request in enumerate(requests):
        # Tokens that only one request has are made from its number.
        if request.number in numbers:
            raise TraceError(f"trace[{place}]: another request has the number {request.number}")
        numbers.add(request.number)
    return sorted(requests, key=attrgetter("arrival_seconds"))


def pages_needed(trace: list[TraceRequest], page_size: int, num_window_groups: int = 0) -> int:
    """Return the number of pages that could ever be needed, those of window groups included."""
    needed = 1 + sum(pages_for(recorded_length(request), page_size) for request in trace)
    needed *= 1 + num_window_groups
    # The pool is rounded up to a power of two.
    most = 1 << (_most_pages(num_window_groups).bit_length() - 1)
    if needed > most:
        raise ConfigError(
            f"num_pages=None: without a limit the trace could need {needed} pages of "
            f"{counted(page_size, 'token')}, and at most {most} can be simulated: give a "
            "limit, or larger pages"
        )
    return needed


def large_pool(needed: int) -> int:
    """Return the number of pages of a pool that is large enough.

    Policies see it, so it is a round number: it tells only the order of magnitude of the
    completions.
    """
    return max(LEAST_UNBOUNDED_PAGES, 1 << (needed - 1).bit_length())
