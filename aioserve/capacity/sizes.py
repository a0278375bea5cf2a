"""Sizes that the memory of a model depends on, also for models that the engine refuses to load.

A decoder that is served is described tensor by tensor. One that isn't (a mixture, a quantised
checkpoint, latent attention) says enough in its config.json to be counted anyway. Norms and biases
of its own, which are less than a thousandth, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.formats.weights import CUDA_ATTENTION
from aioserve.models.architecture import Experts, Tensor, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.families.common import LEAST_POSITIONS, MOST_LAYERS
from aioserve.models.fields import Fields
from aioserve.models.limits import too_large
from aioserve.models.quantization.config import read_scheme
from aioserve.paging.format import KVEntry, KVFormat
from aioserve.paging.layout import KVLayout, LayerKV, kv_layout

__all__ = ["ModelSizes", "ParameterCount", "count_expert", "count_idle", "count_parameters"]

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names under which models that see or hear describe their text decoder."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
WITH_KV = ("full_attention", "sliding_attention", "chunked_attention")
"""Values in `layer_types` of layers that keep keys and values of each token."""


class ParameterCount(msgspec.Struct, frozen=True):
    """Number of a decoder's weights, by how they are treated."""

    embeddings: int
    """Token embedding, learned positions, and the output head if it isn't the embedding."""
    matrices: int
    """Parameters of the layers' linear projections.

    Quantisation shrinks these, and every token is multiplied with them.
    """
    vectors: int
    """Norms and biases."""

    @property
    def total(self) -> int:
        return self.embeddings + self.matrices + self.vectors


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that need memory."""

    parameters: ParameterCount
    hidden_size: int
    """Numbers of a hidden state."""
    vocab_size: int
    has_head: bool = True
    """True if it makes tokens."""
    num_active_parameters: int
    """Parameters that compute one token: in a mixture, those of the experts that it is sent to."""
    num_query_heads: int
    num_kv_heads: int
    """KV heads. Latent attention has one."""
    key_dim: int
    """Numbers of a head's key, and as many of its value; of the latent vector for both."""
    is_latent: bool = False
    windows: tuple[int, ...]
    """Last positions that a token sees in each layer; 0: all."""
    max_position_embeddings: int
    dtype: str | None
    """Data type of the weights in files: float32, bfloat16, float16, fp8, int8 or int4.

    None: the configuration names none.
    """
    refused: str = ""
    """Reason why the engine doesn't load it; empty if it does."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of KV of a token, in all layers and heads."""
        return self.num_layers * self.num_kv_heads * self.key_dim * (1 if self.is_latent else 2)

    @property
    def shared_heads(self) -> int:
        """Heads that several GPUs divide among them.

        They are KV heads, or the query heads of latent attention, whose one latent vector each GPU
        keeps.
        """
        return self.num_query_heads if self.is_latent else self.num_kv_heads

    def up_to(self, max_model_len: int) -> ModelSizes:
        """Return the same for contexts of at most so many tokens, which KV pages are then laid out
        for.
        """
        return msgspec.structs.replace(self, max_position_embeddings=max_model_len)

    def entry(self, kv_format: KVFormat, num_gpus: int = 1) -> KVEntry:
        """Return the KV of one token in one layer, on each GPU, in this format."""
        heads = self.num_kv_heads if self.is_latent else self.num_kv_heads // num_gpus
        return KVEntry(kv_format, heads, self.key_dim, self.is_latent)

    def layout(self, kv_format: KVFormat, num_gpus: int = 1) -> KVLayout:
        """Return the layers that share a KV page on each GPU, in this format.

        Contexts are as long as the model's.
        """
        entry = self.entry(kv_format, num_gpus)
        layers = [LayerKV(entry, window) for window in self.windows]
        return kv_layout(layers, self.max_position_embeddings)

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelSizes:
        count = count_parameters(config)
        return cls(
            parameters=count,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            has_head=config.has_head,
            num_active_parameters=count.total - count_idle(config),
            num_query_heads=config.layers[0].mixer.heads.query,
            num_kv_heads=config.num_kv_heads,
            key_dim=config.head_dim,
            is_latent=bool(config.latent_rank),
            windows=tuple(layer.mixer.window for layer in config.layers),
            max_position_embeddings=config.max_position_embeddings,
            dtype=(config.quantization and config.quantization.precision) or config.dtype,
            refused=too_large(config, CUDA_ATTENTION) or "",
        )

    @classmethod
    def of_refused(
        cls, config: Mapping[str, Any], source: str, refusal: UnsupportedModelError
    ) -> ModelSizes:
        """Return sizes from a config.json.

        Raises the refusal if that says too little, and for a model that isn't a decoder with keys
        and values in every layer.
        """
        fields = Fields(config, source)
        if config.get("is_encoder_decoder") is True:
            raise refusal
        text = next((fields.nested(name) for name in TEXT_CONFIGS if fields.has(name)), fields)
        types = text.values.get("layer_types")
        if isinstance(types, list) and not all(kind in WITH_KV for kind in types):
            raise refusal
        try:
            return _sizes(text, _dtype(fields, text, refusal), str(refusal))
        except UnsupportedModelError:
            raise
        except ModelError as error:
            raise UnsupportedModelError(f"{refusal}. Its sizes aren't known: {error}") from error


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Count the tensors of a checkpoint of `config`; tied embeddings count once."""
    embeddings = math.prod(config.embedding.shape)
    if config.positions is not None:
        embeddings += math.prod(config.positions.shape)
    if not config.tie_word_embeddings:
        embeddings += math.prod(config.head.shape)
    matrices = vectors = 0
    for tensor in parts_of((config.layers, config.final_norm), Tensor):
        if len(tensor.shape) > 1:
            matrices += math.prod(tensor.shape)
        else:
            vectors += math.prod(tensor.shape)
    return ParameterCount(embeddings, matrices, vectors)


def count_idle(config: DecoderConfig) -> int:
    """Return the parameters of the experts that one token isn't sent to."""
    return sum(
        count_expert(mixture) * (mixture.routing.experts - mixture.routing.top_k)
        for mixture in parts_of(config.layers, Experts)
    )


