"""GPT-OSS (OpenAI, "gpt-oss-120b and gpt-oss-20b model card", 2025).

Every second layer has a sliding window, and each query head a sink. Experts have biases and a
clamped SwiGLU. Files stack the experts of a layer in one tensor, with rows of gate and up in turn.
"""

from __future__ import annotations

from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.models.architecture import (
    MLP,
    Architecture,
    Experts,
    FeedForward,
    Linear,
    Tensor,
)
from aioserve.models.families.common import (
    activation,
    layer_types,
    llama_like,
    read_shape,
    sliding_but_each,
)
from aioserve.models.families.experts import read_routing, router
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["gpt_oss"]

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_PARTS = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
_STACKED = tuple(
    (f"experts.{name}{ending}", f"experts.{{}}.{name}.{part}")
    for name in ("gate_up_proj", "down_proj")
    for ending, part in _PARTS.items()
)


def gpt_oss(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=8, default_head_dim=64, default_eps=1e-5)
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        config = Fields({**config.values, "rope_scaling": _ROPE}, config.source)
    heads = shape.heads
    rope = read_rope(config, heads.dim, shape.max_positions, default_theta=150_000.0)
    kinds = layer_types(config, sliding_but_each(2, shape.num_layers))
    window = 0
    if "sliding_attention" in kinds:
        window = config.integer("sliding_window", 128)
    gate = ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    activation(config, "hidden_act", "silu", ("silu",))
    routing = read_routing(config, "num_local_experts", 128, 4, normalized=True)
    bias = config.flag("attention_bias", True)

    def experts(at: str, _: int) -> FeedForward:
        return Experts(
            router=router(f"{at}.router", shape.hidden, routing.experts, bias=True),
            routing=routing,
            experts=_experts(f"{at}.experts", shape.hidden, shape.inner, routing, gate),
        )

    return llama_like(
        shape,
        activation="silu",
        ropes=[rope] * shape.num_layers,
        windows=[window if kind == "sliding_attention" else 0 for kind in kinds],
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        feed_forward=experts,
        stacked=_STACKED,
    )


def _experts(
    at: str, hidden: int, inner: int, routing: Routing, gate: ClampedSwiglu
) -> tuple[MLP, ...]:
    def projection(name: str, inputs: int, outputs: int, turns: tuple[int, int] | None) -> Linear:
        weight = Tensor(f"{name}.weight", (inputs, outputs), transposed=True, turns=turns)
        return Linear((weight,), (Tensor(f"{name}.bias", (outputs,), turns=turns),))

    return tuple(
        MLP(
            up=projection(f"{at}.{i}.gate_up_proj", hidden, 2 * inner, (2, 1)),
            down=projection(f"{at}.{i}.down_proj", inner, hidden, None),
            activation=gate,
        )
        for i in range(routing.experts)
    )
