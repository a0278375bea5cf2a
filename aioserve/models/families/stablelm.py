"""StableLM 2 (Bellagente et al., "Stable LM 2 1.6B technical report", 2024).

It is Llama with LayerNorms and a rotation of a quarter of each head. Options are biases on queries,
keys and values, and attention in parallel with the MLP.
"""

from __future__ import annotations

from aioserve.models.architecture import Architecture, layer_norm
from aioserve.models.families.common import (
    LLAMA_NAMES,
    BlockNorms,
    Names,
    activation,
    llama_like,
    read_shape,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["stablelm"]

_PARALLEL = Names(norms=BlockNorms("input_layernorm", None, None, None))


def stablelm(config: Fields) -> Architecture:
    if config.flag("qk_layernorm", False):
        config.unsupported("qk_layernorm", "LayerNorms of heads are not implemented")
    shape = read_shape(config, default_kv_heads=32, eps_field="layer_norm_eps", default_eps=1e-5)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, partial=0.25)
    parallel = config.flag("use_parallel_residual", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        names=_PARALLEL if parallel else LLAMA_NAMES,
        norm_of=layer_norm,
        qkv_bias=config.flag("use_qkv_bias", False),
        parallel=parallel,
    )