def count_expert(mixture: Experts) -> int:
    """Return the parameters of one expert of a mixture, all of which have as many."""
    return sum(math.prod(one.shape) for one in parts_of(mixture.experts[0], Tensor))


# -- a config.json that no family reads


def _sizes(text: Fields, dtype: str | None, refusal: str) -> ModelSizes:
    hidden, vocab = text.integer("hidden_size"), text.integer("vocab_size")
    num_layers = text.integer("num_hidden_layers", most=MOST_LAYERS)
    heads = text.integer("num_attention_heads")
    attention, num_kv_heads, key_dim = _attention(text, hidden, heads)
    dense, sparse, active = _feed_forwards(text, hidden, num_layers)
    embeddings = vocab * hidden
    if not text.flag("tie_word_embeddings", False):
        embeddings *= 2
    vectors = (2 * num_layers + 1) * hidden
    matrices = num_layers * attention + dense + sparse
    return ModelSizes(
        parameters=ParameterCount(embeddings, matrices, vectors),
        hidden_size=hidden,
        vocab_size=vocab,
        num_active_parameters=embeddings + vectors + num_layers * attention + dense + active,
        num_query_heads=heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        is_latent=text.has("kv_lora_rank"),
        # All are kept: only the family knows which layers see a window, and none reads this file.
        windows=(0,) * num_layers,
        max_position_embeddings=text.integer("max_position_embeddings", least=LEAST_POSITIONS),
        dtype=dtype,
        refused=refusal,
    )


def _attention(text: Fields, hidden: int, heads: int) -> tuple[int, int, int]:
    """Return the weights of a layer's attention, KV heads, and numbers of a key or latent
    vector.
    """
    if text.has("kv_lora_rank"):
        latent, rope = text.integer("kv_lora_rank"), text.integer("qk_rope_head_dim")
        plain, value = text.integer("qk_nope_head_dim"), text.integer("v_head_dim")
        query = heads * (plain + rope)
        if text.has("q_lora_rank"):
            rank = text.integer("q_lora_rank")
            queries = rank * (hidden + query)
        else:
            queries = hidden * query
        keys = hidden * (latent + rope) + latent * heads * (plain + value)
        return queries + keys + heads * value * hidden, 1, latent + rope
    head_dim = text.integer("head_dim", hidden // heads or None)
    kv_heads = text.integer("num_key_value_heads", heads)
    return 2 * hidden * head_dim * (heads + kv_heads), kv_heads, head_dim


def _feed_forwards(text: Fields, hidden: int, num_layers: int) -> tuple[int, int, int]:
    """Return the weights of all dense feed-forwards, of all mixtures, and of the active experts.

    The last number is that of the weights of mixtures that a token is multiplied with.
    """
    count = _first(text, EXPERT_COUNTS)
    inner = text.integer("intermediate_size", 0 if count else None, least=0)
    if not count:
        return num_layers * 3 * hidden * inner, 0, 0
    expert = 3 * hidden * text.integer("moe_intermediate_size", inner or None)
    shared = 3 * hidden * text.integer("shared_expert_intermediate_size", 0, least=0)
    shared += expert * text.integer("n_shared_experts", 0, least=0)
    router = hidden * count
    num_dense = _num_dense(text, num_layers)
    num_sparse = num_layers - num_dense
    used = min(count, _first(text, ACTIVE_COUNTS) or count)
    return (
        num_dense * 3 * hidden * inner,
        num_sparse * (router + shared + count * expert),
        num_sparse * (router + shared + used * expert),
    )


def _num_dense(text: Fields, num_layers: int) -> int:
    """Return the number of layers of a mixture that have no experts."""
    first = text.integer("first_k_dense_replace", 0, least=0)
    every = text.integer("decoder_sparse_step", text.integer("moe_layer_freq", 1))
    dense = text.token_ids("mlp_only_layers")
    return sum(
        layer < first or layer in dense or (every > 1 and (layer + 1) % every != 0)
        for layer in range(num_layers)
    )


def _first(text: Fields, names: tuple[str, ...]) -> int:
    """Return the first of these counts that is given, or 0."""
    return next((text.integer(name, least=0) for name in names if text.has(name)), 0)


def _dtype(config: Fields, text: Fields, refusal: UnsupportedModelError) -> str | None:
    """Return the precision of the matrices.

    Raises the refusal for a quantisation that doesn't give its bits.
    """
    said = next((each for each in (config, text) if each.has("quantization_config")), None)
    if said is not None:
        return _quantised(said, refusal)
    name = "dtype" if text.has("dtype") else "torch_dtype"
    where = text if text.has(name) else config
    dtype = where.text(name, "").removeprefix("torch.")
    return dtype if dtype in ("float32", "bfloat16", "float16") else None


def _quantised(config: Fields, refusal: UnsupportedModelError) -> str:
    try:
        scheme = read_scheme(config)
    except UnsupportedModelError:
        raise refusal from None
    return scheme.precision if scheme is not None else ""
