"""The requests of a run: their source, and their arrivals, forecasts, priorities and targets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from aioserve.arguments import counted
from aioserve.errors import ConfigError
from aioserve.hints import MAX_PRIORITY, MIN_PRIORITY
from aioserve.isolation import shown
from aioserve.sampling_params import MAX_SEED
from aioserve.traces.checks import check_int, check_number, number_in
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import (
    MAX_ARRIVAL_SECONDS,
    MAX_ASKED_TOKENS,
    MAX_RATE,
    MAX_REQUESTS,
    MAX_TARGET_SECONDS,
    TraceRequest,
    at_rate,
    checked_requests,
    with_scaled_lengths,
)

__all__ = [
    "ARRIVALS",
    "PREDICTORS",
    "WorkloadOptions",
    "is_drawn",
    "with_arrivals",
    "with_predictions",
    "with_targets",
    "workload",
]

SYNTHETIC_REQUESTS = 500
SYNTHETIC_RATE = 4.0
ARRIVALS = ("recorded", "poisson", "gamma:CV")
MAX_VARIATION = 100.0
PREDICTORS = ("oracle", "noisy:ERROR", "constant:TOKENS", "by-tenant")
MAX_ERROR = 10.0
"""Largest error of `noisy`: a factor of 22,000 either way is nothing extraordinary there."""


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Options of the requests of a run."""

    num_requests: int | None = None
    """Requests of a made-up workload (500 when not given), or of a trace this many of the first, by
    their times.
    """
    arrivals: str = "recorded"
    """Times of requests: recorded, poisson, or gamma:CV with a coefficient of variation of the
    pauses. Unless recorded, they are drawn from the seed, at the rate; a trace then only needs
    lengths.
    """
    closed_loop: bool = False
    """Let a turn come its caller's time to think after the answer before it has ended, if the trace
    tells which follows which. Drawn arrivals are then those of sessions.
    """
    predictor: str | None = None
    """Forecast of each answer's length for policies to see: oracle, noisy:ERROR, constant:TOKENS or
    by-tenant. Not given: that of the trace, if any.
    """
    priority: Sequence[str] = ()
    """TENANT=NUMBER: the priority of a tenant's requests, for policies to see; 0 when not given.
    May be given several times.
    """
    ttft_target_seconds: float | str | Sequence[float | str] | None = ()
    """SECONDS, within which a good answer's first token comes, or NAME=SECONDS for a tenant or a
    class. Defines goodput, and policies see it. May be given several times.
    """
    tpot_target_seconds: float | str | Sequence[float | str] | None = ()
    """SECONDS, the most that each further token of a good answer takes on average, or NAME=SECONDS.
    Like --ttft-target-seconds.
    """
    deadline_seconds: float | str | Sequence[float | str] | None = ()
    """SECONDS after its arrival when a request is ended, or NAME=SECONDS. Like
    --ttft-target-seconds.
    """
    scale_lengths: float = 1.0
    """Factor of the tokens of prompts, answers and shared blocks, for example 0.0625."""
    rate: float | None = None
    """Requests a second; arrivals are stretched evenly. Not given: as recorded, or 4."""
    seed: int | None = None
    """Key of all that is drawn: a made-up workload, arrivals, a noisy predictor, and the noise of a
    cost table's steps; 0 when not given.
    """

    def draws(self, source: object) -> bool:
        """Return true if anything of this workload is drawn from its seed."""
        made_up = isinstance(source, str)
        noisy = isinstance(self.predictor, str) and self.predictor.startswith("noisy:")
        return made_up or noisy or is_drawn(self.arrivals)


