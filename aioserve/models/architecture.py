"""Descriptions of decoders: their blocks, and the checkpoint tensors that each block takes.

Values only: no files, no torch. `families` makes a description from config.json, the loader reads
its tensors, and `blocks` computes it. Code that counts or writes weights walks its tensors too.
Settings that no block can compute raise `UnsupportedModelError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

from aioserve.errors import UnsupportedModelError
from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.models.rope import RopeConfig
from aioserve.paging.format import KVEntry, KVFormat
from aioserve.paging.layout import LayerKV

__all__ = [
    "GATED",
    "MLP",
    "UNGATED",
    "Architecture",
    "Attention",
    "Experts",
    "FeedForward",
    "Heads",
    "LatentAttention",
    "Layer",
    "Linear",
    "Mixer",
    "Norm",
    "Tensor",
    "by_heads",
    "conv1d",
    "layer_norm",
    "linear",
    "parts_of",
    "rms_norm",
]


Part = TypeVar("Part")

GATED = ("silu", "gelu_tanh")
"""Activations of an MLP with a gate."""
UNGATED = ("gelu_tanh", "gelu", "relu_squared")
"""Activations of an MLP without a gate."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """Shape in Hugging Face's files."""
    transposed: bool = False
    """True if these files store a weight [N, K] as [K, N]."""
    is_wide: bool = False
    """True if it is kept in float32, whatever the dtype of the model."""
    turns: tuple[int, int] | None = None
    """(parts, rows) if these files interleave parts: `rows` rows of each part in turn.

    GPT-NeoX does this with the queries, keys and values of each head. Once read, each part is
    contiguous."""

    @property
    def rows(self) -> int:
        """Outputs of a weight; length of a vector."""
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def columns(self) -> int:
        """Inputs of a weight; 1 for a vector."""
        return self.shape[0] if self.transposed else math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights that are stacked along N into one [N, K] matrix, and their biases, if any."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    is_exact: bool = False
    """True for routers, whose weights are never rounded because they choose experts."""

    @property
    def transposed(self) -> bool:
        """True if files store its weight as [K, N]."""
        return self.weights[0].transposed


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm or a LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    weight_offset: float = 0.0
    """Number added to the weights: 1.0 for Gemma and Nemotron."""
    centered: bool = False
    """True for a LayerNorm, which subtracts the mean first and may have a bias."""

    def __post_init__(self) -> None:
        if self.bias is not None and not self.centered:
            raise UnsupportedModelError(
                f"{self.weight.name}: an RMS norm has no bias, got {self.bias.name}"
            )


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int

    @property
    def query_size(self) -> int:
        return self.query * self.dim

    @property
    def kv_size(self) -> int:
        return self.kv * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention with grouped heads over cached keys and values."""

    heads: Heads
    qkv: Linear
    """Queries, keys, values: [query_size + 2 * kv_size, hidden]."""
    query_norm: Norm | None = None
    """Norm of queries before the rotation: of each head, or of all heads with `query_size` weights.

    Keys must have a norm of the same kind, or neither has one."""
    key_norm: Norm | None = None
    output: Linear
    scale: float
    rope: RopeConfig | None
    """Rotary embedding; None: queries and keys are not rotated."""
    window: int = 0
    """Number of last positions that a token attends to, its own included; 0: all."""
    soft_cap: float = 0.0
    """Cap of scores: with c > 0 they become c * tanh(score / c)."""
    sinks: Tensor | None = None
    """Learned scores [heads.query]: one more score without a value for each query head; or None."""

    def __post_init__(self) -> None:
        norms = self.query_norm, self.key_norm
        sizes = {None if norm is None else (norm.eps, norm.weight_offset) for norm in norms}
        rows = tuple(0 if norm is None else norm.weight.rows for norm in norms)
        heads = self.heads
        implemented = (0, 0), (heads.dim, heads.dim), (heads.query_size, heads.kv_size)
        centered = any(norm is not None and norm.centered for norm in norms)
        if len(sizes) > 1 or centered or rows not in implemented:
            raise UnsupportedModelError(
                f"query and key heads must have RMS norms alike, or none, got {norms}"
            )

    @property
    def latent_rank(self) -> int:
        """Zero: this kind caches keys and values."""
        return 0

    @property
    def norms_of_all_heads(self) -> bool:
        """True if each norm spans all heads together."""
        norm = self.query_norm
        return norm is not None and norm.weight.rows == self.heads.query_size

    def kv(self, kv_format: KVFormat) -> LayerKV:
        """KV of one token in this layer, kept in `kv_format`."""
        return LayerKV(KVEntry(kv_format, self.heads.kv, self.heads.dim), self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention over cached latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    The cache keeps one row per token, which all heads read: a normalised latent of `latent_rank`
    numbers, then one rotated key. Each head makes its own keys and values from the latent.
    """

    heads: Heads
    """Query heads, and one KV head. `dim` is `latent_rank` plus the rotated dimensions."""
    latent_rank: int
    key_dim: int
    """Dimensions of each head's key that are not rotated."""
    value_dim: int
    compressed_query: Linear | None
    """Projection of x to the input of `query`; None: `query` reads x itself."""
    query_norm: Norm | None
    """Norm of compressed queries."""
    query: Linear
    """Queries: `key_dim` numbers and the rotated ones for each head."""
    latent: Linear
    """Latents, then the rotated key: [heads.dim, hidden]."""
    latent_norm: Norm
    expansion: Tensor
    """Keys, then values, of each head: [query heads * (key_dim + value_dim), latent_rank].

    Held as floats, since queries are multiplied by its transpose."""
    output: Linear
    scale: float
    rope: RopeConfig

    @property
    def window(self) -> int:
        """Zero: a token attends to all positions."""
        return 0

    @property
    def soft_cap(self) -> float:
        """Zero: scores are not capped."""
        return 0.0

    @property
    def sinks(self) -> None:
        """Always None: this kind has no sinks."""
        return None

    @property
    def rotated_dim(self) -> int:
        return self.heads.dim - self.latent_rank

    def kv(self, kv_format: KVFormat) -> LayerKV:
        """KV of one token in this layer, kept in `kv_format`."""
        return LayerKV(KVEntry(kv_format, 1, self.heads.dim, latent=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """down(activation(gate(x)) * up(x)), or without a gate, down(activation(up(x)))."""

    up: Linear
    """Projection `up`, stacked behind the gate if there is one."""
    down: Linear
    activation: str | ClampedSwiglu
    """One of `GATED` or, in experts, a `ClampedSwiglu`; without a gate, one of `UNGATED`."""
    gated: bool = True

    def __post_init__(self) -> None:
        implemented = GATED if self.gated else UNGATED
        is_clamped = self.gated and isinstance(self.activation, ClampedSwiglu)
        if not is_clamped and self.activation not in implemented:
            raise UnsupportedModelError(
                f"the activation of an MLP with gated={self.gated} must be "
                f"{' or '.join(implemented)}, got {self.activation!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: a weighted sum of the chosen experts' outputs, plus a shared MLP's."""

    router: Linear
    """Scores of the experts: [experts, hidden]."""
    routing: Routing
    correction: Tensor | None = None
    """Numbers [experts], added to scores when experts are chosen, but not to their weights."""
    experts: tuple[MLP, ...]
    shared: MLP | None = None
    """MLP whose output is added to the sum for every token."""
    shared_gate: Linear | None = None
    """Gate [1, hidden] of the shared MLP: its sigmoid is a factor on that output."""

    def __post_init__(self) -> None:
        kinds = {(one.activation, one.gated) for one in self.experts}
        if len(self.experts) != self.routing.experts or len(kinds) != 1:
            raise UnsupportedModelError(
                f"there must be {self.routing.experts} experts of one activation, got "
                f"{len(self.experts)} of {sorted(map(str, kinds))}"
            )
        if not self.experts[0].gated:
            raise UnsupportedModelError("experts must be MLPs with a gate")


Mixer = Attention | LatentAttention
"""Kinds of blocks in which a token attends to earlier ones.

Each has `heads`, `latent_rank`, `rope`, `window`, `soft_cap`, `sinks` and `kv`. The output of its
last linear layer is what the layer adds to x."""
FeedForward = MLP | Experts
"""Kinds of blocks that compute each token on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x += scale * post_norm(mixer(norm(x))), then the same with the feed-forward."""

    mixer_norm: Norm | None
    """Norm of the mixer's input; None: the mixer reads x itself."""
    mixer: Mixer
    mixer_post_norm: Norm | None = None
    feed_forward_norm: Norm | None
    """Norm of the feed-forward's input.

    None: the feed-forward reads x itself, or with `parallel`, the input of the mixer."""
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    """Factor on both outputs before they are added to x."""
    parallel: bool = False
    """True if the feed-forward reads x from before the mixer's output was added."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One decoder-only transformer, as a family describes it."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Longest context in tokens."""
    embedding: Tensor
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """True if the scale is rounded to the model's dtype first, as for Gemma."""
    positions: Tensor | None = None
    """Learned position embeddings, or None."""
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Tensor
    tie_word_embeddings: bool
    """True if the output head is the embedding. The head's tensor may then be absent."""
    final_soft_cap: float = 0.0
    """Cap of logits: with c > 0 they become c * tanh(logit / c)."""
    logit_scale: float = 1.0
    """Factor on logits, before the cap."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs of a prefix of names in some checkpoints, and the prefix that replaces it here."""
    stacked: tuple[tuple[str, str], ...] = ()
    """Pairs of endings of tensor names, for files that stack all experts in one tensor.

    The first is the ending of the stacked tensor's name. The second is the ending of each expert's
    name here, with {} for its number."""
    ignored: re.Pattern[str] = re.compile(r"rotary_emb\.inv_freq$")
    """Names of tensors that the computation doesn't need: buffers, towers for other inputs."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> Heads:
        """Heads of each layer, the same in all of them because they share pages."""
        return self.layers[0].mixer.heads

    @property
    def latent_rank(self) -> int:
        """Dimensions of a latent, the same in all layers; 0: layers cache keys and values."""
        return self.layers[0].mixer.latent_rank

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the cache keeps of one token, over all layers."""
        kinds = 1 if self.latent_rank else 2
        return self.num_layers * kinds * self.heads.kv_size

    @property
    def num_heads(self) -> int:
        return self.heads.query

    @property
    def num_kv_heads(self) -> int:
        return self.heads.kv

    @property
    def head_dim(self) -> int:
        return self.heads.dim

    def kv_layers(self, kv_format: KVFormat) -> tuple[LayerKV, ...]:
        """KV of one token in each layer, kept in `kv_format`."""
        return tuple(layer.mixer.kv(kv_format) for layer in self.layers)

    @property
    def required(self) -> Iterator[Tensor]:
        """Tensors except the head, in the order of the computation."""
        parts = self.embedding, self.positions, self.layers, self.final_norm
        return parts_of(parts, Tensor)

    @property
    def linears(self) -> Iterator[Linear]:
        """Linear layers except the head, in the order of the computation."""
        return parts_of(self.layers, Linear)

    @property
    def rounded_linears(self) -> Iterator[Linear]:
        """Linear layers whose weights may be rounded: all but routers."""
        return (one for one in self.linears if not one.is_exact)

    def canonical(self, stored_name: str) -> str:
        """Return the name used here for a checkpoint's tensor."""
        for found, here in self.prefixes:
            if stored_name.startswith(found):
                return here + stored_name.removeprefix(found)
        return stored_name

    def name_of_each(self, name: str) -> str | None:
        """Return the pattern of the names that the experts stacked in tensor `name` have here.

        The pattern has {} for the expert's number, its index along the first axis. None if `name`
        is not a stacked tensor."""
        for ending, here in self.stacked:
            if name.endswith("." + ending):
                return name.removesuffix(ending) + here
        return None


def parts_of(described: object, kind: type[Part]) -> Iterator[Part]:
    """Yield the parts of one kind (tensors, linear layers, norms) of any blocks, in field order."""
    if isinstance(described, kind):
        yield described
    elif isinstance(described, tuple):
        for item in described:
            yield from parts_of(item, kind)
    elif is_dataclass(described):
        for field in fields(described):
            yield from parts_of(getattr(described, field.name), kind)


def linear(at: str, inputs: int, bias: bool = False, /, **outputs: int) -> Linear:
    """Stack the projections `at.name`, given with their numbers of outputs, into one layer."""
    return Linear(
        tuple(Tensor(f"{at}.{name}.weight", (size, inputs)) for name, size in outputs.items()),
        tuple(Tensor(f"{at}.{name}.bias", (size,)) for name, size in outputs.items() if bias),
    )


def conv1d(name: str, inputs: int, outputs: int) -> Linear:
    """Describe a layer as GPT-2 stores it: transposed, and always with a bias."""
    weight = Tensor(f"{name}.weight", (inputs, outputs), transposed=True)
    return Linear((weight,), (Tensor(f"{name}.bias", (outputs,)),))


def by_heads(described: Linear, head_dim: int) -> Linear:
    """Describe a QKV projection whose files keep each head's query, key and value together."""

    def in_turns(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, turns=(3, head_dim)) for tensor in tensors)

    return Linear(in_turns(described.weights), in_turns(described.biases))


def rms_norm(name: str, size: int, eps: float, weight_offset: float = 0.0) -> Norm:
    return Norm(Tensor(f"{name}.weight", (size,)), None, eps, weight_offset)


def layer_norm(
    name: str, size: int, eps: float, weight_offset: float = 0.0, *, bias: bool = True
) -> Norm:
    biases = Tensor(f"{name}.bias", (size,)) if bias else None
    return Norm(Tensor(f"{name}.weight", (size,)), biases, eps, weight_offset, centered=True)
