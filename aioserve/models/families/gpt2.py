"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

It has LayerNorms, learned positions, biases everywhere, and an MLP without a gate. Files store
weights transposed.
"""

from __future__ import annotations

import re

from aioserve.models.architecture import (
    MLP,
    UNGATED,
    Architecture,
    Attention,
    Heads,
    Layer,
    Tensor,
    conv1d,
    layer_norm,
)
from aioserve.models.families.common import LEAST_POSITIONS, MOST_LAYERS, activation
from aioserve.models.fields import Fields

__all__ = ["gpt2"]


def gpt2(config: Fields) -> Architecture:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(name, False):
            config.unsupported(name, "not implemented")
    hidden, num_heads = config.integer("n_embd"), config.integer("n_head")
    if hidden % num_heads:
        config.invalid("n_embd", f"a multiple of n_head {num_heads}")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    inner = config.integer("n_inner", 4 * hidden)
    num_layers = config.integer("n_layer", most=MOST_LAYERS)
    num_positions = config.integer("n_positions", 1024, least=LEAST_POSITIONS)
    vocab = config.integer("vocab_size")
    eps = config.number("layer_norm_epsilon", 1e-5)
    gelu = activation(config, "activation_function", "gelu_new", UNGATED)
    scale = heads.dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0

    def layer(at: str) -> Layer:
        return Layer(
            mixer_norm=layer_norm(f"{at}.ln_1", hidden, eps),
            mixer=Attention(
                heads=heads,
                qkv=conv1d(f"{at}.attn.c_attn", hidden, 3 * hidden),
                output=conv1d(f"{at}.attn.c_proj", hidden, hidden),
                scale=scale,
                rope=None,
            ),
            feed_forward_norm=layer_norm(f"{at}.ln_2", hidden, eps),
            feed_forward=MLP(
                up=conv1d(f"{at}.mlp.c_fc", hidden, inner),
                down=conv1d(f"{at}.mlp.c_proj", inner, hidden),
                activation=gelu,
                gated=False,
            ),
        )

    root = "transformer"
    return Architecture(
        vocab_size=vocab,
        hidden_size=hidden,
        max_position_embeddings=num_positions,
        embedding=Tensor(f"{root}.wte.weight", (vocab, hidden)),
        positions=Tensor(f"{root}.wpe.weight", (num_positions, hidden)),
        layers=tuple(layer(f"{root}.h.{i}") for i in range(num_layers)),
        final_norm=layer_norm(f"{root}.ln_f", hidden, eps),
        head=Tensor("lm_head.weight", (vocab, hidden)),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        prefixes=tuple((name, f"{root}.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")),
        ignored=re.compile(r"\.attn\.(masked_)?bias$"),
    )