def workload(
    source: str | Path | Sequence[TraceRequest], options: WorkloadOptions
) -> list[TraceRequest]:
    """Return the requests of a made-up workload, by its name, of a file, by its path, or those
    given.

    Raises `TraceError` for a file, and `ConfigError` for options that make no sense together.
    """
    num_requests, rate, seed = options.num_requests, options.rate, options.seed
    if num_requests is not None:
        check_int("num_requests", num_requests, 1, MAX_REQUESTS)
    if seed is not None:
        check_int("seed", seed, 0, MAX_SEED)
    drawn, closed_loop = is_drawn(options.arrivals), options.closed_loop
    drawn_rate = SYNTHETIC_RATE if rate is None else rate
    if isinstance(source, str):
        count = num_requests or SYNTHETIC_REQUESTS
        requests = synthetic_trace(source, count, rate=drawn_rate, seed=seed or 0)
    else:
        requests = _first(source, num_requests, timed=not drawn)
        if drawn and rate is None:
            raise ConfigError(f"arrivals: {shown(options.arrivals)} needs a rate")
        if rate is not None and not drawn:
            requests = at_rate(requests, rate)
    if closed_loop:
        _check_turns(requests, rate, drawn or isinstance(source, str))
    if drawn:
        requests = with_arrivals(
            requests, options.arrivals, rate=drawn_rate, seed=seed or 0, closed_loop=closed_loop
        )
    if options.scale_lengths != 1.0:
        requests = with_scaled_lengths(requests, options.scale_lengths)
    if options.predictor is not None:
        requests = with_predictions(requests, options.predictor, seed=seed or 0)
    requests = with_targets(
        requests,
        ttft_target_seconds=options.ttft_target_seconds,
        tpot_target_seconds=options.tpot_target_seconds,
        deadline_seconds=options.deadline_seconds,
    )
    return _with_priorities(requests, options.priority)


def _first(
    source: Path | Sequence[TraceRequest], count: int | None, *, timed: bool
) -> list[TraceRequest]:
    if isinstance(source, Path):
        return read_trace(source, timed=timed)[:count]
    return checked_requests(source)[:count]


def _check_turns(requests: Sequence[TraceRequest], rate: float | None, rate_counts: bool) -> None:
    """Raise if a closed loop has no turns that follow others, or if a rate would change nothing in
    it.
    """
    if all(request.follows is None for request in requests):
        raise ConfigError(
            "closed_loop: of no request is it known which one it follows, so leave it out"
        )
    begin = {request.arrival_seconds for request in requests if request.follows is None}
    if rate is not None and not rate_counts and len(begin) == 1:
        raise ConfigError(
            f"rate: in a closed loop all sessions of the trace begin at once, got {shown(rate)}: "
            "give arrivals, poisson or gamma:CV, which draw when they begin"
        )


def _with_priorities(requests: list[TraceRequest], given: Sequence[str]) -> list[TraceRequest]:
    """Set the priorities of tenants.

    Raises `ConfigError` for a tenant that isn't in the trace, or comes twice, and for an invalid
    priority.
    """
    tenants = {request.tenant for request in requests if request.tenant}
    priorities: dict[str, int] = {}
    for one in given:
        tenant, equals, number = one.rpartition("=")
        if not equals or tenant in priorities or tenant not in tenants:
            raise ConfigError(
                f"priority must be TENANT=NUMBER, once for each tenant of the trace "
                f"({', '.join(sorted(tenants)[:8]) or 'it tells of none'}), got {shown(one)}"
            )
        priorities[tenant] = number_in(number, f"priority of {tenant}", int)
        check_int(f"priority of {tenant}", priorities[tenant], MIN_PRIORITY, MAX_PRIORITY)
    if not priorities:
        return requests
    return [replace(r, priority=priorities.get(r.tenant, 0)) for r in requests]


def with_targets(
    trace: Sequence[TraceRequest],
    **targets: float | str | Sequence[float | str] | None,
) -> list[TraceRequest]:
    """Return the trace with targets, by the names that they have in `TraceRequest`.

    Each is seconds, for all requests without a target of the trace's own. Or it is texts such as
    `0.5` and `ann=2`: for the requests of a tenant or a class, whatever the trace says of them. A
    tenant's value precedes that of a class.

    Raises `ConfigError` for a name that no request has, or that is both a tenant and a class, and
    for one that comes twice. Also for seconds that aren't more than 0 and at most
    `MAX_TARGET_SECONDS`.
    """
    given = {target: _seconds_by_name(target, trace, one) for target, one in targets.items()}
    given = {target: by_name for target, by_name in given.items() if by_name}
    if not given:
        return list(trace)
    return [
        replace(request, **{target: _target(target, request, given[target]) for target in given})
        for request in trace
    ]


