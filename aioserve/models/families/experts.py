"""Mixtures of experts as config.json and checkpoints spell them: what the families that have them
share."""

from __future__ import annotations

from typing import Any

from aioserve.formats.routing import Routing
from aioserve.models.architecture import MLP, Experts, Linear, linear
from aioserve.models.fields import Fields

__all__ = ["MOST_EXPERTS", "gated_mlp", "mixture", "read_routing", "router", "sparse_layers"]

_ALSO = "num_local_experts"
MOST_EXPERTS = 1024
"""Most experts of a layer. Each is described before the checkpoint can say that it is missing."""
MOST_IN_ALL = 1 << 15
"""Most experts of all layers together: DeepSeek-V3 has 14,848, Kimi K2 23,040."""


def read_routing(config: Fields, field: str, experts: int, top_k: int, **other: Any) -> Routing:
    """As many experts as `field` says, or the name that transformers 5 writes in its place, and a
    softmax unless `other` has more of `Routing`.

    experts, top_k: defaults.
    """
    if config.has(_ALSO) and not config.has(field):
        field = _ALSO
    elif config.has(_ALSO) and config.values[_ALSO] != config.values[field]:
        config.invalid(_ALSO, f"as many as {field} {config.values[field]}")
    count = config.integer(field, experts, most=MOST_EXPERTS)
    layers = config.integer("num_hidden_layers")
    if count * layers > MOST_IN_ALL:
        config.invalid(field, f"at most {MOST_IN_ALL // layers} in each of {layers} layers")
    chosen = config.integer("num_experts_per_tok", top_k)
    if chosen > count:
        config.invalid("num_experts_per_tok", f"at most {field} {count}")
    return Routing(experts=count, top_k=chosen, **other)


def mixture(
    at: str,
    hidden: int,
    inner: int,
    routing: Routing,
    activation: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **other: Any,
) -> Experts:
    """Experts `at.experts.i` with their own tensors, chosen by `at.gate`.

    names: of the gate, up and down projections. other: more fields of `Experts`.
    """
    return Experts(
        router=router(f"{at}.gate", hidden, routing.experts),
        routing=routing,
        experts=tuple(
            gated_mlp(f"{at}.experts.{i}", hidden, inner, activation, names)
            for i in range(routing.experts)
        ),
        **other,
    )


def router(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
    """A layer that chooses, or weighs what others give: nothing rounds its weights."""
    at, _, last = name.rpartition(".")
    plain = linear(at, inputs, bias, **{last: outputs})
    return Linear(plain.weights, plain.biases, is_exact=True)


def gated_mlp(
    at: str,
    hidden: int,
    inner: int,
    activation: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> MLP:
    gate, up, down = names
    return MLP(
        up=linear(at, hidden, **{gate: inner, up: inner}),
        down=linear(at, inner, **{down: hidden}),
        activation=activation,
    )


def sparse_layers(config: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts, as Qwen's families say it: each `decoder_sparse_step`-th, but
    those in `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        config.invalid("mlp_only_layers", "a list of layers' numbers")
    return [(i + 1) % step == 0 and i not in set(dense) for i in range(num_layers)]
