"""Descriptions of decoders that no block can compute are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aioserve.errors import UnsupportedModelError
from aioserve.models.architecture import Attention, layer_norm, rms_norm
from aioserve.models.config import DecoderConfig
from tests.parity.tiny_models import CONFIGS

QWEN3 = DecoderConfig.from_dict(CONFIGS["qwen3"]).layers[0]
OLMO2 = DecoderConfig.from_dict(CONFIGS["olmo2"]).layers[0]
GPT2 = DecoderConfig.from_dict(CONFIGS["gpt2"]).layers[0]


@pytest.mark.parametrize(("gated", "activation"), [(True, "gelu"), (False, "silu"), (True, "")])
def test_an_mlp_with_another_activation_is_refused(gated: bool, activation: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"gated={gated} must be .*got '{activation}'"):
        replace(QWEN3.feed_forward, gated=gated, activation=activation)


def test_head_norms_that_are_not_alike_are_refused() -> None:
    attention = QWEN3.mixer
    key = rms_norm("k", attention.heads.dim, 1e-5)
    assert isinstance(replace(attention, query_norm=None, key_norm=None), Attention)
    for norms in (
        {"query_norm": None},
        {"key_norm": None},
        {"key_norm": replace(key, eps=1e-3)},
        {"key_norm": replace(key, weight_offset=1.0)},
        {"query_norm": layer_norm("q", 16, 1e-5), "key_norm": layer_norm("k", 16, 1e-5)},
    ):
        with pytest.raises(UnsupportedModelError, match="must have RMS norms alike, or none"):
            replace(attention, **norms)


def test_an_rms_norm_with_a_bias_is_refused() -> None:
    assert GPT2.feed_forward_norm is not None
    with pytest.raises(UnsupportedModelError, match=r"an RMS norm has no bias, got .*ln_2\.bias"):
        replace(GPT2.feed_forward_norm, centered=False)


def test_norms_of_all_heads_are_as_long_as_their_projections() -> None:
    attention, others = OLMO2.mixer, QWEN3.mixer
    assert isinstance(attention, Attention)
    assert attention.norms_of_all_heads
    assert isinstance(others, Attention)
    assert not others.norms_of_all_heads
    with pytest.raises(UnsupportedModelError, match="must have RMS norms alike, or none"):
        replace(attention, key_norm=rms_norm("k", attention.heads.query_size, 1e-5))
