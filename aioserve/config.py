"""Options of an engine, with their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from aioserve.arguments import (
    MAX_INT,
    MadeByNames,
    Rule,
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
"""Name of a device: auto, cpu, cuda, or cuda:N."""
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
MAX_RATE = 1e24
"""Most operations or bytes a second of any device."""
MAX_GRAPH_SIZES = 1024
MAX_PATH_CHARS = 4096
MAX_DRAFTER_CHARS = 1000
MAX_BRANCHES = 8
PARSER_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}"
"""Names that plugins give to parsers, as an expression."""
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def used_backend(name: str = "auto") -> Literal["native", "reference"]:
    """Return the CPU backend that `name` stands for.

    "auto" is the value of the environment variable AIOSERVE_OPS, which is read here alone. It is
    "native" if that is "auto", empty or unset. Raises `ConfigError` for any other name.
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
    """True if the option or AIOSERVE_OPS names a backend: all backends are for CPUs.

    Raises as `used_backend`.
    """
    used_backend(name)
    return name != "auto" or os.environ.get("AIOSERVE_OPS", "") not in ("", "auto")


class Speculation(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """Speculative decoding: a drafter proposes draft tokens, and a step verifies them together.

    A step keeps the draft tokens that it would have drawn itself. The tokens are those without
    speculation, unless `acceptance` says otherwise. Raises `ConfigError` for a value outside its
    range.
    """

    drafter: Annotated[str, text(1, MAX_DRAFTER_CHARS)]
    """Drafter: a plugin's name, with options after it as in "suffix:max_depth=32", or a class of a
    file, "FILE.py:CLASS". An unknown name raises when the engine is made if only bundled plugins
    could offer it, else when the engine is entered.
    """
    max_tokens: Annotated[int, integer(1, MAX_DRAFT_TOKENS)] = 8
    """Most draft tokens of a sequence in one step, in [1, 64]."""
    acceptance: Acceptance = "match"
    """Rule by which draft tokens are kept.

    With "match" (sampler match), a step keeps the draft tokens that equal what it draws, so the
    tokens are the same as without drafts. With "rejection" (rejection sampling), it keeps as many
    tokens of a draft model as it can at temperatures above 0. Each token then comes equally often,
    but the tokens differ from those without drafts. Draft tokens that aren't drawn are kept by
    "match" either way.
    """
    max_branches: Annotated[int, integer(0, MAX_BRANCHES)] = 0
    """Most further paths of draft tokens of a sequence in one step, beside the first, in [0, 8]. At
    most half of `max_tokens`; they use what the first path leaves of it. Needs a CPU, a drafter
    that makes branches, and `acceptance` "match".
    """

    @staticmethod
    def of(drafter: str | None = None, **others: Any) -> Speculation | None:
        """Return speculation by `drafter`, or None without one. `others` that are None are left
        out.

        Raises `ConfigError`, also for a field that asks for something although there is no drafter.
        """
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
        """Name of the drafter, or of its class in a file, without options."""
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


def _parser(*names: str) -> Rule[str]:
    """The rule of a parser's name, which may be that of a plugin's."""
    return choice(*names, pattern=("the name of one that a plugin offers", PARSER_NAME))


def _file(value: object) -> str:
    return _path_text(str(value) if isinstance(value, Path) else value)


_path_text = text(1, MAX_PATH_CHARS)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """Options of an engine.

    Raises `ConfigError` for a value outside its range, and for an option that has no effect because
    of another one. An option at its default is never refused.
    """

    device: Annotated[
        Device,
        choice("auto", "cpu", "cuda", pattern=("'cuda:N' with N from 0 to 99", "cuda:[0-9]{1,2}")),
    ] = "auto"
    """Device of the model: "cpu"; "cuda", an NVIDIA GPU; or "cuda:1", the second one. The default,
    "auto", is the first GPU that can be used, or the CPU if there is none or a `backend` is named.
    """
    backend: Backend = "auto"
    """Kernels on a CPU: "native" is C++; "reference" is plain torch, to compare with. The default,
    "auto", is what the environment variable AIOSERVE_OPS names, and "native" if that is unset.
    """
    dtype: DType = "auto"
    """Type of activations, KV and unquantised weights. "auto" is what the checkpoint says."""
    architecture: Architecture | None = None
    """Architecture that stands in for an unsupported one. Use "llama" if the model's tensors are
    named as Llama's and it differs from Llama in nothing else. None: the one that its files name.
    """
    quantization: Quantization | None = None
    """Quantise the weights of linear layers while they are loaded. Scales: "int8" has one for 128
    inputs, "int4" one for 32, and "fp8" (E4M3) one for each output. The output layer becomes int8.
    None: weights are what the checkpoint stores.
    """
    activation_quantization: ActivationQuantization = "auto"
    """Numbers in which activations meet integer weights. "auto" is what the backend computes. On a
    CPU these are 8-bit integers with a scale for each row and group of inputs (dynamic
    quantization). "none": floats (weight-only quantization, W4A16). The weights then become floats
    of `dtype` on the way into a product, and take the memory of their integers. GPTQ in the order
    of activations is the exception: it becomes floats while it is loaded.
    """
    page_size: Annotated[int, choice(*PAGE_SIZES)] = 16
    """Tokens in a page of the KV cache."""
    num_pages: Annotated[int | None, optional(integer(1, MAX_COUNT))] = None
    """Pages of the KV cache. A model with groups of window layers takes one page of each group for
    the same tokens, while these are in the window. None: as many as `memory_utilization` allows,
    and no more than `max_num_seqs` sequences of `max_model_len` can use.
    """
    memory_utilization: Annotated[float, number(0, 1, above=True)] = 0.9
    """Share of the memory left after loading the weights that the KV cache may take, host pages
    included. On a CPU, pages become resident when they are first used, and the least recently freed
    are reused last. A prefix cache in use comes to need all of it.
    """
    prefix_caching: bool = True
    """Keep computed KV, and start each request from its longest cached prefix."""
    partial_page_reuse: bool = True
    """Copy the valid part of a cached page where a prompt ends or goes on differently inside it,
    instead of computing that part again."""
    eviction: Annotated[str, name] = "lru"
    """Cached pages that go first when memory is needed: "lru", least recently used; "lfu", least
    frequently used; "fifo", first in first out; or "slru". Segmented LRU, "slru", takes pages used
    once before pages used again. A plugin's strategy may be named too. An unknown name raises when
    the engine is entered.
    """
    num_host_pages: Annotated[int, integer(0, MAX_COUNT)] = 0
    """Pages of a second pool in the host's memory. Evicted cached pages and swapped-out requests go
    there. 0: no pool.
    """
    preemption: Preemption = "auto"
    """Treatment of a running request whose pages are needed. With "recompute", they are given back
    and computed again. With "swap", they are copied to the host pool and back. With "auto", long
    contexts are swapped if there is a host pool.
    """
    max_num_seqs: Annotated[int, integer(1, MAX_SEQS)] = 256
    """Most sequences in one step."""
    max_num_batched_tokens: Annotated[int, integer(1, MAX_BATCHED_TOKENS)] = 2048
    """Most tokens that one step computes. Longer prompts are computed in chunks of at most this."""
    max_model_len: Annotated[int | None, optional(integer(2, MAX_COUNT))] = None
    """Most tokens of prompt and answer together. None: what the model was made for, limited by what
    the KV cache holds.
    """
    output_reserve_tokens: Annotated[int, integer(0, MAX_COUNT)] = 64
    """Room for further tokens of every running answer that must be free for a request to start. 0
    starts requests as soon as their prompts fit and preempts more.
    """
    overlap: bool = True
    """Plan and launch a step while the one before still runs."""
    jump_forward: bool = True
    """Take tokens that structured output leaves no choice of without computing logits for them.
    False: one by one. The tokens are the same either way.
    """
    step_program: bool = True
    """Run the model's ops of a step by one call without the GIL, if the backend can record them, as
    the native one can. False: op by op. The tokens are the same either way.
    """
    graph_sizes: Annotated[
        Sequence[int] | None, optional(sequence(integer(1, MAX_SEQS), MAX_GRAPH_SIZES))
    ] = None
    """Batch sizes, in sequences, at which decodes are captured as CUDA graphs, on a GPU. A step
    runs as the next larger one. None: a ladder up to `max_num_seqs`. `()`: no graphs.
    """
    capture_graphs: bool = True
    """Capture CUDA graphs while the engine is entered. False: capture each when it is first needed.
    """
    attention: Attention = "auto"
    """Kernels that attend from prompts, on a GPU: "triton", aioserve's own; "flashinfer", which
    must be installed. With "auto", it is FlashInfer if that is installed, takes the model, and is
    measured to be faster while the engine is entered. Decodes are always Triton's.
    """
    special_tokens_in_messages: bool = False
    """Take the name of a special token in the text of a message for the token, as most engines do.
    False: the chat template alone writes special tokens, and their names in messages are text.
    """
    chat_template: Annotated[str | None, optional(_file)] = None
    """File with the chat template, in Jinja, in place of the model's own. Special tokens that it
    uses, such as `bos_token`, are those of the model.
    """
    tool_parser: Annotated[ToolParserName | str, _parser(*get_args(ToolParserName))] = "auto"
    """Format of the model's tool calls, if a call of `chat` says "auto": "hermes", "llama3_json",
    "mistral", "json", another bundled name or that of a plugin. "none" takes calls for text. "auto"
    takes the format that the chat template is written for.
    """
    reasoning_parser: Annotated[
        ReasoningParserName | str, _parser(*get_args(ReasoningParserName))
    ] = "auto"
    """Format of the model's reasoning, if a call of `chat` says "auto": "qwen3", "deepseek_r1",
    "mistral", "harmony", that of a plugin, or "none". "auto" takes the format that the chat
    template is written for.
    """
    reranker: RerankerName = "auto"
    """Way in which the model scores the relevance of a document to a query. With "qwen3", it is
    that of Qwen3-Reranker: "yes" or "no" after its prompt. With "none", embeddings are compared.
    With "auto", the model's files decide: a classifier of one label, or one by tokens.
    """
    speculation: Annotated[Speculation | None, optional(_speculation)] = None
    """Drafter of completions, and its limits. A drafter's name alone is
    `Speculation(drafter=NAME)`. The tokens are the same with any, except with
    `acceptance="rejection"`. None: each step computes one token of a completion.
    """
    peak_flops_per_second: Annotated[float | None, optional(number(0, MAX_RATE, above=True))] = None
    """Operations a second that the device reaches with the model's type of weights, as
    `benchmarks/limits.py` measures them. `EngineStats` compares steps with it. None: unknown.
    """
    peak_bytes_per_second: Annotated[float | None, optional(number(0, MAX_RATE, above=True))] = None
    """Bytes a second that the device reads from its memory, likewise. None: unknown."""
    seed: Annotated[int, integer(0, MAX_SEED)] = 0
    """Key of the noise of requests without a seed of their own."""
    max_waiting: Annotated[int, integer(1, MAX_COUNT)] = 4096
    """Most requests that may wait to start; one more is refused with `QueueFullError`."""
    max_waiting_tokens: Annotated[int, integer(1, MAX_INT)] = 4_194_304
    """Most prompt tokens of requests that wait for their answers to begin. A request beyond it is
    refused with `QueueFullError`, unless none wait.
    """
    refuse_late: bool = False
    """Refuse a request whose answer would begin after its `deadline_seconds`, judged by how long
    others waited lately. The estimate assumes the order of `fcfs`, whatever the policy. False: it
    waits, and is ended at its deadline.
    """
    max_buffered_tokens: Annotated[int, integer(1, MAX_COUNT)] = 256
    """Most tokens that wait for a slow reader, of all samples together, before its request pauses.
    """
    stall_timeout_seconds: Annotated[float, number(0, MAX_SECONDS, above=True)] = 60.0
    """Longest time that a reader with a full buffer may take nothing before its request is aborted.
    """

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
