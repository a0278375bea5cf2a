"""The requests of a run: where they come from, and what is made of them before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError
from aioserve.hints import MAX_PRIORITY, MIN_PRIORITY
from aioserve.isolation import shown
from aioserve.request import MAX_SEED
from aioserve.traces.arrivals import is_drawn, with_arrivals
from aioserve.traces.checks import check_int, named
from aioserve.traces.formats import read_trace
from aioserve.traces.predictors import with_predictions
from aioserve.traces.request import (
    MAX_REQUESTS,
    TraceRequest,
    at_rate,
    check_request,
    with_scaled_lengths,
)
from aioserve.traces.synthetic import synthetic_trace

__all__ = ["WorkloadOptions", "workload"]

SYNTHETIC_REQUESTS = 500
SYNTHETIC_RATE = 4.0


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Options of the requests of a run."""

    num_requests: int | None = None
    """Requests of a made-up workload (500 when not given), or the first so many of a trace, by
    their times."""
    arrivals: str = "recorded"
    """When requests come: recorded, poisson, or gamma:CV with a coefficient of variation of the
    pauses. What isn't recorded is drawn from the seed, at the rate; lengths alone will do then."""
    closed_loop: bool = False
    """A turn comes its caller's time to think after the answer before it has ended, where the trace
    tells which follows which. Arrivals that are drawn are then those of sessions."""
    predictor: str | None = None
    """A forecast of each answer's length for policies to see: oracle, noisy:ERROR, constant:TOKENS
    or by-tenant. Not given: that of the trace, if any."""
    priority: Sequence[str] = ()
    """CLIENT=NUMBER: the priority of a client's requests, for policies to see; 0 when not given.
    May be given several times."""
    scale_lengths: float = 1.0
    """This many times the tokens of prompts, answers and shared blocks, for example 0.0625."""
    rate: float | None = None
    """Requests a second; arrivals are stretched evenly. Not given: as recorded, or 4."""
    seed: int | None = None
    """Key of all that is drawn: of a made-up workload, of arrivals, of a noisy predictor, and of
    the scatter of a cost table's steps; 0 when not given."""

    def draws(self, source: object) -> bool:
        """Whether something of such a workload is drawn from its seed."""
        made_up = isinstance(source, str)
        noisy = isinstance(self.predictor, str) and self.predictor.startswith("noisy:")
        return made_up or noisy or is_drawn(self.arrivals)


def workload(
    source: str | Path | Sequence[TraceRequest], options: WorkloadOptions
) -> list[TraceRequest]:
    """Requests of a made-up workload, by its name, of a file, by its path, or those given.

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
    return _with_priorities(requests, options.priority)


def _first(
    source: Path | Sequence[TraceRequest], count: int | None, *, timed: bool
) -> list[TraceRequest]:
    if isinstance(source, Path):
        return read_trace(source, timed=timed)[:count]
    requests: list[TraceRequest] = []
    with named("trace", TraceError):
        for index, request in enumerate(source):
            if index == MAX_REQUESTS:
                raise TraceError(f"a trace may have at most {MAX_REQUESTS:,} requests")
            check_request(f"trace[{index}]", request)
            requests.append(request)
    return requests[:count]


def _check_turns(requests: Sequence[TraceRequest], rate: float | None, rate_counts: bool) -> None:
    """Raise where a closed loop is none, or a rate would change nothing in it."""
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
    """Raises `ConfigError` for a client that isn't in the trace, or comes twice, and for what is no
    priority."""
    clients = {request.client for request in requests if request.client}
    priorities: dict[str, int] = {}
    for one in given:
        client, equals, number = one.rpartition("=")
        if not equals or client in priorities or client not in clients:
            raise ConfigError(
                f"priority must be CLIENT=NUMBER, once for each client of the trace "
                f"({', '.join(sorted(clients)[:8]) or 'it tells of none'}), got {shown(one)}"
            )
        try:
            priorities[client] = int(number)
        except ValueError:
            raise ConfigError(f"priority of {client} must be an int, got {number!r}") from None
        check_int(f"priority of {client}", priorities[client], MIN_PRIORITY, MAX_PRIORITY)
    if not priorities:
        return requests
    return [replace(r, priority=priorities.get(r.client, 0)) for r in requests]
