"""GPT-NeoX and Pythia (Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023).

Attention and MLP read the residual in parallel, each through a LayerNorm of its own. There are
biases everywhere, a rotation of a quarter of each head, and gelu without a gate. One projection
makes queries, keys and values, head by head.
"""

from __future__ import annotations

import re

from aioserve.models.architecture import UNGATED, Architecture, layer_norm
from aioserve.models.families.common import Names, activation, llama_like, read_shape
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["neox"]

_NAMES = Names(
    root="gpt_neox",
    embedding="embed_in",
    final_norm="final_layer_norm",
    head="embed_out",
    attention="attention",
    qkv=("query_key_value",),
    by_heads=True,
    output="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)


def neox(config: Fields) -> Architecture:
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % num_heads:
        config.invalid("hidden_size", f"a multiple of num_attention_heads {num_heads}")
    plain = {**config.values, "num_key_value_heads": None, "head_dim": None}
    shape = read_shape(
        Fields(plain, config.source, config.path), eps_field="layer_norm_eps", default_eps=1e-5
    )
    rope = read_rope(
        config,
        shape.heads.dim,
        shape.max_positions,
        theta_field="rotary_emb_base",
        partial=0.25,
        partial_field="rotary_pct",
    )
    bias = config.flag("attention_bias", True)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "gelu", UNGATED),
        gated=False,
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        names=_NAMES,
        norm_of=layer_norm,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        parallel=config.flag("use_parallel_residual", True),
        prefixes=(("lm_head.", "embed_out."),),
        ignored=re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$"),
    )
