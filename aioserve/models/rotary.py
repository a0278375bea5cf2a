"""Tables of cosines and sines for rotary position embeddings, which grow with the contexts."""

from __future__ import annotations

import math

import torch
from msgspec.structs import replace

from aioserve.models.rope import RopeConfig
from aioserve.ops.backend import Rotation

__all__ = ["RotaryTable", "inverse_frequencies"]

_FIRST_POSITIONS = 4096


class RotaryTable:
    """Table `rotation` of the first positions, on `device`. `cover` extends it, up to a limit."""

    __slots__ = ("_config", "_device", "_frequencies", "_limit", "rotation")

    def __init__(
        self, config: RopeConfig, max_positions: int, device: torch.device | str = "cpu"
    ) -> None:
        self._frequencies = inverse_frequencies(config, max_positions)
        self._config = config
        self._limit = max_positions
        self._device = device
        self.rotation: Rotation = self._compute(min(_FIRST_POSITIONS, max_positions))

    def cover(self, num_positions: int) -> None:
        """Extend the table to at least `num_positions` rows. Raises ValueError past the limit."""
        have = self.rotation.cos.shape[0]
        if num_positions <= have:
            return
        if num_positions > self._limit:
            raise ValueError(f"num_positions must be at most {self._limit}, got {num_positions}")
        self.rotation = self._compute(min(max(num_positions, 2 * have), self._limit))

    def _compute(self, num_positions: int) -> Rotation:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * self._frequencies
        scale, scales = self._config.attention_factor, None
        if self._config.query_beta:
            blocks = (positions / self._config.original_max_positions).floor()
            scales = (1 + self._config.query_beta * torch.log1p(blocks)).to(self._device)
        cos, sin = ((table * scale).to(self._device) for table in (angles.cos(), angles.sin()))
        return Rotation(cos, sin, self._config.interleaved, scales)


def inverse_frequencies(config: RopeConfig, max_positions: int) -> torch.Tensor:
    """Angle by which each pair of dimensions turns per position: float32 `[rotary_dim / 2]`.

    The kind longrope has one set of factors for contexts up to the pretraining length and one for
    longer ones. The kind dynamic has a base for each longer length. In transformers, a context
    switches when it crosses that length, which makes the keys cached before wrong. Here, the
    longest context served decides once, so that a token's key never depends on later tokens.
    """
    if config.kind == "dynamic":
        config = _stretched(config, max_positions)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    wavelengths = config.theta**exponents
    if config.kind == "longrope":
        is_long = max_positions > config.original_max_positions
        factors = config.long_factor if is_long else config.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    frequencies = 1.0 / wavelengths
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "yarn":
        return _yarn(frequencies, config)
    return frequencies


def _stretched(config: RopeConfig, max_positions: int) -> RopeConfig:
    """Raise theta so that the slowest pair slows down as by `linear`, the fastest not at all."""
    length = max(max_positions / config.original_max_positions, 1.0)
    stretch = config.factor * length - (config.factor - 1)
    exponent = config.rotary_dim / (config.rotary_dim - 2)
    return replace(config, theta=config.theta * stretch**exponent)


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow down the pairs that turn less than about once in the original context (Llama 3.1).

    `turns` counts the full turns of a pair in the original context. Frequencies of pairs with up to
    `low_freq_factor` turns are divided by `factor`. Pairs with at least `high_freq_factor` turns
    keep theirs, and pairs in between get a linear blend.
    """
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - unchanged) * frequencies / config.factor + unchanged * frequencies


def _yarn(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow down the pairs that turn seldom in the original context, by a ramp over the pairs.

    Peng et al. 2023, "YaRN", section 3.2. Pair i turns `turns` times at
    i = d / 2 * log(original / (2 pi turns)) / log(theta).
    """

    def pair_of(turns: float) -> float:
        ratio = config.original_max_positions / (2 * math.pi * turns)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    first, last = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    width = last - first or 0.001  # a ramp of width 0 becomes a step
    slowed = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0, 1)
    return slowed * frequencies / config.factor + (1 - slowed) * frequencies
