"""The options of an engine, checked where they enter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from aioserve.arguments import (
    MAX_INT,
    MadeByNames,
    check_fields,
    choice,
    integer,
    name,
    number,
    optional,
    plain_str,
    rules_of,
    sequence,
    shown,
    text,
)
from aioserve.errors import ConfigError
from aioserve.sampling_params import MAX_DRAFT_TOKENS, MAX_SEED

__all__ = [
    "ENGINE_DEFAULTS",
    "Acceptance",
    "Attention",
    "Backend",
    "DType",
    "Device",
    "EngineConfig",
    "Preemption",
    "Quantization",
    "ReasoningParserName",
    "RerankerName",
    "Speculation",
    "ToolParserName",
    "names_cpu_backend",
    "used_backend",
]

Acceptance = Literal["match", "rejection"]
Attention = Literal["auto", "triton", "flashinfer"]
Backend = Literal["auto", "native", "reference"]
Device = str
"""auto, cpu, cuda, or cuda:N."""
DType = Literal["auto", "float32", "bfloat16", "float16"]
Preemption = Literal["auto", "recompute", "swap"]
ActivationQuantization = Literal["auto", "none"]
Architecture = Literal["llama"]
Quantization = Literal["int8", "int4", "fp8"]
ToolParserName = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "qwen3_coder",
    "harmony",
    "json",
]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"]

RerankerName = Literal["auto", "none", "qwen3"]

MAX_SEQS = 65_536
MAX_BATCHED_TOKENS = 1 << 20
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 7 * 24 * 3600.0
MAX_GRAPH_SIZES = 1024
MAX_PATH_CHARS = 4096
MAX_DRAFTER_CHARS = 1000
MAX_BRANCHES = 8
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def used_backend(name: str = "auto") -> Literal["native", "reference"]:
    """The backend that `name` stands for.

    "auto" is what the environment variable AIOSERVE_OPS names, which nothing else looks at, and
    "native" where that is "auto" too, empty or unset. Raises `ConfigError` for a name of none.
    """
    source = "backend"
    if name == "auto":
        source, name = "AIOSERVE_OPS", os.environ.get("AIOSERVE_OPS") or "auto"
    if name in ("auto", "native"):
        return "native"
    if name == "reference":
        return "reference"
    names = ", ".join(get_args(Backend))
    raise ConfigError(f"{source} must be one of {names}; got {shown(name)}")


def names_cpu_backend(name: str) -> bool:
    """Whether a backend is asked for, by the option or by AIOSERVE_OPS: all are for CPUs.

    Raises as `used_backend`.
    """
    used_backend(name)
    return name != "auto" or os.environ.get("AIOSERVE_OPS", "") not in ("", "auto")


class Speculation(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """Draft tokens, which a step verifies together: it keeps those that it would have
    drawn itself, so that the tokens are the same without any, unless `acceptance` says otherwise.

    Raises `ConfigError` for a value outside its range.
    """

    drafter: Annotated[str, text(1, MAX_DRAFTER_CHARS)]
    """The drafter: the name of one that a plugin offers, options behind it as in
    "suffix:max_depth=32", or a class of a file, "FILE.py:CLASS". That there is one of the name
    shows when the engine is entered, or when it is made, where none but the bundled plugins could
    offer it."""
    max_tokens: Annotated[int, integer(1, MAX_DRAFT_TOKENS)] = 8
    """Most draft tokens of a sequence in one step, in [1, 64]."""
    acceptance: Acceptance = "match"
    """Rule by which draft tokens are kept: "match", sampler match: those that are what the step
    draws, so that the tokens are the same without any. "rejection", rejection sampling: of a draft
    model's at a temperature above 0 as many as can be without changing how often a token comes; the
    tokens are others than without it. Draft tokens that aren't drawn are kept by "match" either
    way."""
    max_branches: Annotated[int, integer(0, MAX_BRANCHES)] = 0
    """Most paths of draft tokens beside the first one of a sequence in one step, in [0, 8] and at
    most half of `max_tokens`, of the rows that its first one leaves of these. On a CPU, with a
    drafter that makes some, and with `acceptance` "match"."""

    @staticmethod
    def of(drafter: str | None = None, **others: Any) -> Speculation | None:
        """Speculation by that drafter, with those of the other fields that aren't None; None
        without a drafter. Raises `ConfigError`, also for a field that asks for something then."""
        given = {name: value for name, value in others.items() if value is not None}
        if drafter is not None:
            return Speculation(drafter=drafter, **given)
        for option, value in given.items():
            if value == _SPECULATION_DEFAULTS[option]:
                continue
            raise ConfigError(
                f"{option}={shown(value)} of speculation has no effect without a drafter: leave it "
                "out, or name one",
                argument=option,
                value=value,
            )
        return None

    @property
    def drafter_name(self) -> str:
        """The drafter's name, or that of its class in a file, without options."""
        named = self.drafter.partition(".py:")[2] or self.drafter
        return named.partition(":")[0].strip()

    def __post_init__(self) -> None:
        check_fields(ConfigError, self, _SPECULATION_RULES)
        if 2 * self.max_branches > self.max_tokens:
            raise ConfigError(
                f"max_branches must be at most half of max_tokens={self.max_tokens}, got "
                f"{self.max_branches}: each is two tokens or more",
                argument="max_branches",
                value=self.max_branches,
                limit=self.max_tokens // 2,
            )
        if self.max_branches and self.acceptance != "match":
            raise ConfigError(
                f"max_branches={self.max_branches} of speculation has no effect with acceptance="
                f"{self.acceptance!r}, which keeps draft tokens of one path: leave one of them out",
                argument="max_branches",
                value=self.max_branches,
            )


