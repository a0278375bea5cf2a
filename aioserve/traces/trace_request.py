"""One request of a trace: its sender and arrival, the lengths of prompt and answer, and its shared
blocks.

Traces hold no text. A prompt is a list of block ids, and equal ids stand for equal tokens after
equal tokens: KV that can be reused. Tokens are made of them by `prompt_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError
from aioserve.hints import MAX_PRIORITY, MIN_PRIORITY
from aioserve.isolation import shown
from aioserve.traces.checks import check_int, check_number, named

__all__ = [
    "END_TOKEN",
    "MAX_ARRIVAL_SECONDS",
    "MAX_ASKED_TOKENS",
    "MAX_BLOCK_IDS",
    "MAX_NAME_CHARS",
    "MAX_RATE",
    "MAX_REQUESTS",
    "MAX_REQUEST_TOKENS",
    "MAX_TARGET_SECONDS",
    "TARGETS",
    "TraceRequest",
    "at_rate",
    "check_blocks",
    "check_request",
    "checked_requests",
    "repeated",
    "with_scaled_lengths",
]

END_TOKEN = int(np.iinfo(np.int32).max)
"""Token that ends answers, and is in no prompt."""

MAX_REQUESTS = 1 << 22
MAX_BLOCK_IDS = 1 << 26
"""Most block ids in all requests of a file."""
MAX_REQUEST_TOKENS = 1 << 24
"""Most tokens of a prompt, of an answer, and of a block."""
MAX_ASKED_TOKENS = 2**31 - 1
"""Largest limit that a caller may set for a completion."""
MAX_ARRIVAL_SECONDS = 1e10
"""Latest arrival on any clock, that of the time since 1970 included: floats are exact to
microseconds there.
"""
MAX_RATE = 1e9
MAX_NAME_CHARS = 500
"""Most characters of the name of a session, a tenant or a class."""
MAX_TARGET_SECONDS = 1e9
TARGETS = ("ttft_target_seconds", "tpot_target_seconds", "deadline_seconds")
MAY_BE_NONE = ("max_tokens", "predicted_output_tokens", "follows")


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    number: int
    """Position in the trace, from 0."""
    arrival_seconds: float
    """Time since the trace began; of a request in a session, since its session began."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Ids of the prompt's blocks, from position 0. The last block is partial if they cover more
    tokens than the prompt has. If they cover fewer, the rest is a partial block without id.
    """
    block_tokens: int
    session: str = ""
    """Session within which equal ids stand for equal blocks."""
    tenant: str = ""
    """Sender, if the trace tells it."""
    request_class: str = ""
    """Class of service, if the trace tells it, such as `interactive`."""
    max_tokens: int | None = None
    """Most tokens that the caller asked for, if the trace tells it: unlike `output_tokens`, known
    when the request arrives.
    """
    priority: int = 0
    """Priority that its caller would give; no format records it."""
    predicted_output_tokens: int | None = None
    """Expected length of the answer: recorded, or made by a predictor."""
    follows: int | None = None
    """Number of the request whose answer came before this one in its conversation, or that its
    agent worked on; None if unknown.
    """
    think_seconds: float = 0.0
    """Time from the end of that answer to this request."""
    ttft_target_seconds: float | None = None
    """Time after its arrival within which its first token is wanted; None sets no target."""
    tpot_target_seconds: float | None = None
    """Time that each further token may take on average; None sets no target."""
    deadline_seconds: float | None = None
    """Time after its arrival when it is ended, unless it has ended before."""
    acceptance: float | None = None
    """Chance in [0, 1] that a draft token of its answer is right, if the trace tells it."""

    @property
    def has_target(self) -> bool:
        """True if it has a target."""
        return any(getattr(self, name) is not None for name in TARGETS)

    @property
    def own_token(self) -> int:
        """Token of this request alone, for the part of its prompt that no other prompt shares."""
        return END_TOKEN - 1 - self.number

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """Return a prompt of the recorded length: int32 `[prompt_tokens]`.

        Blocks with equal ids are equal, and no token of one block is in another. The rest without
        id is this request's alone. Raises `TraceError` as `check_request`.
        """
        check_request(f"request {shown(self.number)}", self)
        tokens = np.full(self.prompt_tokens, self.own_token, np.int32)
        if self.block_ids:
            first = np.array(self.block_ids, np.int64) * self.block_tokens
            within = np.arange(min(self.block_tokens, self.prompt_tokens))
            blocks = (first[:, None] + within).reshape(-1)[: self.prompt_tokens]
            tokens[: len(blocks)] = blocks
        return tokens


def at_rate(trace: Sequence[TraceRequest], requests_per_second: float) -> list[TraceRequest]:
    """Stretch all arrivals evenly, to `requests_per_second` on average from the first, at 0, to the
    last.

    Raises `ConfigError` for a rate that isn't more than 0 or makes the trace longer than
    `MAX_ARRIVAL_SECONDS`, or a trace that takes no time.
    """
    check_number("rate", requests_per_second, MAX_RATE)
    arrivals = [request.arrival_seconds for request in trace]
    first, last = min(arrivals, default=0.0), max(arrivals, default=0.0)
    if first == last:
        raise ConfigError(
            f"rate {requests_per_second}: no time to stretch, as all requests of the trace "
            f"({len(trace)}) arrive at once"
        )
    seconds = len(trace) / requests_per_second
    if seconds > MAX_ARRIVAL_SECONDS:
        raise ConfigError(
            f"rate {requests_per_second} makes {len(trace)} requests take {seconds:g} s; they may "
            f"take at most {MAX_ARRIVAL_SECONDS:g}"
        )
    factor = seconds / (last - first)
    return [replace(r, arrival_seconds=(r.arrival_seconds - first) * factor) for r in trace]


def repeated(trace: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """Return `count` requests: the trace again and again.

    Each repetition begins after the last arrival of the one before, by the mean gap of arrivals.
    Numbers go on, and `follows` stays within one repetition. Block ids and sessions stay, so
    prompts find what the repetition before has left in the cache.

    Raises `ConfigError` for a count that isn't 1 to `MAX_REQUESTS`, and for a trace that takes no
    time. Also if the last arrival would be after `MAX_ARRIVAL_SECONDS`, or a number too large.
    """
    check_int("count", count, 1, MAX_REQUESTS)
    ordered = sorted(trace, key=lambda request: request.arrival_seconds)
    if not ordered or ordered[0].arrival_seconds == ordered[-1].arrival_seconds:
        raise ConfigError(
            f"count {count}: no time to repeat, as all requests of the trace ({len(ordered)}) "
            "arrive at once"
        )
    seconds = ordered[-1].arrival_seconds - ordered[0].arrival_seconds
    seconds += seconds / (len(ordered) - 1)
    numbers = 1 + max(request.number for request in ordered)
    last = (count - 1) // len(ordered)
    if ordered[-1].arrival_seconds + last * seconds > MAX_ARRIVAL_SECONDS:
        raise ConfigError(
            f"count {count} makes the trace end after {MAX_ARRIVAL_SECONDS:g} s, the last moment "
            "at which a request may arrive"
        )
    if numbers + last * numbers > MAX_REQUESTS:
        raise ConfigError(
            f"count {count} makes numbers of {numbers + last * numbers - 1}; they may be at most "
            f"{MAX_REQUESTS - 1}"
        )
    found: list[TraceRequest] = []
    for place in range(count):
        again, index = divmod(place, len(ordered))
        request = ordered[index]
        found.append(
            replace(
                request,
                number=again * numbers + request.number,
                arrival_seconds=request.arrival_seconds + again * seconds,
                follows=None if request.follows is None else again * numbers + request.follows,
            )
        )
    return found


def with_scaled_lengths(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the trace with `factor` times as many tokens in prompts, answers and blocks, rounded
    up.

    Block ids stay, so requests share what they shared. Raises `ConfigError` for a factor that isn't
    more than 0, makes a fraction of a shared block, or more tokens than a request may have.
    """
    check_number("scale_lengths", factor, MAX_REQUEST_TOKENS)
    factor = float(factor)

    def scaled(what: str, tokens: int, most: int = MAX_REQUEST_TOKENS) -> int:
        if tokens * factor > most:
            raise ConfigError(
                f"scale_lengths {factor} makes {tokens * factor:g} tokens of {what} of {tokens}; "
                f"it may have at most {most}"
            )
        return math.ceil(tokens * factor)

    return [
        replace(
            r,
            prompt_tokens=scaled("a prompt", r.prompt_tokens),
            output_tokens=scaled("an answer", r.output_tokens),
            max_tokens=None
            if r.max_tokens is None
            else scaled("a max_tokens", r.max_tokens, MAX_ASKED_TOKENS),
            predicted_output_tokens=None
            if r.predicted_output_tokens is None
            else scaled("a predicted_output_tokens", r.predicted_output_tokens, MAX_ASKED_TOKENS),
            block_tokens=scaled("a block", _whole_block(r, factor)),
        )
        for r in trace
    ]


