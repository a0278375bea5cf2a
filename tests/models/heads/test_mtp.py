"""MTP heads: draft tokens compared with plain torch, and files that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioserve.errors import ModelError
from aioserve.models.heads.loader import load_head
from aioserve.models.heads.mtp import MTPHead
from tests.models.heads.directories import (
    HIDDEN,
    Tensors,
    eagle3_config,
    eagle3_tensors,
    layer_config,
    write_head,
)
from tests.models.heads.plain import PlainMTP
from tests.models.heads.runs import HeadRun, close
from tests.parity.tiny_models import VOCAB_SIZE

LAYER: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 3, "head_dim": 16}


def mtp_config(layer: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """Make a config in the form of `speculators`, with the target's config and all its layers."""
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer_config(**LAYER | (layer or {})),
    } | changed


def mtp_tensors(layer: dict[str, Any] | None = None) -> Tensors:
    """Make random weights from those of an EAGLE-3 head of the same sizes."""
    sizes = LAYER | (layer or {}) | {"num_hidden_layers": 2}
    plain = eagle3_tensors(eagle3_config(sizes), seed=5)
    tensors = {
        name.replace("layers.1.", "mtp_layers.0."): tensor
        for name, tensor in plain.items()
        if name.startswith("layers.1.")
    }
    generator = torch.Generator().manual_seed(6)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"mtp_layers.0.{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    projection = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5
    return tensors | {"mtp_layers.0.input_proj.weight": projection}


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("layer", [{}, {"attention_bias": True, "num_hidden_layers": 1}])
def test_drafts_are_those_of_the_formulas(layer, backend, targets, shared, tmp_path):
    config, tensors = mtp_config(layer), mtp_tensors(layer)
    head = load_head(write_head(tmp_path, config, tensors), targets[backend])
    assert isinstance(head, MTPHead)
    plain = PlainMTP(config, tensors, *shared)
    ids, hidden = [(31 * i + 7) % VOCAB_SIZE for i in range(9)], torch.randn(9, HIDDEN)

    run = HeadRun(head, targets[backend].backend, page_size=4)
    run.draft([(0, ids[:5])], hidden[:5])
    logits, drawn = run.chain(5, ids[5:], hidden[5:], count=3)

    expected, expected_ids = plain.draft(hidden, ids, count=3)
    close(logits, expected)
    assert drawn == expected_ids


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layer": {"model_type": "llama"}},
            "transformer_layer_config.model_type = 'llama' is not",
        ),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2 is not supported"),
        (
            {"layer": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}},
            "the layer of an MTP head has full attention",
        ),
        ({"layer": {"hidden_size": 40}}, "hidden size must be that of the target, 48, got 40"),
        ({"layer": {"vocab_size": 99}}, "number of tokens must be that of the target, 288, got 99"),
        ({"layer": {"intermediate_size": 60}}, "config.json asks for"),
        ({"layer": {"attention_bias": True}}, "the weights lack model.layers.2.self_attn.k_proj"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changed, message, targets, tmp_path):
    directory = write_head(tmp_path, mtp_config(**changed), mtp_tensors())
    with pytest.raises(ModelError, match=message):
        load_head(directory, targets["reference"])