def _speculation(value: object) -> Speculation:
    if issubclass(type(value), Speculation):
        return value  # pyright: ignore[reportReturnType]
    if (drafter := plain_str(value)) is not None:
        return Speculation(drafter=drafter)
    raise ConfigError(
        f"speculation must be a Speculation or the name of a drafter, got {shown(value)}",
        argument="speculation",
        value=value,
    )


def _file(value: object) -> str:
    return _path_text(str(value) if isinstance(value, Path) else value)


_path_text = text(1, MAX_PATH_CHARS)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """How an engine runs its model.

    Raises `ConfigError` for a value outside its range, and for an option that asks for something
    which another option leaves without effect. An option at its default asks for nothing.
    """

    device: Annotated[
        Device,
        choice("auto", "cpu", "cuda", pattern=("'cuda:N' with N from 0 to 99", "cuda:[0-9]{1,2}")),
    ] = "auto"
    """Where the model runs: "cpu"; "cuda", an NVIDIA GPU, or "cuda:1", the second one. "auto" is
    the first GPU that can be used, and the CPU where there is none or a `backend` is named."""
    backend: Backend = "auto"
    """What computes it on a CPU: "native", C++; "reference", plain torch, to compare with. "auto"
    is what the environment variable AIOSERVE_OPS names, and "native" where that is unset."""
    dtype: DType = "auto"
    """Type of activations and KV, and of weights that aren't quantised. "auto" is what the
    checkpoint says."""
    architecture: Architecture | None = None
    """What a model is computed as whose own architecture isn't supported: "llama", where its
    tensors are named as Llama's and it differs from Llama in nothing else. None: what its files say
    that it is."""
    quantization: Quantization | None = None
    """Round the weights of linear layers to so many bits while they are loaded: "int8", with a
    scale for 128 inputs, "int4", with a scale for 32, or "fp8", E4M3 with a scale for each output.
    The output layer becomes int8. None: weights are what the checkpoint
    stores."""
    activation_quantization: ActivationQuantization = "auto"
    """In which numbers activations meet weights of integers. "auto" is what the backend computes:
    on a CPU integers of 8 bits, with a scale for each row and group of inputs (dynamic
    quantization). "none": floats (weight-only quantization, W4A16); such weights become floats of
    `dtype` on the way into a product, and take the memory of their integers; but for GPTQ in the
    order of activations, which becomes floats while it is loaded."""
    page_size: Annotated[int, choice(*PAGE_SIZES)] = 16
    """Tokens in a page of the KV cache."""
    num_pages: Annotated[int | None, optional(integer(1, MAX_COUNT))] = None
    """Pages of the KV cache. A model with groups of window layers takes one of each group for the
    same tokens, as long as these are in the window. None: as many as `memory_utilization` allows,
    and no more than `max_num_seqs` sequences of `max_model_len` can use."""
    memory_utilization: Annotated[float, number(0, 1, above=True)] = 0.9
    """Share of the memory that is left after loading the weights that the KV cache may take, host
    pages included. On a CPU pages are resident when they are used, or ready to be used next, and
    the least recently freed come last; a prefix cache in use comes to need all of it."""
    prefix_caching: bool = True
    """Keep the KV of what was computed, and start requests from the longest prefix of them that
    is there."""
    partial_page_reuse: bool = True
    """Copy the valid part of a cached page where a prompt ends or goes on differently inside it,
    instead of computing that part again."""
    eviction: Annotated[str, name] = "lru"
    """Which cached pages go first when memory is needed: "lru", least recently used; "lfu", least
    frequently used; "fifo", first in first out; "slru", segmented LRU (what was used once goes
    before what was used again); or the name of a strategy that a plugin offers. That there is one
    of the name shows when the engine is entered."""
    num_host_pages: Annotated[int, integer(0, MAX_COUNT)] = 0
    """Pages of a second pool in the host's memory, where evicted cached pages and swapped-out
    requests go. 0: none."""
    preemption: Preemption = "auto"
    """What happens to a running request whose pages are needed: "recompute" gives them back and
    computes them again, "swap" copies them to the host pool and back, "auto" swaps long contexts
    if there is a host pool."""
    max_num_seqs: Annotated[int, integer(1, MAX_SEQS)] = 256
    """Sequences that one step may hold."""
    max_num_batched_tokens: Annotated[int, integer(1, MAX_BATCHED_TOKENS)] = 2048
    """Tokens that one step may compute: long prompts are computed in chunks of at most this."""
    max_model_len: Annotated[int | None, optional(integer(2, MAX_COUNT))] = None
    """Prompt and answer together, in tokens. None: what the model was made for, and at most what
    the KV cache holds."""
    output_reserve_tokens: Annotated[int, integer(0, MAX_COUNT)] = 64
    """Pages for this many further tokens of every running answer must be free for a request to
    start. 0 starts requests as soon as their prompts fit and preempts more."""
    overlap: bool = True
    """Plan and launch a step while the one before still runs."""
    jump_forward: bool = True
    """Take tokens that structured output leaves no choice of without computing logits for them.
    False: one by one. The tokens are the same either way."""
    step_program: bool = True
    """Run the model's ops of a step by one call that holds no GIL, where the backend can record
    them: the native one can. False: op by op. The tokens are the same either way."""
    graph_sizes: Annotated[
        Sequence[int] | None, optional(sequence(integer(1, MAX_SEQS), MAX_GRAPH_SIZES))
    ] = None
    """On a GPU: numbers of sequences at which decodes are captured as CUDA graphs. A step runs as
    the next larger one. None: a ladder up to `max_num_seqs`. None at all, `()`: no graphs."""
    capture_graphs: bool = True
    """Capture them while the engine is entered. False: each when it is first needed."""
    attention: Attention = "auto"
    """On a GPU: whose kernels attend from prompts: "triton", aioserve's own; "flashinfer", which
    must be installed. "auto" is FlashInfer where it is installed, takes the model, and is faster,
    which is measured while the engine is entered. Decodes are always Triton's."""
    special_tokens_in_messages: bool = False
    """Take the name of a special token in the text of a message for the token, as most engines do.
    False: the chat template alone writes special tokens, and their names in messages are text."""
    chat_template: Annotated[str | None, optional(_file)] = None
    """A file with the chat template, in Jinja, in place of the model's own. Special tokens by which
    it goes, such as `bos_token`, are those of the model."""
    tool_parser: ToolParserName = "auto"
    """How the model writes calls of tools, where a call of `chat` says "auto": "hermes",
    "llama3_json", "mistral" or "json"; "none" takes them for text. "auto" is what the chat template
    is written for."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model writes its reasoning, likewise: "qwen3", "deepseek_r1", "mistral" or "none"."""
    reranker: RerankerName = "auto"
    """How the model tells the relevance of a document to a query: "qwen3", as Qwen3-Reranker, by
    "yes" and "no" behind its prompt; "none", not at all: embeddings are compared. "auto" is what
    the model's files say: a classifier of one label, or one by tokens."""
    speculation: Annotated[Speculation | None, optional(_speculation)] = None
    """The drafter of completions, and how many tokens it drafts; a drafter's name alone is
    `Speculation(drafter=NAME)`. The tokens are the same with any, but for
    `acceptance="rejection"`. None: each step computes one token of a completion."""
    seed: Annotated[int, integer(0, MAX_SEED)] = 0
    """Key of the noise of requests that bring no seed of their own."""
    max_waiting: Annotated[int, integer(1, MAX_COUNT)] = 4096
    """Requests that may wait to start; one more is refused with `QueueFullError`."""
    max_waiting_tokens: Annotated[int, integer(1, MAX_INT)] = 4_194_304
    """Tokens of prompts that may wait for their answers to begin; a request that makes them more
    is refused with `QueueFullError`, unless none wait."""
    refuse_late: bool = False
    """Refuse a request whose answer would begin after its `deadline_seconds`, by how long others
    waited lately. Such an estimate knows nothing of a policy's order: it is that of `fcfs`. False:
    it waits, and is ended at its deadline."""
    max_buffered_tokens: Annotated[int, integer(1, MAX_COUNT)] = 256
    """Tokens that wait for a slow reader, of all samples together, before its request is no longer
    scheduled."""
    stall_timeout_seconds: Annotated[float, number(0, MAX_SECONDS, above=True)] = 60.0
    """How long a reader with a full buffer may take nothing before its request is aborted."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self, _RULES)
        if self.preemption == "swap" and self.num_host_pages == 0:
            raise ConfigError(
                'preemption="swap" needs num_host_pages of at least 1, got 0',
                argument="num_host_pages",
                value=0,
                limit=1,
            )
        if self.num_pages == self.page_size == 1:
            raise ConfigError(
                "num_pages must be at least 2 with page_size=1, got 1: a request has two tokens",
                argument="num_pages",
                value=1,
                limit=2,
            )
        if self.graph_sizes and max(self.graph_sizes) > self.max_num_seqs:
            raise ConfigError(
                f"graph_sizes must be at most max_num_seqs={self.max_num_seqs}, "
                f"got {max(self.graph_sizes)}",
                argument="graph_sizes",
                value=self.graph_sizes,
                limit=self.max_num_seqs,
            )
        self._check_effects()

    def _check_effects(self) -> None:
        def refuse(name: str, beside: str, remedy: str) -> None:
            value = getattr(self, name)
            if value != ENGINE_DEFAULTS[name]:
                raise ConfigError(
                    f"{name}={value!r} has no effect with {beside}: {remedy}",
                    argument=name,
                    value=value,
                )

        if self.device.startswith("cuda"):
            refuse("backend", f"device={self.device!r}", "it names what computes on a CPU")
        if self.backend == "reference":
            refuse(
                "activation_quantization",
                "backend='reference'",
                "its activations are floats, so leave it out",
            )
        if self.device == "cpu" or self.backend != "auto":
            for option in ("graph_sizes", "capture_graphs", "attention"):
                refuse(option, "a model on the CPU", "leave it out, or choose a CUDA device")
        if self.graph_sizes is not None and not self.graph_sizes:
            refuse("capture_graphs", "graph_sizes=()", "there is nothing to capture")
        if self.num_pages is not None:
            refuse(
                "memory_utilization",
                f"num_pages={self.num_pages}",
                "each of them sizes the KV cache, so leave one of them out",
            )
        if not self.prefix_caching:
            refuse(
                "eviction",
                "prefix_caching=False",
                "no page is cached, so leave eviction out or turn prefix_caching on",
            )
            if self.preemption == "recompute":
                refuse(
                    "num_host_pages",
                    "prefix_caching=False and preemption='recompute'",
                    "nothing is ever copied to the host, so leave one of them out",
                )


ENGINE_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(EngineConfig)
}

_SPECULATION_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(Speculation)
}


_SPECULATION_RULES = rules_of(Speculation)
_RULES = rules_of(EngineConfig)
