"""Mixtures of experts in config.json and checkpoints, for all families that have them."""

from __future__ import annotations

from typing import Any

from aioserve.formats.routing import Routing
from aioserve.models.architecture import MLP, Experts, Linear, linear
from aioserve.models.fields import Fields

__all__ = ["MOST_EXPERTS", "gated_mlp", "mixture", "read_routing", "router", "sparse_layers"]

_ALSO = "num_local_experts"
MOST_EXPERTS = 1024
"""Most experts of a layer. Each is described before a checkpoint can show that it is missing."""
MOST_IN_ALL = 1 << 15
"""Most experts of all layers together: DeepSeek-V3 has 14,848, Kimi K2 23,040."""


def read_routing(config: Fields, field: str, experts: int, top_k: int, **other: Any) -> Routing:
    """Read a routing, by a softmax unless `other` has other fields of `Routing`.

    - field: field with the number of experts, which transformers 5 calls `num_local_experts`.
    - experts, top_k: defaults.
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
    """Describe experts `at.experts.i` with tensors of their own, chosen by `at.gate`.

    - names: names of the gate, up and down projections.
    - other: further fields of `Experts`.
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
    """Describe a layer whose weights are never rounded, since it chooses experts or weighs them."""
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
    """True for each layer with experts, by the fields of Qwen's families.

    These are every `decoder_sparse_step`-th layer except those in `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        config.invalid("mlp_only_layers", "a list of layers' numbers")
    return [(i + 1) % step == 0 and i not in set(dense) for i in range(num_layers)]
