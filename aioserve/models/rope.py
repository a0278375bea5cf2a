"""Rotary position embeddings as configs describe them: kinds, bases, scalings. No tensors.

Reads the fields of transformers 4 (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and of
transformers 5 (`rope_parameters`, flat or per layer type).
"""

from __future__ import annotations

import logging
import math

import msgspec
from msgspec.structs import replace

from aioserve.models.fields import MOST_INTEGER, Fields, asks_nothing

__all__ = ["RopeConfig", "longrope_scale", "positions_served", "read_rope"]

logger: logging.Logger = logging.getLogger(__name__)

_KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
_KNOWN_KEYS = frozenset(
    {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
        "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor",
        "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "max_position_embeddings", "llama_4_scaling_beta", "attn_factor",
    }
)  # fmt: skip
_PLAIN = {"extrapolation_factor": 1, "attn_factor": 1, "finetuned": True}
"""Values of parameters that change nothing, in addition to zero and false."""
_ZERO_COUNTS = frozenset(
    {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
        "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
        "beta_slow", "truncate",
    }
)  # fmt: skip
"""Parameters for which zero or false has a meaning, or is invalid."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rule that gives the angles of one kind of layer for each position.

    With d the rotated dimensions, frequency i is `theta ** (-2i / d)`, then scaled by `kind`.
    """

    kind: str
    """default, linear (Gemma 3), dynamic (NTK-aware, with a base that follows the longest context),
    llama3 (Llama 3.1), longrope (Phi-3, arXiv 2402.13753) or yarn (arXiv 2309.00071)."""
    theta: float
    rotary_dim: int
    """Number of leading dimensions of each head that are rotated; even, at most all."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """Longest context of the pretraining (dynamic, llama3, longrope, yarn)."""
    short_factor: tuple[float, ...] = ()
    """longrope, for contexts of up to `original_max_positions`: one divisor per frequency."""
    long_factor: tuple[float, ...] = ()
    """longrope, for longer contexts: one divisor per frequency."""
    attention_factor: float = 1.0
    """Factor on cos and sin (longrope, yarn).

    A config's `attn_factor`, which vLLM and llama.cpp read, multiplies that of yarn."""
    score_factor: float = 1.0
    """yarn: further factor on the scores of latent attention, as in DeepSeek's code."""
    beta_fast: float = 32.0
    """yarn: turns in the original context, above which pairs keep their frequency."""
    beta_slow: float = 1.0
    """yarn: turns in the original context, below which pairs are slowed down by all of `factor`."""
    truncate: bool = True
    """yarn: True if the two ends of the ramp are rounded to whole pairs."""
    interleaved: bool = False
    """True if pairs are dimensions 2 i and 2 i + 1; False: i and i + rotary_dim / 2."""
    query_beta: float = 0.0
    """Llama 4's scaling of attention; 0: none.

    With b > 0, queries at position p are multiplied by
    1 + b * log(1 + floor(p / original_max_positions))."""

    @property
    def depends_on_longest_context(self) -> bool:
        """True if the angles depend on the longest context served."""
        return self.kind in ("longrope", "dynamic")


