"""EAGLE-3 heads: draft tokens compared with plain torch, and files that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.errors import ModelError, ModelNotFoundError, UnsupportedModelError, WeightsError
from aioserve.models import rotary
from aioserve.models.decoder import Decoder
from aioserve.models.heads.eagle3 import Eagle3Head
from aioserve.models.heads.loader import load_head
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from tests.models.heads.directories import (
    HIDDEN,
    LAYERS,
    Tensors,
    eagle3_config,
    eagle3_tensors,
    layer_config,
    write_head,
)
from tests.models.heads.plain import PlainEagle3
from tests.models.heads.runs import HeadRun, close
from tests.parity.tiny_models import VOCAB_SIZE, write
from tests.tiers import examples


def loaded(
    directory: Path, target: Decoder, config: Mapping[str, Any], tensors: Tensors
) -> Eagle3Head:
    head = load_head(write_head(directory, config, tensors), target)
    assert isinstance(head, Eagle3Head)
    return head


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # changes of the config, and options of the weights
    "the target's tables": ({}, {}),
    "its own tables": ({}, {"embedding": True, "output": True, "fusion_bias": True}),
    "some of the tokens": ({"draft_vocab_size": 90}, {}),
    "norms its residual": ({"norm_before_residual": True}, {"embedding": True}),
    "norms features together": ({"norm_before_fc": True, "norm_output": True}, {}),
    "norms features each": ({"fc_norm": True, "norm_before_residual": True}, {}),
    "another size": (
        {"target_hidden_size": HIDDEN, "layer": {"hidden_size": 40}},
        {"embedding": True, "output": True},
    ),
    "two layers": ({"layer": {"num_hidden_layers": 2, "attention_bias": True}}, {}),
    "qwen3, five features": (
        {
            "layer": {"model_type": "qwen3", "head_dim": 16, "num_attention_heads": 4},
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 2, 3],
        },
        {},
    ),
}


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_those_of_the_formulas(name, backend, targets, shared, tmp_path):
    changed, has = CONFIGS[name]
    config = eagle3_config(**changed)
    tensors = eagle3_tensors(config, **has)
    head = loaded(tmp_path, targets[backend], config, tensors)
    plain = PlainEagle3(config, tensors, *shared)
    ids = [(31 * i + 7) % VOCAB_SIZE for i in range(13)]
    features = torch.randn(13, head.config.num_features * HIDDEN)

    run = HeadRun(head, targets[backend].backend, page_size=4)
    run.draft([(0, ids[:5])], features[:5])
    logits, drawn = run.chain(5, ids[5:], features[5:], count=4)

    expected, expected_ids = plain.draft(features, ids, count=4)
    close(logits, expected)
    assert drawn == expected_ids


@pytest.fixture(scope="module")
def heads(targets, shared, tmp_path_factory) -> tuple[Eagle3Head, PlainEagle3]:
    config = eagle3_config({"num_hidden_layers": 2}, draft_vocab_size=100)
    tensors = eagle3_tensors(config)
    directory = tmp_path_factory.mktemp("head")
    head = loaded(directory, targets["reference"], config, tensors)
    return head, PlainEagle3(config, tensors, *shared)


@given(
    page_size=st.sampled_from([1, 2, 16]),
    steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(20))
def test_rows_behind_what_was_kept_are_written_anew(heads, targets, page_size, steps, seed):
    """Each step is (tokens kept since the last step, number of draft tokens)."""
    head, plain = heads
    run = HeadRun(head, targets["reference"].backend, page_size)
    generator = torch.Generator().manual_seed(seed)
    total = sum(kept for kept, _ in steps)
    ids = torch.randint(VOCAB_SIZE, (total,), generator=generator).tolist()
    features = torch.randn(total, 3 * HIDDEN, generator=generator)
    first = 0
    for kept, count in steps:
        end = first + kept
        logits, drawn = run.chain(first, ids[first:end], features[first:end], count + 1)
        expected, expected_ids = plain.draft(features[:end], ids[:end], count + 1)
        close(logits, expected)
        assert drawn == expected_ids
        first = end


def test_sequences_of_one_batch_are_apart(heads, targets):
    head, plain = heads
    run = HeadRun(head, targets["reference"].backend, page_size=2)
    ids, features = [[5, 6, 7], [9], [200, 5]], torch.randn(6, 3 * HIDDEN)

    logits, _ = run.draft([(0, own) for own in ids], features)

    for found, own, part in zip(logits, ids, features.split([3, 1, 2]), strict=True):
        close(found[None], plain.draft(part, own, 1)[0])


def test_positions_go_on_behind_the_angles_that_were_made_first(
    targets, shared, tmp_path, monkeypatch
):
    monkeypatch.setattr(rotary, "_FIRST_POSITIONS", 2)
    config = eagle3_config()
    tensors = eagle3_tensors(config)
    head = loaded(tmp_path, targets["reference"], config, tensors)
    run = HeadRun(head, targets["reference"].backend, page_size=2)
    features = torch.randn(5, 3 * HIDDEN)

    logits, _ = run.chain(0, [1, 2, 3, 4, 5], features, count=2)

    close(logits, PlainEagle3(config, tensors, *shared).draft(features, [1, 2, 3, 4, 5], 2)[0])


def test_what_is_passed_stays_as_it_is(heads, targets):
    head, _ = heads
    run = HeadRun(head, targets["reference"].backend, page_size=2)
    for columns, fuses in ((3 * HIDDEN, True), (HIDDEN, False)):
        given = torch.randn(2, columns)
        before = given.clone()

        run.draft([(0, [1, 2])], given, fuses=fuses)

        assert torch.equal(given, before)


def test_the_flat_files_of_eagles_authors_read_alike(targets, tmp_path):
    config = eagle3_config(draft_vocab_size=70, eagle_aux_hidden_state_layer_ids=None)
    tensors = eagle3_tensors(config)
    flat = layer_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=70)
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    target = targets["reference"]
    one = loaded(tmp_path / "a", target, config, tensors)
    other = loaded(tmp_path / "b", target, flat, renamed)
    features = torch.randn(4, 3 * HIDDEN)

    found = [
        HeadRun(head, target.backend, 4).chain(0, [1, 2, 3, 4], features, 3)[0]
        for head in (one, other)
    ]

    assert torch.equal(*found)
    assert other.config.layers_read(32) == (2, 16, 29)


def test_bfloat16_heads_have_pages_and_hidden_states_of_it(tmp_path):
    directory = write("llama", tmp_path / "target")
    target = load_model(directory, dtype="bfloat16", backend=backend_named("reference"))
    config = eagle3_config()
    head = loaded(tmp_path / "head", target, config, eagle3_tensors(config))
    run = HeadRun(head, target.backend, 4)

    logits, hidden = run.draft([(0, [3])], torch.randn(1, 3 * HIDDEN).bfloat16())

    assert (hidden.dtype, run.cache.dtype, logits.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"speculators_model_type": "peagle"},
            "speculators_model_type = 'peagle' is not supported",
        ),
        (
            {"layer": {"model_type": "gemma3"}},
            "transformer_layer_config.model_type = 'gemma3' is not supported",
        ),
        ({"draft_vocab_size": 300}, r"draft_vocab_size must be an integer in \[1, 288\], got 300"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm = True is not supported"),
        ({"norm_output": 1}, "norm_output must be true or false, got 1"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, -1]},
            "eagle_aux_hidden_state_layer_ids must be a list of 1 to 64 numbers of layers",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]},
            rf"must be in \[0, {LAYERS}\] for a target of 3 layers, got \[0, 1, 4\]",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        ({"quantization_config": {}}, "quantization_config = {} is not supported"),
        ({"layer": {"num_attention_heads": 5}}, "num_key_value_heads must be a divisor"),
        ({"target_hidden_size": 56}, "hidden size must be that of the target, 48, got 56"),
        (
            {"layer": {"vocab_size": 300}, "draft_vocab_size": None},
            "number of tokens must be that of the target, 288, got 300",
        ),
        ({"layer": {"hidden_size": 56}}, "hidden size must be that of the target, 48, got 56"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changed, message, targets, tmp_path):
    config = eagle3_config()
    tensors = eagle3_tensors(config)
    with pytest.raises(ModelError, match=message):
        load_head(write_head(tmp_path, eagle3_config(**changed), tensors), targets["reference"])


def test_an_unknown_architecture_is_refused(targets, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="architectures of heads are Eagle3DraftModel"):
        load_head(write_head(tmp_path, config, {"a": torch.ones(1)}), targets["reference"])


def test_a_missing_directory_and_config_are_named(targets, tmp_path):
    with pytest.raises(ModelNotFoundError, match="nothing: no such directory"):
        load_head(tmp_path / "nothing", targets["reference"])
    with pytest.raises(ModelError, match="no config"):
        load_head(tmp_path, targets["reference"])


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _with(**added: torch.Tensor) -> Any:
    return lambda tensors: tensors.update(added)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("fc.weight"), "the weights lack model.fc.weight"),
        (_without("layers.0.hidden_norm.weight"), "lack model.layers.0.hidden_norm.weight"),
        (_without("d2t"), "the weights lack d2t, which draft_vocab_size 90 asks for"),
        (_without("lm_head.weight"), "draft_vocab_size must be 288 for a head without an output"),
        (_with(d2t=torch.zeros(89, dtype=torch.int64)), r"d2t must be integers of shape \[90\]"),
        (_with(d2t=torch.zeros(90)), r"d2t must be integers of shape \[90\], got F32"),
        (
            _with(d2t=torch.full((90,), 250)),
            r"in \[0, 287\], to each once at most, got tokens from",
        ),
        (_with(d2t=-torch.arange(90)), "to each once at most, got tokens from 0 to 0, 1 of them"),
        (_with(extra=torch.zeros(1)), "the head of config.json has no place for extra"),
        (
            lambda tensors: tensors.update({"midlayer.mlp.up_proj.weight": torch.zeros(2)}),
            "is also there as",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 96)}),
            r"fc.weight has shape \[48, 96\], config.json asks for \[48, 144\]",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 144, dtype=torch.int8)}),
            "fc.weight must hold floats",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message, targets, tmp_path):
    config = eagle3_config(draft_vocab_size=90)
    tensors = eagle3_tensors(config)
    change(tensors)
    with pytest.raises((WeightsError, ModelError), match=message):
        load_head(write_head(tmp_path, config, tensors), targets["reference"])


def test_tensors_that_do_not_fit_are_named(heads, targets):
    head, _ = heads
    run = HeadRun(head, targets["reference"].backend, page_size=16)
    with pytest.raises(ValueError, match=r"contiguous torch.float32 of shape \[1, 144\]"):
        run.draft([(0, [1])], torch.randn(1, 48))
    with pytest.raises(ValueError, match=r"contiguous torch.float32 of shape \[1, 48\]"):
        run.draft([(0, [1])], torch.randn(2, 48), fuses=False)
    with pytest.raises(ValueError, match="end_position must be at most 256, got 300"):
        run.draft([(299, [1])], torch.randn(1, 144))
