"""The files of a new model family's project that say what it is; see `_plugin_project`."""

from __future__ import annotations

__all__ = ["FAMILY", "README", "TESTS"]

FAMILY = '''\
"""A family of models: Llama's decoder with norms of query and key heads."""

from __future__ import annotations

from aioserve import ModelFamily, ModelFamilySpec, hookimpl
from aioserve.architectures import (
    Architecture,
    Fields,
    activation,
    llama_like,
    read_rope,
    read_shape,
)

EXAMPLE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}


def describe(config: Fields) -> Architecture:
    """The decoder of one config.json."""
    if config.flag("use_sliding_window", False):
        config.unsupported("use_sliding_window", "each layer sees all positions")
    shape = read_shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        head_norms="each",
    )


FAMILY = ModelFamily(model_type="$module", describe=describe, example=EXAMPLE)


@hookimpl
def aioserve_model_families() -> list[ModelFamilySpec]:
    return [ModelFamilySpec("${stem}ForCausalLM", FAMILY, "norms of heads", api=1)]
'''

TESTS = '''\
"""The family keeps its contract, and describes what its config.json says."""

from __future__ import annotations

import pytest
from aioserve import UnsupportedModelError
from aioserve.architectures import Attention, Fields
from aioserve.testing import check_model_family
from $module import EXAMPLE, FAMILY, describe


def test_it_keeps_the_contract() -> None:
    check_model_family(FAMILY)


def test_each_head_has_a_norm() -> None:
    described = describe(Fields(EXAMPLE, "config.json"))
    assert described.num_layers == 2
    for layer in described.layers:
        assert isinstance(layer.mixer, Attention)
        assert layer.mixer.query_norm is not None
        assert layer.mixer.query_norm.weight.shape == (16,)


def test_a_setting_that_it_does_not_describe_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        describe(Fields({**EXAMPLE, "use_sliding_window": True}, "config.json"))
'''

README = """\
# $distribution

A family of models for aioserve: Llama's decoder with norms of
query and key heads.

    pip install --editable '.[test]'
    aioserve plugins                    # it is listed
    aioserve plugins check $module
    pytest

A model directory is of this family if its config.json says

    "architectures": ["${stem}ForCausalLM"], "model_type": "$module"

and is served as any other: aioserve serve path/to/model
"""