def _target(target: str, request: TraceRequest, by_name: dict[str, float]) -> float | None:
    own: float | None = getattr(request, target)
    for_all = by_name.get("") if own is None else own
    of_class = by_name.get(request.request_class, for_all) if request.request_class else for_all
    return by_name.get(request.tenant, of_class) if request.tenant else of_class


def _seconds_by_name(
    target: str, trace: Sequence[TraceRequest], given: float | str | Sequence[float | str] | None
) -> dict[str, float]:
    """Return seconds by tenant or class, those for all under the empty name."""
    if given is None:
        return {}
    several: Sequence[Any] = given if isinstance(given, list | tuple) else (given,)
    found: dict[str, float] = {}
    if not several:
        return found
    tenants = {request.tenant for request in trace}
    classes = {request.request_class for request in trace}
    for one in several:
        name, seconds = "", cast("float", one)
        if isinstance(one, str):
            name, _, text = str.__str__(one).rpartition("=")
            seconds = number_in(text, f"{target} of {name}" if name else target, float)
        if name and name not in tenants | classes:
            names = ", ".join(sorted((tenants | classes) - {""})[:8]) or "it tells of none"
            raise ConfigError(
                f"{target} must be SECONDS or NAME=SECONDS with a tenant or a class of the trace "
                f"({names}), got {shown(one)}"
            )
        if name and name in tenants & classes:
            raise ConfigError(f"{target}: {shown(name)} is both a tenant and a class of the trace")
        if name in found:
            raise ConfigError(f"{target}: {shown(one)} comes after another one for the same")
        check_number(f"{target} of {name}" if name else target, seconds, MAX_TARGET_SECONDS)
        found[name] = float(seconds)
    return found


def is_drawn(arrivals: str) -> bool:
    """Return true if arrivals are drawn from a seed. Raises `ConfigError` for unknown ones
    (`ARRIVALS`).
    """
    return _variation(arrivals) is not None


def with_arrivals(
    trace: Sequence[TraceRequest],
    arrivals: str,
    *,
    rate: float,
    seed: int = 0,
    closed_loop: bool = False,
) -> list[TraceRequest]:
    """Return the trace with drawn times, in its order and from 0 on: about `rate` requests a
    second.

    In a `closed_loop` only requests that follow none have times, so `rate` sessions begin in a
    second.

    - `recorded`: the times of the trace.
    - `poisson`: exponential pauses, as from many independent callers.
    - `gamma:CV`: pauses of a gamma distribution whose standard deviation is CV times its mean. With
      1 it is `poisson`; with more it has bursts, with less it is more even.

    Raises `ConfigError` for an invalid rate, seed or arrivals, and for a rate that makes the trace
    too long.
    """
    variation = _variation(arrivals)
    if variation is None:
        return list(trace)
    check_number("rate", rate, MAX_RATE)
    check_int("seed", seed, 0, MAX_SEED)
    shape = 1 / variation**2
    drawn = [index for index, r in enumerate(trace) if not (closed_loop and r.follows is not None)]
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        times = np.cumsum(rng.gamma(shape, 1 / shape, len(drawn)) / rate)
    times -= times[0] if len(times) else 0.0
    if len(times) and not times[-1] <= MAX_ARRIVAL_SECONDS:
        raise ConfigError(
            f"rate {rate} makes {counted(len(drawn), 'request')} take {times[-1]:g} s; "
            f"it may be at most {MAX_ARRIVAL_SECONDS:g}"
        )
    made = list(trace)
    for index, seconds in zip(drawn, times.tolist(), strict=True):
        made[index] = replace(trace[index], arrival_seconds=seconds)
    return made


