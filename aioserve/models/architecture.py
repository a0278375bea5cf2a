"""Descriptions of decoders: their blocks, and the checkpoint's tensors that each of them takes.

Values only: no files, no torch. `families` writes one for each config.json, `blocks` computes it,
the loader reads its tensors, and code that counts or writes weights walks them. What no block can
compute is refused with `UnsupportedModelError`.
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
"""Activations of an MLP without one."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """As Hugging Face's files store it."""
    transposed: bool = False
    """Whether these files store a weight [N, K] as [K, N]."""
    is_wide: bool = False
    """Whether it is kept in float32, whatever the dtype of the model."""
    turns: tuple[int, int] | None = None
    """(parts, rows): these files store so many rows of each part in turn, as GPT-NeoX does with the
    queries, keys and values of each head. Here the parts follow one another, whole."""

    @property
    def rows(self) -> int:
        """Outputs of a weight; numbers of a vector."""
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def columns(self) -> int:
        """Inputs of a weight; 1 for a vector."""
        return self.shape[0] if self.transposed else math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights that become one [N, K] matrix, stacked along N, and their biases, if any."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    is_exact: bool = False
    """Whether nothing that rounds weights rounds these: those of a router, which choose."""

    @property
    def transposed(self) -> bool:
        """Whether it is one weight that files store as [K, N]."""
        return self.weights[0].transposed


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm or a LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    weight_offset: float = 0.0
    """Added to the weights: 1.0 for Gemma and Nemotron."""
    centered: bool = False
    """Whether the mean is taken away first: a LayerNorm, which may have a bias."""

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
    """Norm of each query head before the rotation, or of all together where it has as many weights.
    Keys have one alike, or neither has any."""
    key_norm: Norm | None = None
    output: Linear
    scale: float
    rope: RopeConfig | None
    """Rotary embedding; None where positions are learned."""
    window: int = 0
    """Last positions that a token sees, its own included; 0: all."""
    soft_cap: float = 0.0
    """Cap of scores: with c > 0 they become c * tanh(score / c)."""
    sinks: Tensor | None = None
    """A learned score of each query head, [heads.query], that has no value; None: there is none."""

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
        """Keys and values are kept, no latents."""
        return 0

    @property
    def norms_of_all_heads(self) -> bool:
        """Whether the norms are each of all heads together."""
        norm = self.query_norm
        return norm is not None and norm.weight.rows == self.heads.query_size

    def kv(self, kv_format: KVFormat) -> LayerKV:
        """The layer's KV of a token, in this format."""
        return LayerKV(KVEntry(kv_format, self.heads.kv, self.heads.dim), self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention over cached latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    A token leaves one row, which all heads read: a normalised vector of `latent_rank` numbers, from
    which each head makes keys and values of its own, and behind it one rotated key.
    """

    heads: Heads
    """Heads, of what is kept: one KV head of `latent_rank` numbers and the rotated ones."""
    latent_rank: int
    key_dim: int
    """What of each head's key isn't rotated."""
    value_dim: int
    compressed_query: Linear | None
    """Makes what queries are projected from; None: that is x itself."""
    query_norm: Norm | None
    """Norm of compressed queries."""
    query: Linear
    """Heads of `key_dim` numbers and the rotated ones."""
    latent: Linear
    """Latents, then the key that is rotated: [heads.dim, hidden]."""
    latent_norm: Norm
    expansion: Tensor
    """[query heads * (key_dim + value_dim), latent_rank]: of each head first its keys' part. Held
    as floats, since queries are multiplied by its transpose."""
    output: Linear
    scale: float
    rope: RopeConfig

    @property
    def window(self) -> int:
        """There is none."""
        return 0

    @property
    def soft_cap(self) -> float:
        """There is none."""
        return 0.0

    @property
    def sinks(self) -> None:
        """There are none."""
        return None

    @property
    def rotated_dim(self) -> int:
        return self.heads.dim - self.latent_rank

    def kv(self, kv_format: KVFormat) -> LayerKV:
        """The layer's KV of a token, in this format."""
        return LayerKV(KVEntry(kv_format, 1, self.heads.dim, latent=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    up: Linear
    """The up projection, stacked behind the gate where there is one."""
    down: Linear
    activation: str | ClampedSwiglu
    """silu, gelu_tanh or, in an expert, a `ClampedSwiglu` with a gate; gelu_tanh, gelu or
    relu_squared without one."""
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
    """A mixture: each token has a weighted sum of some of many MLPs, and what all tokens share."""

    router: Linear
    """Scores of each expert: [experts, hidden]."""
    routing: Routing
    correction: Tensor | None = None
    """Added to the scores that choose, not to those that weigh: [experts]."""
    experts: tuple[MLP, ...]
    shared: MLP | None = None
    """Added to the sum."""
    shared_gate: Linear | None = None
    """Its sigmoid is a factor on the shared part: [1, hidden]."""

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
"""Kinds of blocks in which a token reads those before it. Each has `heads`, `latent_rank`, `rope`,
`window`, `soft_cap`, `sinks` and what it keeps, `kv`; its last linear layer gives what the layer
adds."""
FeedForward = MLP | Experts
"""Kinds of blocks that compute each token by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x += scale * post_norm(mixer(norm(x))), then the same with the feed-forward."""

    mixer_norm: Norm | None
    """None: the mixer reads x itself."""
    mixer: Mixer
    mixer_post_norm: Norm | None = None
    feed_forward_norm: Norm | None
    """None: the feed-forward reads x itself, or what the mixer reads where they are parallel."""
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    """Factor on what is added to x."""
    parallel: bool = False
    """Whether the feed-forward's x is that before the mixer."""


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
    """Whether the scale is rounded to the model's dtype first: for Gemma."""
    positions: Tensor | None = None
    """Learned position embeddings."""
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Tensor
    tie_word_embeddings: bool
    """The output head is the embedding, and its tensor may be absent."""
    final_soft_cap: float = 0.0
    """Cap of logits: with c > 0 they become c * tanh(logit / c)."""
    logit_scale: float = 1.0
    """Factor on logits, before the cap."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """(prefix found in some checkpoints, prefix here)."""
    stacked: tuple[tuple[str, str], ...] = ()
    """(ending of the name of a tensor that holds those of all experts, ending of the name that each
    of them has here, with {} for its number)."""
    ignored: re.Pattern[str] = re.compile(r"rotary_emb\.inv_freq$")
    """Tensors that the computation doesn't need: buffers, towers for other inputs."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> Heads:
        """Heads of each layer: all layers have as many, since they share pages."""
        return self.layers[0].mixer.heads

    @property
    def latent_rank(self) -> int:
        """Numbers of a latent, which all layers keep alike; 0: they keep keys and values."""
        return self.layers[0].mixer.latent_rank

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that a token leaves in all layers."""
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
        """Each layer's KV of a token, in this format."""
        return tuple(layer.mixer.kv(kv_format) for layer in self.layers)

    @property
    def required(self) -> Iterator[Tensor]:
        """Every tensor but the head, in the order of the computation."""
        parts = self.embedding, self.positions, self.layers, self.final_norm
        return parts_of(parts, Tensor)

    @property
    def linears(self) -> Iterator[Linear]:
        """Linear layers but the head, in the order of the computation."""
        return parts_of(self.layers, Linear)

    @property
    def rounded_linears(self) -> Iterator[Linear]:
        """Linear layers whose weights may be rounded: all but routers."""
        return (one for one in self.linears if not one.is_exact)

    def canonical(self, stored_name: str) -> str:
        """The name used here for a checkpoint's tensor."""
        for found, here in self.prefixes:
            if stored_name.startswith(found):
                return here + stored_name.removeprefix(found)
        return stored_name

    def name_of_each(self, name: str) -> str | None:
        """What the tensors are called here, with {} for the number of each, that the tensor `name`
        of files holds along its first axis; None where it is one tensor."""
        for ending, here in self.stacked:
            if name.endswith("." + ending):
                return name.removesuffix(ending) + here
        return None


def parts_of(described: object, kind: type[Part]) -> Iterator[Part]:
    """The parts of one kind (tensors, linear layers, norms) of any blocks, in the order in which
    their fields name them."""
    if isinstance(described, kind):
        yield described
    elif isinstance(described, tuple):
        for item in described:
            yield from parts_of(item, kind)
    elif is_dataclass(described):
        for field in fields(described):
            yield from parts_of(getattr(described, field.name), kind)


def linear(at: str, inputs: int, bias: bool = False, /, **outputs: int) -> Linear:
    """The projections `at.name` with their numbers of outputs, side by side."""
    return Linear(
        tuple(Tensor(f"{at}.{name}.weight", (size, inputs)) for name, size in outputs.items()),
        tuple(Tensor(f"{at}.{name}.bias", (size,)) for name, size in outputs.items() if bias),
    )


def conv1d(name: str, inputs: int, outputs: int) -> Linear:
    """GPT-2's spelling: stored transposed, always with a bias."""
    weight = Tensor(f"{name}.weight", (inputs, outputs), transposed=True)
    return Linear((weight,), (Tensor(f"{name}.bias", (outputs,)),))


def by_heads(described: Linear, head_dim: int) -> Linear:
    """A projection of queries, keys and values of which files have each head's together."""

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
