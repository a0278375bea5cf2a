"""Rotary tables: growth, limits, and the frequencies of each kind against transformers."""

from __future__ import annotations

import pytest
import torch

from aioserve.errors import ModelError
from aioserve.models.config import DecoderConfig
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable, inverse_frequencies
from tests.parity.tiny_models import CONFIGS


def test_a_table_grows_to_what_is_asked_and_keeps_its_rows():
    table = RotaryTable(RopeConfig(kind="default", theta=10_000.0, rotary_dim=8), 100_000)
    before = table.rotation.cos.clone()

    table.cover(before.shape[0])
    assert table.rotation.cos.shape == before.shape

    table.cover(before.shape[0] + 1)
    assert table.rotation.cos.shape[0] == table.rotation.sin.shape[0] == 2 * before.shape[0]
    assert torch.equal(table.rotation.cos[: before.shape[0]], before)

    table.cover(100_000)
    assert table.rotation.cos.shape == (100_000, 4)
    with pytest.raises(ValueError, match="at most 100000, got 100001"):
        table.cover(100_001)


def test_a_table_is_no_longer_than_the_model():
    table = RotaryTable(RopeConfig(kind="default", theta=10_000.0, rotary_dim=8), 10)

    assert table.rotation.cos.shape == (10, 4)


@pytest.mark.parametrize("changes", [{"factor": 8.0}, {"attention_factor": 1.7}])
def test_a_longrope_attention_factor_comes_from_the_config_or_the_ratio(changes):
    scaling = {**CONFIGS["phi3-longrope"]["rope_scaling"], **changes}
    config = DecoderConfig.from_dict({**CONFIGS["phi3-longrope"], "rope_scaling": scaling})

    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = Phi3Config(**{**CONFIGS["phi3-longrope"], "rope_scaling": scaling})
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=1000)

    rope = config.layers[0].mixer.rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rope, 1000), frequencies)


@pytest.mark.parametrize("longest", [48, 256, 300, 1024])
def test_dynamic_frequencies_are_those_of_the_longest_context(longest):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "dynamic", "factor": 4.0}
    fields = {**CONFIGS["llama"], "rope_scaling": scaling}
    theirs = LlamaConfig(**{**fields, "rope_scaling": dict(scaling)})
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=longest)

    config = DecoderConfig.from_dict(fields)
    rope = config.layers[0].mixer.rope
    assert rope is not None
    assert (config.max_position_embeddings, factor) == (4 * 256, rope.attention_factor)
    torch.testing.assert_close(inverse_frequencies(rope, longest), expected, rtol=1e-6, atol=0)


def test_llama3_frequencies_cross_all_three_bands():
    """Some pairs are unchanged, some blended, and some slowed by Llama 3.1's settings."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    fields = {
        **CONFIGS["llama"], "head_dim": 128, "rope_theta": 500_000.0, "rope_scaling": scaling,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
    theirs = LlamaConfig(**{**fields, "rope_scaling": dict(scaling)})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs)

    rope = DecoderConfig.from_dict(fields).layers[0].mixer.rope
    assert rope is not None
    ours = inverse_frequencies(rope, 131_072)

    unscaled = 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    ratio = ours / unscaled
    assert (ratio > 0.999).any()
    assert (ratio < 0.126).any()
    assert ((ratio > 0.13) & (ratio < 0.99)).any()
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 0.5},
        {"attention_factor": 1.7},
        {"beta_fast": 20.0, "beta_slow": 2.0},
        {"beta_fast": 3.0, "beta_slow": 3.0},
        {"truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        {"mscale": 0, "mscale_all_dim": 1.2},
        {"original_max_position_embeddings": 40},
    ],
)
def test_yarn_is_that_of_transformers(changes):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    fields = {
        **CONFIGS["llama"], "head_dim": 128, "rope_theta": 500_000.0,
        "rope_scaling": scaling | changes, "max_position_embeddings": 131_072,
    }  # fmt: skip
    theirs = LlamaConfig(**{**fields, "rope_scaling": scaling | changes})
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)

    rope = DecoderConfig.from_dict(fields).layers[0].mixer.rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rope, 131_072), expected)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"factor": 2.0, "original_max_position_embeddings": 8_192}, 40_960),
        ({"factor": 4.0}, 40_960),
        ({"factor": 1e15, "original_max_position_embeddings": 2**31 - 1}, 2**31 - 1),
    ],
)
def test_a_yarn_rope_reaches_as_far_as_it_was_extended(scaling, length):
    fields = CONFIGS["llama"] | {"max_position_embeddings": 40_960}
    config = DecoderConfig.from_dict(fields | {"rope_scaling": {"type": "yarn", **scaling}})
    assert config.max_position_embeddings == length
    wrong = {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}}
    with pytest.raises(ModelError, match="beta_fast must be at least beta_slow 2"):
        DecoderConfig.from_dict(fields | wrong)
