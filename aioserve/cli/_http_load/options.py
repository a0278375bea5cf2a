"""Options of `aioserve bench serve`, checked, and the requests that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace

from aioserve.cli._simulations import check_files
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.traces.checks import check_int, check_number
from aioserve.traces.trace_request import (
    MAX_ASKED_TOKENS,
    MAX_REQUEST_TOKENS,
    MAX_REQUESTS,
    TraceRequest,
)
from aioserve.traces.workload import WorkloadOptions, workload

__all__ = ["FLAGS", "LoadOptions", "requests_of", "warmups_of"]

ENDPOINTS = ("completions", "chat")
PROMPTS = ("ids", "text")
RANDOM_REQUESTS = 32
MAX_RANDOM_REQUESTS = 1 << 18
RANDOM_TOKENS = 128
MAX_SPEED = 1e6
MAX_SECONDS = 1e7
OF_RANDOM_PROMPTS = ("input_len", "output_len", "shared_prefix_len", "shared_prefix_groups")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(WorkloadOptions):
    """Options for what is sent to the server."""

    num_requests: int | None = None
    """Number of requests: 32 random ones or 500 of a made-up workload when not given; of a trace,
    the first of it or all.
    """
    rate: float | None = None
    """Requests a second. A trace is stretched evenly; random prompts come as --arrivals
    poisson. Not given: as recorded, and random prompts all at once.
    """
    seed: int | None = None
    """Key of all that is drawn: prompts, arrivals and made-up workloads; 0 when not given."""
    synthetic: str | None = None
    """A made-up workload in place of a trace: prefix-trees, conversations, bursts, tenants,
    heavy-tails, chatbot, documents, agents or unique-prompts."""
    speed: float | None = None
    """Speed relative to the recorded trace, which also shortens times to think."""
    input_len: int | None = None
    """Tokens of each random prompt; 128 when not given."""
    output_len: int | None = None
    """Tokens of each completion of a random prompt; 128 when not given."""
    shared_prefix_len: int | None = None
    """First tokens of every random prompt that are the same in its group; 0 when not given."""
    shared_prefix_groups: int | None = None
    """Groups of random prompts with the same first tokens, in turn; 1 when not given."""
    concurrency: int | None = None
    """Most requests at once; those that are due meanwhile are held. Not given: no limit."""
    num_warmups: int = 1
    """Requests before the load, one after the other, which no figure includes."""
    max_seconds: float | None = None
    """Time after which no request is sent, in seconds; those under way may end."""
    timeout_seconds: float = 600.0
    """Time after which a request has failed, in seconds."""
    endpoint: str = "completions"
    """API: completions, or chat, where a prompt is a user's message, in text."""
    model: str | None = None
    """Name of the model; not given: the first that the server lists."""
    api_key: str | None = None
    """Key to be sent as a bearer token; AIOSERVE_BENCH_API_KEY holds one too."""
    prompts: str | None = None
    """Kind of prompts. With ids, token ids, exactly as many as asked. With text, as many common
    words, which the server's tokenizer turns into tokens. Not given: ids, and text for chat.
    """
    vocab_size: int | None = None
    """Bound of the ids in prompts; not given: ids that the server's /tokenize gives for common
    words.
    """
    ignore_eos: bool = True
    """Ask for completions that go on past an end-of-sequence token, to the length asked for."""
    return_token_ids: bool = False
    """Ask for the ids of tokens, as aioserve and vLLM offer it. Then each token has a time, even
    without text.
    """
    hints: bool = False
    """Send what policies of aioserve read: sessions, classes, forecasts, targets and deadlines."""
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """File to write the results to, beside the tables; "-" prints JSON alone."""
    report: Path | None = None
    """Write a page with charts to this file."""
    requests: Path | None = None
    """Write a line for each request to this file, *.csv or *.jsonl."""

    def check(self, trace: Path | None) -> None:
        """Raise `ConfigError` for options that make no sense, alone, together or with `trace`."""
        if trace is not None and self.synthetic is not None:
            raise ConfigError("give either a trace or --synthetic, and not both")
        if trace is not None or self.synthetic is not None:
            for name in OF_RANDOM_PROMPTS:
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} is of random prompts: leave it out with a trace or --synthetic"
                    )
        _check_counts(self)
        _check_endpoint(self)
        for name, most in (
            ("speed", MAX_SPEED),
            ("max_seconds", MAX_SECONDS),
            ("timeout_seconds", MAX_SECONDS),
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), most)
        if self.speed is not None and self.rate is not None:
            raise ConfigError("give either speed or rate, and not both")
        if self.predictor is not None and not self.hints:
            raise ConfigError("predictor: forecasts are sent with --hints alone")
        if self.deadline_seconds not in (None, ()) and not self.hints:
            raise ConfigError("deadline_seconds: deadlines are sent with --hints alone")
        json = None if self.json in (None, "-") else Path(self.json)
        check_files(trace, json=json, report=self.report, requests=self.requests)

    @property
    def has_text_prompts(self) -> bool:
        return (self.prompts or ("text" if self.endpoint == "chat" else "ids")) == "text"


