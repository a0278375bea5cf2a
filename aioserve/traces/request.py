"""One request of a trace: who came when, how long prompt and answer were, which blocks were shared.

Traces hold no text. A prompt is a list of block ids, and equal ids stand for equal tokens behind
equal tokens: KV that can be reused. `prompt_ids` makes tokens out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError

__all__ = ["END_TOKEN", "TraceRequest", "at_rate", "check_blocks", "with_scaled_lengths"]

END_TOKEN = int(np.iinfo(np.int32).max)
"""Ends answers, and is in no prompt."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    number: int
    """Position in the trace, from 0."""
    arrival_seconds: float
    """Since the trace began; of one in sessions, since its session began."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Ids of the prompt's blocks, from position 0. The last block is partial where they cover more
    tokens than the prompt has; where they cover fewer, the rest is a partial block without id."""
    block_tokens: int
    session: str = ""
    """Ids are equal only within a session."""
    client: str = ""
    """Who sent it, where the trace tells."""
    max_tokens: int | None = None
    """Most tokens that the caller asked for, where the trace tells: unlike `output_tokens`, known
    when the request arrives."""

    @property
    def own_token(self) -> int:
        """The token of this request alone: what no other prompt shares is made of it."""
        return END_TOKEN - 1 - self.number

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """A prompt of the recorded length: int32 `[prompt_tokens]`.

        Blocks with equal ids are equal, and no token of one block is in another. The rest without
        id is this request's alone. Raises `TraceError` for an id without room among int32 tokens.
        """
        _check_ids(f"request {self.number}", self)
        first = np.array(self.block_ids, np.int64) * self.block_tokens
        tokens = np.full(self.prompt_tokens, self.own_token, np.int32)
        blocks = (first[:, None] + np.arange(self.block_tokens)).reshape(-1)[: self.prompt_tokens]
        tokens[: len(blocks)] = blocks
        return tokens


def at_rate(trace: Sequence[TraceRequest], requests_per_second: float) -> list[TraceRequest]:
    """The trace with all arrivals stretched evenly, to so many requests a second on average from
    the first of them, at 0, to the last.

    Raises `ConfigError` for a rate that isn't more than 0, or a trace that takes no time.
    """
    if not 0 < requests_per_second < math.inf:
        raise ConfigError(f"rate must be more than 0, got {requests_per_second}")
    arrivals = [request.arrival_seconds for request in trace]
    first, last = min(arrivals, default=0.0), max(arrivals, default=0.0)
    if first == last:
        raise ConfigError(
            f"rate {requests_per_second}: no time to stretch, as all requests of the trace "
            f"({len(trace)}) arrive at once"
        )
    factor = len(trace) / requests_per_second / (last - first)
    return [replace(r, arrival_seconds=(r.arrival_seconds - first) * factor) for r in trace]


def with_scaled_lengths(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The trace with `factor` times as many tokens in prompts, answers and blocks, rounded up.

    Block ids stay, so that requests share what they shared. Raises `ConfigError` for a factor that
    isn't more than 0 or makes a fraction of a shared block.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"scale_lengths must be more than 0, got {factor}")
    return [
        replace(
            r,
            prompt_tokens=math.ceil(r.prompt_tokens * factor),
            output_tokens=math.ceil(r.output_tokens * factor),
            max_tokens=None if r.max_tokens is None else math.ceil(r.max_tokens * factor),
            block_tokens=_scaled_block(r, factor),
        )
        for r in trace
    ]


def _scaled_block(request: TraceRequest, factor: float) -> int:
    scaled = request.block_tokens * factor
    if request.block_ids and (scaled < 1 or not scaled.is_integer()):
        raise ConfigError(
            f"scale_lengths {factor} makes {scaled} tokens of blocks of {request.block_tokens}: "
            "give a factor that leaves whole ones"
        )
    return math.ceil(scaled)


def check_blocks(place: str, request: TraceRequest) -> None:
    """Raise unless the ids have room among int32 tokens, and are as many as the prompt has blocks,
    a partial one counted or not."""
    _check_ids(place, request)
    whole, rest = divmod(request.prompt_tokens, request.block_tokens)
    if len(request.block_ids) not in (whole, whole + (rest > 0)):
        raise TraceError(
            f"{place}: {len(request.block_ids)} hash_ids, but a prompt of "
            f"{request.prompt_tokens} tokens has {whole} whole blocks of {request.block_tokens}"
            f"{' and a partial one' if rest else ''}"
        )


def _check_ids(place: str, request: TraceRequest) -> None:
    most = request.own_token // request.block_tokens - 1
    for block_id in request.block_ids:
        if not 0 <= block_id <= most:
            raise TraceError(
                f"{place}: block_ids must be 0 to {most} with blocks of {request.block_tokens} for "
                f"int32 tokens, got {block_id}"
            )