def _variation(arrivals: str) -> float | None:
    """Return the coefficient of variation of the pauses; None for `recorded`."""
    if type(arrivals) is str:
        name, colon, text = arrivals.partition(":")
        if (name, colon) in (("recorded", ""), ("poisson", "")):
            return None if name == "recorded" else 1.0
        if (name, colon) == ("gamma", ":"):
            variation = number_in(text, "arrivals: gamma", float)
            check_number("arrivals: gamma", variation, MAX_VARIATION)
            if variation < 0.01:
                raise ConfigError(f"arrivals: gamma must be at least 0.01, got {variation}")
            return variation
    raise ConfigError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {shown(arrivals)}")


def with_predictions(
    trace: Sequence[TraceRequest], predictor: str, *, seed: int = 0
) -> list[TraceRequest]:
    """Return the trace with the forecasts of one of `PREDICTORS` in place of its own.

    One seed gives one forecast, whatever the arrivals are. Raises `ConfigError`.

    A policy never sees the recorded length. A service may have a forecast of it, and a policy's
    gain depends on its quality:

    - `oracle`: the recorded length itself, an upper bound for what any forecast can bring.
    - `noisy:ERROR`: the recorded length times `exp(ERROR * z)`, with `z` drawn from a standard
      normal distribution. This log-normal error is as often above 1 as below. With an error of 0.5
      two of three forecasts are between 0.61 and 1.65 times the length.
    - `constant:TOKENS`: the same for all.
    - `by-tenant`: the mean length of the same tenant's earlier answers, by arrival. For a tenant's
      first, it is the mean of all earlier answers; the very first has none. Some of those answers
      may not have ended yet when the request comes.
    """
    check_int("seed", seed, 0, MAX_SEED)
    name, value = _split(predictor)
    if name == "oracle":
        made: Iterable[float | None] = [request.output_tokens for request in trace]
    elif name == "constant":
        made = [_tokens(value)] * len(trace)
    elif name == "by-tenant":
        made = _means_before(trace)
    else:
        errors = np.random.default_rng(seed).standard_normal(len(trace))
        factors = np.exp(_error(value) * errors)
        made = (factors * [request.output_tokens for request in trace]).tolist()
    return [
        replace(request, predicted_output_tokens=None if tokens is None else _whole(tokens))
        for request, tokens in zip(trace, made, strict=True)
    ]


def _split(predictor: str) -> tuple[str, str]:
    if type(predictor) is str:
        name, colon, value = predictor.partition(":")
        for kind in PREDICTORS:
            known, needs_value, _ = kind.partition(":")
            if (name, colon) == (known, needs_value):
                return name, value
    raise ConfigError(f"predictor must be one of {', '.join(PREDICTORS)}, got {shown(predictor)}")


def _tokens(text: str) -> int:
    tokens = number_in(text, "predictor: constant", int)
    check_int("predictor: constant", tokens, 1, MAX_ASKED_TOKENS)
    return tokens


def _error(text: str) -> float:
    error = number_in(text, "predictor: noisy", float)
    check_number("predictor: noisy", error, MAX_ERROR, above=None)
    return error


def _means_before(trace: Sequence[TraceRequest]) -> list[float | None]:
    tokens, counts = defaultdict[str, int](int), defaultdict[str, int](int)
    means: list[float | None] = [None] * len(trace)
    total = 0
    by_arrival = sorted(range(len(trace)), key=lambda index: trace[index].arrival_seconds)
    for before, index in enumerate(by_arrival):
        tenant, length = trace[index].tenant, max(1, trace[index].output_tokens)
        if counts[tenant]:
            means[index] = tokens[tenant] / counts[tenant]
        elif before:
            means[index] = total / before
        tokens[tenant] += length
        counts[tenant] += 1
        total += length
    return means


def _whole(tokens: float) -> int:
    return int(min(max(1, math.floor(tokens + 0.5)), MAX_ASKED_TOKENS))
