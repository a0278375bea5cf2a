"""Parts that families share: fields of config.json, and Llama's decoder.

Most families are Llama's decoder with changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from aioserve.models.architecture import (
    GATED,
    MLP,
    Architecture,
    Attention,
    FeedForward,
    Heads,
    Layer,
    Norm,
    Tensor,
    by_heads,
    linear,
    rms_norm,
)
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.rope import RopeConfig, positions_served

__all__ = [
    "LEAST_POSITIONS",
    "LLAMA_NAMES",
    "MOST_LAYERS",
    "BlockNorms",
    "Names",
    "Shape",
    "activation",
    "beside_towers",
    "layer_types",
    "llama_like",
    "nested_text",
    "read_shape",
    "same_windows",
    "sliding_but_each",
    "windows",
]

MOST_LAYERS = 1024
"""Most layers of a model. The largest model of these families has 126.

Each layer is described, which takes time, before a checkpoint can show that it is missing."""
LEAST_POSITIONS = 2
"""Fewest positions of a model: one for a prompt and one for its completion."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int
    hidden: int
    inner: int
    num_layers: int
    heads: Heads
    max_positions: int
    eps: float
    tied: bool


def read_shape(
    config: Fields,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    eps_field: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    tied: bool = False,
) -> Shape:
    config = config.without_nothing("head_dim")
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default_head_dim or hidden // num_heads or None)
    if not config.has("num_key_value_heads") and "num_key_value_heads" in config.values:
        default_kv_heads = None  # an explicit null means as many as query heads
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % kv_heads:
        config.invalid("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    return Shape(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        inner=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=Heads(num_heads, kv_heads, head_dim),
        max_positions=positions_served(
            config, config.integer("max_position_embeddings", least=LEAST_POSITIONS)
        ),
        eps=config.number(eps_field, default_eps),
        tied=config.flag("tie_word_embeddings", tied),
    )


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """Names of a layer's norms, before and behind its two blocks; None for an absent norm."""

    attention: str | None
    attention_post: str | None
    mlp: str | None
    mlp_post: str | None


BEFORE = BlockNorms("input_layernorm", None, "post_attention_layernorm", None)
"""Norms of Llama's layers."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's tensors that differ among families."""

    root: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Projections of queries, keys and values, or one fused projection."""
    by_heads: bool = False
    """True if the fused projection keeps each head's query, key and value together."""
    output: str = "o_proj"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate and up projections, or one fused projection; without a gate, only the up projection."""
    down: str = "down_proj"
    norms: BlockNorms = BEFORE


LLAMA_NAMES = Names()


def llama_like(
    shape: Shape,
    *,
    activation: str,
    ropes: Sequence[RopeConfig | None],
    windows: Sequence[int],
    names: Names = LLAMA_NAMES,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    gated: bool = True,
    head_norms: Literal["each", "all"] | None = None,
    norm_of: Callable[[str, int, float], Norm] = rms_norm,
    scale: float | None = None,
    attention_cap: float = 0.0,
    sinks: bool = False,
    feed_forward: Callable[[str, int], FeedForward] | None = None,
    residual_scale: float = 1.0,
    parallel: bool = False,
    prefixes: tuple[tuple[str, str], ...] = (),
    **other: Any,
) -> Architecture:
    """Describe Llama's decoder with the changes of another family.

    - ropes, windows: rope (or None) and window (or 0) of each layer.
    - gated: True if the MLP has a gate.
    - head_norms: RMS norms of each query and key head, or of all heads together; None: no norms.
    - norm_of: function that makes a norm of its name, size and epsilon.
    - scale: factor on scores; None: 1 / sqrt(head_dim).
    - sinks: True if attention has sinks.
    - feed_forward: function from the name of a layer's feed-forward and the layer's index to its
      description; None: an MLP.
    - residual_scale, parallel: fields of `Layer`.
    - prefixes: further `prefixes` of `Architecture`, before those of a bare decoder.
    - other: further fields of `Architecture`.
    """
    hidden, inner, heads = shape.hidden, shape.inner, shape.heads
    qkv_sizes = [heads.query_size, heads.kv_size, heads.kv_size]
    up_size = 2 * inner if gated else inner
    qkv = _projections(names.qkv, qkv_sizes)
    up = _projections(names.up, [up_size // len(names.up)] * len(names.up))

    def norm(name: str) -> Norm:
        return norm_of(name, hidden, shape.eps)

    def block_norm(at: str, name: str | None) -> Norm | None:
        return None if name is None else norm(f"{at}.{name}")

    def head_norm(name: str, num_heads: int) -> Norm | None:
        if head_norms is None:
            return None
        return norm_of(name, heads.dim * (1 if head_norms == "each" else num_heads), shape.eps)

    def mlp(at: str, _: int) -> FeedForward:
        return MLP(
            up=linear(at, hidden, mlp_bias, **up),
            down=linear(at, inner, mlp_bias, **{names.down: hidden}),
            activation=activation,
            gated=gated,
        )

    def layer(index: int, rope: RopeConfig | None, window: int) -> Layer:
        at = f"{names.root}.layers.{index}"
        attention = f"{at}.{names.attention}"
        projected = linear(attention, hidden, qkv_bias, **qkv)
        return Layer(
            mixer_norm=block_norm(at, names.norms.attention),
            mixer=Attention(
                heads=heads,
                qkv=by_heads(projected, heads.dim) if names.by_heads else projected,
                query_norm=head_norm(f"{attention}.q_norm", heads.query),
                key_norm=head_norm(f"{attention}.k_norm", heads.kv),
                output=linear(attention, heads.query_size, output_bias, **{names.output: hidden}),
                scale=heads.dim**-0.5 if scale is None else scale,
                rope=rope,
                window=window,
                soft_cap=attention_cap,
                sinks=Tensor(f"{attention}.sinks", (heads.query,), is_wide=True) if sinks else None,
            ),
            mixer_post_norm=block_norm(at, names.norms.attention_post),
            feed_forward_norm=block_norm(at, names.norms.mlp),
            feed_forward=(feed_forward or mlp)(f"{at}.{names.mlp}", index),
            feed_forward_post_norm=block_norm(at, names.norms.mlp_post),
            residual_scale=residual_scale,
            parallel=parallel,
        )

    return Architecture(
        vocab_size=shape.vocab,
        hidden_size=hidden,
        max_position_embeddings=shape.max_positions,
        embedding=Tensor(f"{names.root}.{names.embedding}.weight", (shape.vocab, hidden)),
        layers=tuple(
            layer(i, rope, window)
            for i, (rope, window) in enumerate(zip(ropes, windows, strict=True))
        ),
        final_norm=norm(f"{names.root}.{names.final_norm}"),
        head=Tensor(f"{names.head}.weight", (shape.vocab, hidden)),
        tie_word_embeddings=shape.tied,
        prefixes=(*prefixes, *_without_root(names)),
        **other,
    )


def _without_root(names: Names) -> tuple[tuple[str, str], ...]:
    """Prefixes for a bare decoder, as models for embeddings are stored."""
    parts = ("layers", names.embedding, names.final_norm)
    return tuple((f"{part}.", f"{names.root}.{part}.") for part in parts)


def _projections(names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Outputs of each projection, or of the fused one."""
    return dict(zip(names, sizes, strict=True)) if len(names) > 1 else {names[0]: sum(sizes)}


