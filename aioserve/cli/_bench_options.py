"""The options of `aioserve bench`, checked: what it runs, and what it measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aioserve.cli._device_options import DeviceOptions
from aioserve.cli._streams import check_output
from aioserve.errors import ConfigError

__all__ = ["BenchOptions"]

MAX_NUM_PROMPTS = 65_536
"""As many as an engine runs at once."""
MAX_PROMPT_TOKENS = 10_000_000
"""Most tokens of all prompts together, which are drawn before the clock starts."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(DeviceOptions):
    """What to run."""

    num_prompts: int = 32
    """Requests in all."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens of each answer; end-of-sequence tokens are ignored. Policies see it as max_tokens."""
    shared_prefix_len: int = 0
    """The first tokens of every prompt that are the same in all."""
    concurrency: int | None = None
    """Requests at once; throughput: all, latency: 1, when not given."""
    dtype: str = "auto"
    """float32, bfloat16, on a GPU float16, or auto (what the model directory says)."""
    policy: str = "fcfs"
    """The scheduling policy, or one with options: NAME:OPTION=VALUE,OPTION=VALUE; or a class of
    yours as FILE.py:CLASS."""
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_batched_tokens: int = 2048
    """Tokens of one engine step."""
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True
    """Plan the next step while one runs."""
    prefix_caching: Annotated[bool, Parameter(negative="--no-prefix-caching")] = True
    """Start requests from what is cached of their prefix."""
    partial_page_reuse: Annotated[bool, Parameter(negative="--no-partial-page-reuse")] = True
    """Copy the valid part of a cached page."""
    eviction: str = "lru"
    """Which cached pages go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    num_host_pages: int = 0
    """Pages in the host's memory for evicted and swapped-out KV."""
    preemption: str = "auto"
    """auto, recompute or swap."""
    seed: int = 0
    """Key of the random prompts."""
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Also write the result to this file; "-" prints JSON alone."""

    def check(self) -> None:
        """Raises `ConfigError` for a count that makes no sense or is beyond bounds."""
        if not 1 <= self.num_prompts <= MAX_NUM_PROMPTS:
            raise ConfigError(
                f"num_prompts must be in [1, {MAX_NUM_PROMPTS}], got {self.num_prompts}"
            )
        for name, least in (("input_len", 1), ("output_len", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.num_prompts * self.input_len > MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"num_prompts * input_len must be at most {MAX_PROMPT_TOKENS}, "
                f"got {self.num_prompts} * {self.input_len}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.concurrency is not None and self.concurrency > self.num_prompts:
            raise ConfigError(
                f"concurrency must be at most num_prompts = {self.num_prompts}, "
                f"got {self.concurrency}"
            )
        if self.json not in (None, "-"):
            check_output("json", Path(self.json))
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be in [0, input_len={self.input_len}], "
                f"got {self.shared_prefix_len}"
            )
