"""The requests of a run: where they come from, and what is made of them before it begins."""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["seed_draws", "workload"]

SYNTHETIC_REQUESTS = 500
SYNTHETIC_RATE = 4.0


def seed_draws(source: object, *, arrivals: str = "recorded", predictor: str | None = None) -> bool:
    """Whether something of such a workload is drawn from its seed."""
    made_up = isinstance(source, str)
    noisy = isinstance(predictor, str) and predictor.startswith("noisy:")
    return made_up or noisy or is_drawn(arrivals)


def workload(
    source: str | Path | Sequence[TraceRequest],
    *,
    num_requests: int | None = None,
    arrivals: str = "recorded",
    rate: float | None = None,
    seed: int | None = None,
    closed_loop: bool = False,
    scale_lengths: float = 1.0,
    predictor: str | None = None,
    priority: Sequence[str] = (),
) -> list[TraceRequest]:
    """The requests of a made-up workload, by its name, of a file, by its path, or those given.

    num_requests: the first so many by their times, 500 of a made-up workload unless given.
    arrivals, rate: one of `ARRIVALS`; so many requests a second, and where arrivals are drawn in a
        `closed_loop` so many sessions. Not given: as recorded, or 4.
    seed: of all that is drawn; 0 unless given.
    predictor: one of `PREDICTORS`.
    priority: CLIENT=NUMBER for each client that has one.

    Raises `TraceError` for a file, and `ConfigError` for options that make no sense together.
    """
    if num_requests is not None:
        check_int("num_requests", num_requests, 1, MAX_REQUESTS)
    if seed is not None:
        check_int("seed", seed, 0, MAX_SEED)
    drawn = is_drawn(arrivals)
    if isinstance(source, str):
        count, made_rate = num_requests or SYNTHETIC_REQUESTS, _or(rate, SYNTHETIC_RATE)
        requests = synthetic_trace(source, count, rate=made_rate, seed=seed or 0)
    else:
        requests = _first(source, num_requests, timed=not drawn)
        if drawn and rate is None:
            raise ConfigError(f"arrivals: {shown(arrivals)} needs a rate")
        if rate is not None and not drawn:
            requests = at_rate(requests, rate)
    if closed_loop:
        _check_turns(requests, rate, drawn or isinstance(source, str))
    if drawn:
        drawn_rate = _or(rate, SYNTHETIC_RATE)
        requests = with_arrivals(
            requests, arrivals, rate=drawn_rate, seed=seed or 0, closed_loop=closed_loop
        )
    if scale_lengths != 1.0:
        requests = with_scaled_lengths(requests, scale_lengths)
    if predictor is not None:
        requests = with_predictions(requests, predictor, seed=seed or 0)
    return _with_priorities(requests, priority)


def _or(rate: float | None, otherwise: float) -> float:
    return otherwise if rate is None else rate


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