def _whole_block(request: TraceRequest, factor: float) -> int:
    """Return its tokens; raises unless shared blocks keep whole tokens."""
    scaled = request.block_tokens * factor
    if request.block_ids and (scaled < 1 or not scaled.is_integer()):
        raise ConfigError(
            f"scale_lengths {factor} makes {scaled} tokens of blocks of {request.block_tokens}: "
            "give a factor that leaves whole ones"
        )
    return request.block_tokens


def checked_requests(trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """List the requests. Raises `TraceError` for an invalid trace."""
    requests: list[TraceRequest] = []
    with named("trace", TraceError):
        for index, request in enumerate(trace):
            if index == MAX_REQUESTS:
                raise TraceError(f"a trace may have at most {MAX_REQUESTS:,} requests")
            check_request(f"trace[{index}]", request)
            requests.append(request)
    return requests


def check_request(place: str, request: TraceRequest) -> None:
    """Raise `TraceError`, which begins with `place`, for a value that no request can have.

    Every number must be within its bounds, and names must be printable. Ids of blocks must have
    room among int32 tokens, and may be no more than the prompt has blocks.
    """
    if type(request) is not TraceRequest:
        raise TraceError(f"{place}: must be a TraceRequest, got {shown(request)}")
    number, prompt, block = request.number, request.prompt_tokens, request.block_tokens
    for name, value, least, most in (
        ("number", number, 0, MAX_REQUESTS - 1),
        ("prompt_tokens", prompt, 1, MAX_REQUEST_TOKENS),
        ("output_tokens", request.output_tokens, 0, MAX_REQUEST_TOKENS),
        ("block_tokens", block, 1, MAX_REQUEST_TOKENS),
        ("max_tokens", request.max_tokens, 1, MAX_ASKED_TOKENS),
        ("priority", request.priority, MIN_PRIORITY, MAX_PRIORITY),
        ("predicted_output_tokens", request.predicted_output_tokens, 1, MAX_ASKED_TOKENS),
        ("follows", request.follows, 0, MAX_REQUESTS - 1),
    ):
        if value is not None or name not in MAY_BE_NONE:
            check_int(f"{place}: {name}", value, least, most, error=TraceError)
    arrival = request.arrival_seconds
    name = f"{place}: arrival_seconds"
    check_number(name, arrival, MAX_ARRIVAL_SECONDS, above=None, error=TraceError)
    name = f"{place}: think_seconds"
    check_number(name, request.think_seconds, MAX_ARRIVAL_SECONDS, above=None, error=TraceError)
    for name in TARGETS:
        if (seconds := getattr(request, name)) is not None:
            check_number(f"{place}: {name}", seconds, MAX_TARGET_SECONDS, error=TraceError)
    if (chance := request.acceptance) is not None:
        name = f"{place}: acceptance"
        check_number(name, chance, 1.0, above=None, error=TraceError)
    for name, text in (
        ("session", request.session),
        ("tenant", request.tenant),
        ("request_class", request.request_class),
    ):
        if type(text) is not str or len(text) > MAX_NAME_CHARS or not text.isprintable():
            raise TraceError(
                f"{place}: {name} must be a text of at most {MAX_NAME_CHARS} characters that can "
                f"be printed, got {shown(text)}"
            )
    _check_ids(place, request)


def check_blocks(place: str, request: TraceRequest) -> None:
    """Raise as `check_request`, and unless there is an id for each block of the prompt.

    A partial block may have an id or not.
    """
    whole, rest = divmod(request.prompt_tokens, request.block_tokens)
    if len(request.block_ids) not in (whole, whole + (rest > 0)):
        raise TraceError(
            f"{place}: {len(request.block_ids)} hash_ids, but a prompt of "
            f"{request.prompt_tokens} tokens has {whole} whole blocks of {request.block_tokens}"
            f"{' and a partial one' if rest else ''}"
        )
    check_request(place, request)


def _check_ids(place: str, request: TraceRequest) -> None:
    ids, block = request.block_ids, request.block_tokens
    if not ids and type(ids) is tuple:
        return
    if type(ids) is not tuple or set(map(type, ids)) != {int}:
        raise TraceError(f"{place}: block_ids must be a tuple of ints, got {shown(ids)}")
    blocks = -(-request.prompt_tokens // block)
    if len(ids) > blocks:
        raise TraceError(
            f"{place}: {len(ids)} block_ids, but a prompt of {request.prompt_tokens} tokens has "
            f"{blocks} blocks of {block}"
        )
    most = request.own_token // block - 1
    for worst in (min(ids), max(ids)):
        if not 0 <= worst <= most:
            raise TraceError(
                f"{place}: block_ids must be 0 to {most} with blocks of {block} for int32 tokens, "
                f"got {shown(worst)}"
            )
