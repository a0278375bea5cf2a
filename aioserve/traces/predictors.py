"""Forecasts of answers' lengths, for policies to see: as good as one says, and drawn from a seed.

A policy never sees the recorded length. What a service may have is a forecast of it, and
how much a policy gains depends on how good that is:

- `oracle`: the recorded length itself: an upper bound for what any forecast can bring.
- `noisy:ERROR`: the recorded length times `exp(ERROR * z)`, with `z` drawn from a standard normal
  distribution: a log-normal error that is as often above 1 as below. With an error of 0.5 two of
  three forecasts are between 0.61 and 1.65 times the length.
- `constant:TOKENS`: the same for all.
- `by-tenant`: the mean length of the same client's answers before, in the trace's order; of all
  answers before, for a client's first; and none for the first of all. Some of those answers may not
  have ended yet when the request comes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.request import MAX_SEED
from aioserve.traces.checks import check_int, check_number
from aioserve.traces.request import MAX_ASKED_TOKENS, TraceRequest

__all__ = ["PREDICTORS", "with_predictions"]

MAX_ERROR = 10.0
"""Largest error of `noisy`: a factor of 22,000 either way is nothing out of the ordinary there."""
PREDICTORS = ("oracle", "noisy:ERROR", "constant:TOKENS", "by-tenant")


def with_predictions(
    trace: Sequence[TraceRequest], predictor: str, *, seed: int = 0
) -> list[TraceRequest]:
    """The trace with the forecasts of one of `PREDICTORS` in place of those that it had. The same
    seed gives the same, whatever the arrivals are. Raises `ConfigError`."""
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
    try:
        tokens = int(text)
    except ValueError:
        raise ConfigError(f"predictor: constant must be an int, got {shown(text)}") from None
    check_int("predictor: constant", tokens, 1, MAX_ASKED_TOKENS)
    return tokens


def _error(text: str) -> float:
    try:
        error = float(text)
    except ValueError:
        raise ConfigError(f"predictor: noisy must be a number, got {shown(text)}") from None
    check_number("predictor: noisy", error, MAX_ERROR, above=None)
    return error


def _means_before(trace: Sequence[TraceRequest]) -> list[float | None]:
    tokens, counts = defaultdict[str, int](int), defaultdict[str, int](int)
    means: list[float | None] = [None] * len(trace)
    total = 0
    by_arrival = sorted(range(len(trace)), key=lambda index: trace[index].arrival_seconds)
    for before, index in enumerate(by_arrival):
        client, length = trace[index].client, max(1, trace[index].output_tokens)
        if counts[client]:
            means[index] = tokens[client] / counts[client]
        elif before:
            means[index] = total / before
        tokens[client] += length
        counts[client] += 1
        total += length
    return means


def _whole(tokens: float) -> int:
    return int(min(max(1, math.floor(tokens + 0.5)), MAX_ASKED_TOKENS))
