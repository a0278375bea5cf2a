"""Rotary position embeddings as configs describe them: kinds, bases, scalings. No tensors.

Reads what transformers 4 wrote (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and what
transformers 5 writes (`rope_parameters`, flat or per layer type).
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
"""Parameters, and the value with which they change nothing, as zero and false do."""
_ZERO_COUNTS = frozenset(
    {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
        "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
        "beta_slow", "truncate",
    }
)  # fmt: skip
"""Parameters of which zero or false says something, or makes no sense."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which the angles of one kind of layer follow from positions.

    With d the rotated dimensions, frequency i is `theta ** (-2i / d)`, then scaled by `kind`.
    """

    kind: str
    """default, linear (Gemma 3), dynamic (NTK-aware, with a base that follows the longest context),
    llama3 (Llama 3.1), longrope (Phi-3, arXiv 2402.13753) or yarn (arXiv 2309.00071)."""
    theta: float
    rotary_dim: int
    """The first `rotary_dim` dimensions of each head are rotated; even, at most the head's."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """Longest context of the pretraining (dynamic, llama3, longrope, yarn)."""
    short_factor: tuple[float, ...] = ()
    """longrope, serving at most `original_max_positions`: one divisor per frequency."""
    long_factor: tuple[float, ...] = ()
    """longrope, serving more."""
    attention_factor: float = 1.0
    """cos and sin are multiplied by this (longrope, yarn). A config's `attn_factor`, which vLLM and
    llama.cpp read, is a factor on that of yarn."""
    score_factor: float = 1.0
    """yarn: what the makers of latent attention multiply scores by, beside the above."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often in the original context are left as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often are slowed down by all of `factor`."""
    truncate: bool = True
    """yarn: the pairs between which it blends are rounded to whole ones."""
    interleaved: bool = False
    """Dimensions 2 i and 2 i + 1 are a pair; else i and i + rotary_dim / 2."""
    query_beta: float = 0.0
    """With b > 0 queries at position p are multiplied by
    1 + b * log(1 + floor(p / original_max_positions)) (Llama 4's scaling of attention)."""

    @property
    def depends_on_longest_context(self) -> bool:
        """Whether angles follow from the longest context that is served, too."""
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
    """The rope of the layers of `layer_type`, or of all layers.

    Old configs hold the base in `theta_field`; `scaled` says whether their `rope_scaling` applies
    to these layers. `partial`: the part of each head that the family rotates where the config
    doesn't say, in `partial_field` as old configs spell it; None: it rotates whole heads.
    `scales_queries`: the family honours `llama_4_scaling_beta`.
    """
    rope = _known(_select(config, layer_type, scaled))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.has("llama_4_scaling_beta") and not (scales_queries and kind == "yarn"):
        rope.unsupported("llama_4_scaling_beta", "Ministral 3 scales queries, with a yarn rope")
    if default_original is not None and kind in ("su", "yarn"):
        kind = "longrope"  # what early Phi-3 configs called it
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
    """The parameters without those that ask for nothing. Raises `UnsupportedModelError` for others
    that aren't known."""
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
    """The longest context of a model: `max_positions`, as its config says, or the product of factor
    and original length where it has a yarn rope that reaches further, as configs that were extended
    by hand have. A dynamic rope takes `max_positions` for the original length."""
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
    if mscale and all_dims:  # 0 says nothing
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
    """What cos and sin are multiplied by in a context `factor` times the `original` one, where no
    config says otherwise."""
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