FLAGS = (
    *("endpoint", "model", "api_key", "synthetic"),
    *(field.name for field in dataclasses.fields(WorkloadOptions)),
    *("speed", "input_len", "output_len", "shared_prefix_len", "shared_prefix_groups"),
    *("concurrency", "num_warmups", "max_seconds", "timeout_seconds"),
    *("prompts", "vocab_size", "ignore_eos", "return_token_ids", "hints"),
    *("json", "report", "requests"),
)
"""Flags, in the order in which help shows them."""


def requests_of(trace: Path | None, options: LoadOptions) -> list[TraceRequest]:
    """Return the requests to be sent, of a trace, a made-up workload or random prompts.

    Raises `TraceError` for a file, and `ConfigError` for options that make no sense together.
    """
    source: str | Path | Sequence[TraceRequest]
    if options.synthetic is not None:
        source = options.synthetic
    elif trace is not None:
        source = trace
    else:
        source = _random_requests(options)
        if options.rate is not None and options.arrivals == "recorded":
            options = dataclasses.replace(options, arrivals="poisson")
    requests = workload(source, options)
    if options.speed is None:
        return requests
    return [
        replace(
            one,
            arrival_seconds=one.arrival_seconds / options.speed,
            think_seconds=one.think_seconds / options.speed,
        )
        for one in requests
    ]


def warmups_of(requests: Sequence[TraceRequest], options: LoadOptions) -> list[TraceRequest]:
    """Return warm-up requests as long as the first ones, with at most two tokens to generate.

    They share no prefix with any other request.
    """
    return [
        TraceRequest(
            MAX_REQUESTS - 1 - nth,
            0.0,
            (one := requests[nth % len(requests)]).prompt_tokens,
            min(2, one.output_tokens),
            (),
            one.block_tokens,
        )
        for nth in range(options.num_warmups)
    ]


# -- parts


def _random_requests(options: LoadOptions) -> list[TraceRequest]:
    """Return random requests that come all at once. The shared prefix is a block of the trace, with
    its group's number.
    """
    count = _or(options.num_requests, RANDOM_REQUESTS)
    check_int("num_requests", count, 1, MAX_RANDOM_REQUESTS)
    length = _or(options.input_len, RANDOM_TOKENS)
    shared, groups = options.shared_prefix_len or 0, options.shared_prefix_groups or 1
    return [
        TraceRequest(
            number,
            0.0,
            length,
            _or(options.output_len, RANDOM_TOKENS),
            (number % groups,) if shared else (),
            shared or length,
        )
        for number in range(count)
    ]


def _check_counts(options: LoadOptions) -> None:
    for name, least, most in (
        ("num_requests", 1, MAX_REQUESTS),
        ("num_warmups", 0, 10_000),
        ("input_len", 1, MAX_REQUEST_TOKENS),
        ("output_len", 1, MAX_REQUEST_TOKENS),
        ("shared_prefix_len", 0, _or(options.input_len, RANDOM_TOKENS)),
        ("shared_prefix_groups", 1, 10_000),
        ("concurrency", 1, MAX_REQUESTS),
        ("vocab_size", 2, MAX_ASKED_TOKENS),
    ):
        if getattr(options, name) is not None:
            check_int(name, getattr(options, name), least, most)


def _check_endpoint(options: LoadOptions) -> None:
    for name, known in (("endpoint", ENDPOINTS), ("prompts", PROMPTS)):
        value = getattr(options, name)
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {shown(value)}")
    if options.endpoint == "chat" and options.prompts == "ids":
        raise ConfigError("prompts: messages of chat are text, so ids can't be sent")
    if options.has_text_prompts and options.vocab_size is not None:
        raise ConfigError("vocab_size is of prompts of ids, and these are text")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