def read_rope(
    config: Fields,
    head_dim: int,
    max_positions: int,
    *,
    layer_type: str | None = None,
    theta_field: str = "rope_theta",
    default_theta: float = 10_000.0,
    scaled: bool = True,
    partial: float | None = None,
    partial_field: str = "partial_rotary_factor",
    default_original: int | None = None,
    interleaved: bool = False,
    scales_queries: bool = False,
) -> RopeConfig:
    """Read the rope of the layers of `layer_type`, or of all layers.

    - theta_field: field of the base in old configs.
    - scaled: True if an old config's `rope_scaling` applies to these layers.
    - partial: fraction of each head that the family rotates unless the config has another; None:
      it rotates whole heads.
    - partial_field: field of that fraction in old configs.
    - default_original: the original context unless the config has another; None: `max_positions`.
    - scales_queries: True if the family honours `llama_4_scaling_beta`.

    Raises `UnsupportedModelError` and `ModelError`.
    """
    rope = _known(_select(config, layer_type, scaled))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.has("llama_4_scaling_beta") and not (scales_queries and kind == "yarn"):
        rope.unsupported("llama_4_scaling_beta", "Ministral 3 scales queries, with a yarn rope")
    if default_original is not None and kind in ("su", "yarn"):
        kind = "longrope"  # by its names in early Phi-3 configs
    if rope.has("attn_factor") and kind != "yarn":
        rope.unsupported("attn_factor", "it scales ropes of the type yarn")
    if kind not in _KINDS:
        name = "rope_type" if rope.has("rope_type") else "type"
        rope.unsupported(name, f"the rope types are {', '.join(_KINDS)}")
    theta = rope.number("rope_theta", config.number(theta_field, default_theta))
    rotary_dim = _rotary_dim(config, rope, head_dim, partial, partial_field)
    found = RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
    if kind == "default":
        return found
    if kind == "linear":
        return replace(found, factor=rope.number("factor"))
    if kind == "dynamic":
        return _dynamic(config, rope, found)
    original = _original_max_positions(config, rope, default_original or max_positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            rope.invalid("high_freq_factor", f"above low_freq_factor {low:g}")
        return replace(
            found,
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
    if kind == "yarn":
        return _yarn(rope, found, original)
    return _longrope(rope, found, original, max_positions)


def _known(rope: Fields) -> Fields:
    """Return the parameters without those that change nothing.

    Raises `UnsupportedModelError` for unknown ones."""
    left = {}
    for name, value in rope.values.items():
        if value == _PLAIN.get(name) or (asks_nothing(value) and name not in _ZERO_COUNTS):
            if value is not None:
                logger.debug("%s: %s%s = %s changes nothing", rope.source, rope.path, name, value)
        elif name not in _KNOWN_KEYS:
            rope.unsupported(name, "an unknown rotary parameter")
        else:
            left[name] = value
    return Fields(left, rope.source, rope.path)


def positions_served(config: Fields, max_positions: int) -> int:
    """Return the longest context of a model, in tokens: the config's `max_positions` or more.

    A yarn rope may reach further, by the product of its factor and original length. Configs that
    were extended by hand have one. A dynamic rope reaches `max_positions` times its factor."""
    for name in ("rope_scaling", "rope_parameters"):
        if not config.has(name):
            continue
        original = "original_max_position_embeddings"
        rope = config.nested(name).without_nothing(original)
        kinds = rope.values.get("rope_type"), rope.values.get("type")
        if "dynamic" in kinds:
            return min(int(max_positions * rope.number("factor", least=1.0)), MOST_INTEGER)
        if "yarn" in kinds and rope.has(original):
            reach = rope.integer(original, least=2) * rope.number("factor", 1.0)
            return max(max_positions, min(int(reach), MOST_INTEGER))
    return max_positions


def _dynamic(config: Fields, rope: Fields, found: RopeConfig) -> RopeConfig:
    if found.rotary_dim < 4:
        rope.unsupported("rope_type", "a dynamic rope needs heads that rotate 4 dimensions or more")
    return replace(
        found,
        factor=rope.number("factor", least=1.0),
        original_max_positions=config.integer("max_position_embeddings", least=2),
    )


def _yarn(rope: Fields, found: RopeConfig, original: int) -> RopeConfig:
    factor = rope.number("factor")
    scale = _yarn_scale(factor, 1.0)
    mscale = rope.number("mscale", 0.0, least=0.0)
    all_dims = rope.number("mscale_all_dim", 0.0, least=0.0)
    if mscale and all_dims:  # 0 counts as absent
        scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dims)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        rope.invalid("beta_fast", f"at least beta_slow {slow:g}")
    if found.theta <= 1:
        rope.invalid("rope_theta", "above 1")
    return replace(
        found,
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", rope.number("attn_factor", 1.0) * scale),
        score_factor=_yarn_scale(factor, all_dims) ** 2,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
        query_beta=rope.number("llama_4_scaling_beta", 0.0, least=0.0),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Fields, found: RopeConfig, original: int, max_positions: int) -> RopeConfig:
    for name in ("short_mscale", "long_mscale"):
        if rope.has(name):
            rope.unsupported(name, "only attention_factor scales longrope")
    count = found.rotary_dim // 2
    short, long = rope.numbers("short_factor", count), rope.numbers("long_factor", count)
    factor = rope.number("factor", max_positions / original)
    return replace(
        found,
        factor=factor,
        original_max_positions=original,
        short_factor=short,
        long_factor=long,
        attention_factor=rope.number("attention_factor", longrope_scale(factor, original)),
    )


def longrope_scale(factor: float, original: int) -> float:
    """Default factor on cos and sin for a context `factor` times as long as the `original` one."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _select(config: Fields, layer_type: str | None, scaled: bool) -> Fields:
    name = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    if not config.has(name):
        return Fields({}, config.source)
    rope = config.nested(name)
    per_layer_type = [key for key, value in rope.values.items() if isinstance(value, dict)]
    if per_layer_type and layer_type is None:
        config.unsupported(name, "this architecture has one rope for all layers")
    if layer_type in per_layer_type:
        return rope.nested(layer_type)
    if name == "rope_scaling" and not scaled:
        return Fields({}, config.source)
    if layer_type is not None and name == "rope_parameters":
        if per_layer_type or not any(value is not None for value in rope.values.values()):
            return Fields({}, config.source)
        config.unsupported(name, f"expected one object per layer type, such as {layer_type}")
    return rope


def _rotary_dim(
    config: Fields, rope: Fields, head_dim: int, partial: float | None, field: str
) -> int:
    holder = config
    if rope.has("partial_rotary_factor"):
        holder, field = rope, "partial_rotary_factor"
    fraction = holder.number(field, 1.0 if partial is None else partial)
    if fraction != 1.0 and partial is None:
        holder.unsupported(field, "this architecture rotates whole heads")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim > head_dim or rotary_dim < 2 or rotary_dim % 2:
        holder.invalid(
            field,
            f"such that an even number of each head's {head_dim} dimensions is rotated",
        )
    return rotary_dim


def _original_max_positions(config: Fields, rope: Fields, default: int) -> int:
    name = "original_max_position_embeddings"
    return config.integer(name, rope.integer(name, default, least=2), least=2)
