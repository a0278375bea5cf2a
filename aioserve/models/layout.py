"""Which tensors a checkpoint of a `DecoderConfig` holds: names, shapes, and what may be left over.

A description only: no files, no torch. The loader walks it, and so does whoever writes weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from aioserve.models.config import DecoderConfig

__all__ = ["LayerLayout", "LinearLayout", "ModelLayout", "NormLayout", "Tensor", "layout_of"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """Weights that become one [N, K] matrix, stacked along N; likewise the biases, or none.

    With `transposed` each weight is stored as [K, N].
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    transposed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.weights + self.biases


@dataclass(frozen=True, slots=True)
class NormLayout:
    weight: Tensor
    bias: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    attention_norm: NormLayout
    qkv: LinearLayout
    query_norm: NormLayout | None
    key_norm: NormLayout | None
    output: LinearLayout
    attention_post_norm: NormLayout | None
    mlp_norm: NormLayout
    up: LinearLayout
    """gate and up stacked for a gated MLP."""
    down: LinearLayout
    mlp_post_norm: NormLayout | None

    @property
    def tensors(self) -> Iterator[Tensor]:
        parts = (
            self.attention_norm, self.qkv, self.query_norm, self.key_norm, self.output,
            self.attention_post_norm, self.mlp_norm, self.up, self.down, self.mlp_post_norm,
        )  # fmt: skip
        for part in parts:
            if part is not None:
                yield from part.tensors


@dataclass(frozen=True, slots=True)
class ModelLayout:
    embedding: Tensor
    positions: Tensor | None
    """Learned position embeddings."""
    layers: tuple[LayerLayout, ...]
    final_norm: NormLayout
    head: Tensor
    """Where embeddings are tied it may be absent, and the embedding stands for it."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """(prefix found in some checkpoints, prefix here)."""
    ignored: re.Pattern[str] = re.compile(r"rotary_emb\.inv_freq$")
    """Tensors that the computation doesn't need: buffers, towers for other inputs."""

    @property
    def required(self) -> Iterator[Tensor]:
        """Every tensor but the head, in the order of the computation."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions
        for layer in self.layers:
            yield from layer.tensors
        yield from self.final_norm.tensors

    def canonical(self, stored_name: str) -> str:
        """The name used here for a checkpoint's tensor."""
        for found, here in self.prefixes:
            if stored_name.startswith(found):
                return here + stored_name.removeprefix(found)
        return stored_name


def layout_of(config: DecoderConfig) -> ModelLayout:
    """The tensors of a checkpoint of `config`."""
    return _gpt2(config) if config.tensors == "conv1d" else _llama_like(config)


def _llama_like(config: DecoderConfig) -> ModelLayout:
    hidden = config.hidden_size
    head = Tensor("lm_head.weight", (config.vocab_size, hidden))
    layers = tuple(_llama_layer(config, f"model.layers.{i}.") for i in range(config.num_layers))
    embedding = Tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
    final_norm = _norm("model.norm", hidden)
    if config.architecture != "Gemma3ForConditionalGeneration":
        return ModelLayout(embedding, None, layers, final_norm, head)
    return ModelLayout(
        embedding,
        None,
        layers,
        final_norm,
        head,
        prefixes=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored=re.compile(
            r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\."
        ),
    )


def _llama_layer(config: DecoderConfig, prefix: str) -> LayerLayout:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    if config.tensors == "fused":
        qkv = _linear([(f"{attention}qkv_proj", query + 2 * key)], hidden, config.qkv_bias)
        up = _linear([(f"{mlp}gate_up_proj", 2 * inner)], hidden, config.mlp_bias)
    else:
        sizes = {"q": query, "k": key, "v": key}
        qkv = _linear(
            [(f"{attention}{part}_proj", size) for part, size in sizes.items()],
            hidden,
            config.qkv_bias,
        )
        up = _linear(
            [(f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)], hidden, config.mlp_bias
        )
    sandwich = config.sandwich_norms
    return LayerLayout(
        attention_norm=_norm(f"{prefix}input_layernorm", hidden),
        qkv=qkv,
        query_norm=_norm(f"{attention}q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=_norm(f"{attention}k_norm", config.head_dim) if config.qk_norm else None,
        output=_linear([(f"{attention}o_proj", hidden)], query, config.output_bias),
        attention_post_norm=(
            _norm(f"{prefix}post_attention_layernorm", hidden) if sandwich else None
        ),
        mlp_norm=_norm(
            f"{prefix}{'pre_feedforward' if sandwich else 'post_attention'}_layernorm", hidden
        ),
        up=up,
        down=_linear([(f"{mlp}down_proj", hidden)], inner, config.mlp_bias),
        mlp_post_norm=_norm(f"{prefix}post_feedforward_layernorm", hidden) if sandwich else None,
    )


def _gpt2(config: DecoderConfig) -> ModelLayout:
    hidden = config.hidden_size
    root = "transformer."
    return ModelLayout(
        embedding=Tensor(f"{root}wte.weight", (config.vocab_size, hidden)),
        positions=Tensor(f"{root}wpe.weight", (config.max_position_embeddings, hidden)),
        layers=tuple(_gpt2_layer(config, f"{root}h.{i}.") for i in range(config.num_layers)),
        final_norm=_layer_norm(f"{root}ln_f", hidden),
        head=Tensor("lm_head.weight", (config.vocab_size, hidden)),
        prefixes=tuple((name, root + name) for name in ("wte.", "wpe.", "h.", "ln_f.")),
        ignored=re.compile(r"\.attn\.(masked_)?bias$"),
    )


def _gpt2_layer(config: DecoderConfig, prefix: str) -> LayerLayout:
    hidden, inner = config.hidden_size, config.intermediate_size
    return LayerLayout(
        attention_norm=_layer_norm(f"{prefix}ln_1", hidden),
        qkv=_conv1d(f"{prefix}attn.c_attn", hidden, 3 * hidden),
        query_norm=None,
        key_norm=None,
        output=_conv1d(f"{prefix}attn.c_proj", hidden, hidden),
        attention_post_norm=None,
        mlp_norm=_layer_norm(f"{prefix}ln_2", hidden),
        up=_conv1d(f"{prefix}mlp.c_fc", hidden, inner),
        down=_conv1d(f"{prefix}mlp.c_proj", inner, hidden),
        mlp_post_norm=None,
    )


def _linear(outputs: list[tuple[str, int]], inputs: int, bias: bool) -> LinearLayout:
    return LinearLayout(
        weights=tuple(Tensor(f"{name}.weight", (size, inputs)) for name, size in outputs),
        biases=tuple(Tensor(f"{name}.bias", (size,)) for name, size in outputs) if bias else (),
    )


def _conv1d(name: str, inputs: int, outputs: int) -> LinearLayout:
    return LinearLayout(
        weights=(Tensor(f"{name}.weight", (inputs, outputs)),),
        biases=(Tensor(f"{name}.bias", (outputs,)),),
        transposed=True,
    )


def _norm(name: str, size: int) -> NormLayout:
    return NormLayout(Tensor(f"{name}.weight", (size,)))


def _layer_norm(name: str, size: int) -> NormLayout:
    return NormLayout(Tensor(f"{name}.weight", (size,)), Tensor(f"{name}.bias", (size,)))
