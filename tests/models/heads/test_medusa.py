"""Medusa heads: draft tokens compared with the formula, in each spelling of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from aioserve.errors import ModelError, WeightsError
from aioserve.models.decoder import Decoder
from aioserve.models.heads.loader import load_head
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.models.heads.tensors import HeadTensors
from tests.models.heads.directories import HIDDEN, Tensors, write_head
from tests.parity.tiny_models import VOCAB_SIZE

HEADS, DEPTH = 3, 2


@pytest.fixture
def target(targets) -> Decoder:
    return targets["reference"]


SPELLINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "speculators": (
        {
            "speculators_model_type": "medusa",
            "architectures": ["MedusaModel"],
            "num_heads": HEADS,
            "num_hidden_layers": DEPTH,
            "medusa_hidden_size": HIDDEN,
            "medusa_vocab_size": VOCAB_SIZE,
            "truncated_vocab_size": 0,
        },
        "blocks.{}.layers.{}",
        "lm_heads.{}",
    ),
    "the authors": (
        {"medusa_num_heads": HEADS, "medusa_num_layers": DEPTH},
        "{}.{}.linear",
        f"{{}}.{DEPTH}",
    ),
    "the authors, with a root": (
        {"medusa_num_heads": HEADS, "medusa_num_layers": DEPTH},
        "medusa_head.{}.{}.linear",
        f"medusa_head.{{}}.{DEPTH}",
    ),
}


def tensors_of(spelling: str, *, bias: bool, outputs: bool) -> Tensors:
    _, block, output = SPELLINGS[spelling]
    generator = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    for i in range(HEADS):
        for j in range(DEPTH):
            weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
            tensors[block.format(i, j) + ".weight"] = weight
            if bias:
                tensors[block.format(i, j) + ".bias"] = torch.randn(HIDDEN, generator=generator)
        if outputs:
            weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
            tensors[output.format(i) + ".weight"] = weight
    return tensors


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_head_drafts_by_the_formula(spelling, bias, outputs, target, tmp_path):
    config, block, output = SPELLINGS[spelling]
    tensors = tensors_of(spelling, bias=bias, outputs=outputs)
    heads = load_head(write_head(tmp_path, config, tensors), target)
    hidden = torch.randn(4, HIDDEN)

    assert isinstance(heads, MedusaHeads)
    found = heads.logits(hidden)

    shared = target.head.rows(torch.arange(VOCAB_SIZE))
    for i in range(HEADS):
        x = hidden.double()
        for j in range(DEPTH):
            at = block.format(i, j)
            own = tensors[f"{at}.bias"].double() if bias else None
            x = x + silu(linear(x, tensors[f"{at}.weight"].double(), own))
        last = tensors[output.format(i) + ".weight"] if outputs else shared
        expected = linear(x, last.double())
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-4, atol=1e-4)


def test_what_the_target_has_is_not_read_again(target, tmp_path):
    config, *_ = SPELLINGS["speculators"]
    tensors = tensors_of("speculators", bias=False, outputs=False)
    repeated = tensors | {"lm_head.weight": torch.zeros(VOCAB_SIZE, HIDDEN)}
    hidden = torch.randn(1, HIDDEN)

    found = [
        load_head(write_head(tmp_path / name, config, each), target)
        for name, each in (("a", tensors), ("b", repeated))
    ]

    one, other = found
    assert isinstance(one, MedusaHeads)
    assert isinstance(other, MedusaHeads)
    assert torch.equal(one.logits(hidden), other.logits(hidden))


def _refused(directory: Path, target: Decoder, tensors: Tensors, **changed: Any) -> str:
    config = SPELLINGS["speculators"][0] | changed
    with pytest.raises((ModelError, WeightsError)) as caught:
        load_head(write_head(directory, config, tensors), target)
    return str(caught.value)


def test_files_that_do_not_fit_are_refused(target, tmp_path):
    tensors = tensors_of("speculators", bias=False, outputs=False)
    assert "num_heads must be an integer in [1, 64], got 0" in _refused(
        tmp_path, target, tensors, num_heads=0
    )
    assert "lack blocks.3.layers.0.weight" in _refused(tmp_path, target, tensors, num_heads=4)
    assert "has no place for blocks.2" in _refused(tmp_path, target, tensors, num_heads=2)
    assert "hidden size must be that of the target, 48, got 40" in _refused(
        tmp_path, target, tensors, medusa_hidden_size=40
    )
    assert "truncated_vocab_size = 100 is not supported" in _refused(
        tmp_path, target, tensors, truncated_vocab_size=100
    )


def test_hidden_states_that_do_not_fit_are_named(target, tmp_path):
    tensors = tensors_of("speculators", bias=False, outputs=False)
    heads = load_head(write_head(tmp_path, SPELLINGS["speculators"][0], tensors), target)
    assert isinstance(heads, MedusaHeads)
    with pytest.raises(ValueError, match=r"hidden must be torch.float32 of shape \[S, 48\]"):
        heads.logits(torch.randn(1, 40))


def test_tensors_come_from_the_files_that_an_index_places_them_in(tmp_path: Path) -> None:
    for place, name in enumerate(("a", "b")):
        tensors = {"stale": torch.full((2,), place), name: torch.zeros(2)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    weight_map = {"a": "a.safetensors", "b": "b.safetensors", "stale": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with HeadTensors(tmp_path) as found:
        assert found.shapes.keys() == {"a", "b", "stale"}
    index.write_text(json.dumps({"weight_map": weight_map | {"c": "c.safetensors"}}), "utf-8")
    with pytest.raises(WeightsError, match=r"c\.safetensors: no such file, .* places 1 tens"):
        HeadTensors(tmp_path)