def activation(
    config: Fields, name: str, default: str, implemented: tuple[str, ...] = GATED
) -> str:
    found = _ACTIVATIONS.get(config.text(name, default))
    if found not in implemented:
        known = [key for key, value in _ACTIVATIONS.items() if value in implemented]
        config.unsupported(name, f"the activations are {', '.join(known)}")
    return found


def same_windows(config: Fields, num_layers: int, absent: int | None) -> list[int]:
    """Read a window that all layers share; 0 if the field is null or 0.

    `absent`: window if the field is absent; None: no window."""
    if "sliding_window" not in config.values and absent is not None:
        window = absent
    else:
        window = config.integer("sliding_window", 0, least=0)
    expected = ["sliding_attention" if window else "full_attention"] * num_layers
    if layer_types(config, expected) != expected:
        config.unsupported("layer_types", "this architecture treats all layers alike")
    return [window] * num_layers


def layer_types(config: Fields, default: list[str]) -> list[str]:
    """Read the type of each layer: full_attention or sliding_attention."""
    if asks_nothing(config.values.get("layer_types")):
        return default
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(default):
        config.invalid("layer_types", f"a list with one entry for each of {len(default)} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.unsupported("layer_types", "layers are full_attention or sliding_attention")
    return kinds


def sliding_but_each(pattern: int, num_layers: int) -> list[str]:
    """Types of layers: every `pattern`-th has full attention, and the others slide."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(layer + 1) % pattern > 0] for layer in range(num_layers)]


def nested_text(config: Fields, **defaults: int) -> Fields:
    """Return the fields that describe the language model of an image-and-text checkpoint.

    `defaults` are those of the model's config class, for absent fields. A null field stays null,
    which for example means no window."""
    text = config.nested("text_config")
    values = {**defaults, **text.values}
    for name in ("eos_token_id", "bos_token_id", "dtype", "torch_dtype"):
        if config.has(name) and not text.has(name):
            values[name] = config.values[name]
    if config.has("tie_word_embeddings"):  # the field of the whole model wins
        values["tie_word_embeddings"] = config.values["tie_word_embeddings"]
    return Fields(values, config.source, "text_config.")


def beside_towers(text: Architecture) -> Architecture:
    """Adapt a language model to the names in image-and-text checkpoints, and ignore towers."""
    towers = r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\."
    return replace(
        text,
        prefixes=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored=re.compile(towers),
    )


def windows(config: Fields, kinds: list[str]) -> list[int]:
    """Read the windows of layers of these types; 0 for full attention."""
    if "sliding_attention" not in kinds:
        return [0] * len(kinds)
    absent = 4096 if "sliding_window" not in config.values else None
    window = config.integer("sliding_window", absent)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
