"""Every two features together: each request has the result that it has alone, and no page is
left."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path

import pytest
import torch

from aioserve.models.files import model_files
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.heads.directories import eagle3_config, eagle3_tensors, write_head
from tests.models.quantization.blockwise import load_in, storing_four_bits
from tests.models.quantization.compressed import write_mixture
from tests.models.quantization.test_gptq_awq import write_gptq
from tests.models.quantization.writers import CONFIG, write_quantized
from tests.pairs.features import FEATURES, Feature, pairs, why_not_of_model, why_not_of_size
from tests.pairs.prefix_list import PrefixList
from tests.pairs.scene import Alone, Seen, features_of, head_of, place_of, played, scene_of
from tests.parity import tiny_models

OF_INTEGERS = ("quantised", "act-order", "gguf")
"""Models with layers of integers: beside floats and beside other integers, with columns in the
order of activations. They cover each number of bits, minimums, and a table."""
FLOATS = (
    *("llama", "qwen3", "gemma3", "olmo3", "cohere2", "qwen2-moe", "gpt-oss"),
    "deepseek3-moe",
)
MODELS = (*FLOATS, "nf4", *OF_INTEGERS)
BITS = {"q": "Q5_0", "k": "Q5_1", "v": "Q4_1", "output": "IQ4_NL"}
"""Formats of GGUF in attention; other layers have 8 bits."""
PAGE_SIZES = (1, 2, 16)
FULL_SEEDS = 3
DRAWN_CASES = 2
QUICK_CASES = 1
"""The other draw of each pair is slow."""
FIRST_CASES = 100
"""Pairs, of some 470, that `make test` tries."""
MOST_SCENES = 24
"""Most scenes played until both features took place."""


def cases() -> list[object]:
    """Model, page size and seed of each pair: some draws of them, or with AIOSERVE_PAIRS all."""
    found = []
    for pair in pairs():
        name = "+".join(dict.fromkeys(pair))
        sizes = [size for size in PAGE_SIZES if why_not_of_size(*pair, size) is None]
        models = [
            model
            for model in MODELS
            if why_not_of_model(*pair, has_integers=model in OF_INTEGERS) is None
        ]
        drawn = list(product(models, sizes, range(FULL_SEEDS)))
        quick = len(drawn)
        if not os.environ.get("AIOSERVE_PAIRS"):
            drawn, quick = random.Random(name).sample(drawn, DRAWN_CASES), QUICK_CASES
        for i, (model, page_size, seed) in enumerate(drawn):
            label = f"{name}-{model}-{page_size}-{seed}"
            marks = () if i < quick else pytest.mark.slow
            found.append(pytest.param(pair, model, page_size, seed, id=label, marks=marks))
    return found


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread for tiny matrices, since more would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def alone_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Alone]]:
    """Directory of a model, and the results of requests that it answers alone."""
    root = tmp_path_factory.mktemp("pairs")

    @cache
    def made(name: str) -> tuple[str, Alone]:
        if name == "quantised":
            directory, _ = write_mixture(root / name)
        elif name == "act-order":
            directory, _ = write_gptq(root / name, 4, 16, act_order=True)
        elif name == "nf4":
            directory, _ = write_quantized(root / name, load_in(4), storing_four_bits("nf4", 64))
        elif name == "gguf":
            directory = write_gguf_of_bytes(root / name)
        else:
            directory = tiny_models.write(name, root / name)
        write_eagle3_head(str(directory))
        return str(directory), Alone(str(directory))

    return made


def write_eagle3_head(model: str) -> None:
    """Write a head of random weights for a model. It is hardly ever right."""
    target = model_files(Path(model)).config()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    layers = [0, 1, target.num_layers]
    config = eagle3_config(sizes, eagle_aux_hidden_state_layer_ids=layers)
    write_head(Path(head_of(model)), config, eagle3_tensors(config))


def write_gguf_of_bytes(directory: Path) -> Path:
    """Write a model whose first tokens are the bytes. GGUF has no vocabulary without a merge."""
    write_random_model(directory, CONFIG, dtype="float32")
    said = json.loads((directory / "tokenizer.json").read_text())
    vocab = said["model"]["vocab"]
    del vocab[max(vocab, key=vocab.__getitem__)]
    said["model"]["merges"] = [["z", "z"]]
    vocab["zz"] = len(vocab)
    (directory / "tokenizer.json").write_text(json.dumps(said))
    formats = {f"attn_{part}": one for part, one in BITS.items()}
    return convert(directory, directory / "tiny.gguf", weights="Q8_0", formats=formats)


def assert_as_alone(seen: Seen) -> None:
    for wave in seen.results:
        for ask, brought in wave:
            whole = seen.alone[ask]
            if brought.left:
                assert brought.begins(whole), ask.name
            elif ask.way in ("last", "mean"):
                assert brought.vector == pytest.approx(whole.vector, rel=1e-5, abs=1e-6), ask.name
            else:
                assert brought == whole, ask.name


def assert_hits(seen: Seen) -> None:
    """Check that the second wave finds what the list says, or less if pages are short or are
    forgotten."""
    if not seen.scene.caches:
        return
    first, second = seen.results
    known = PrefixList(
        seen.scene.options["page_size"],
        partial=seen.scene.options.get("partial_page_reuse", True),
    )
    for ask, brought in first:
        known.add(ask, brought)
    told = [(ask, it.cached_tokens) for ask, it in second if not it.left]
    found = {ask.name: count for ask, count in told if count is not None}
    expected = {ask.name: known.hit_tokens(ask) for ask, _ in told if ask.name in found}
    if seen.scene.tight or seen.scene.resets:
        assert all(found[name] <= most for name, most in expected.items()), (found, expected)
    else:
        assert found == expected
        assert sum(expected.values()) > 0


def didnt_happen(seen: Seen) -> list[str]:
    """Names of what should have taken place and did not: each feature, and for its requests the
    other feature if that changes requests."""
    missing = []
    names = seen.scene.features
    for name in names:
        feature = FEATURES[name]
        met = None if feature.met is None else feature.met(seen)
        if not feature.happened(seen) or met == set():
            missing.append(name)
        elif met is not None:
            missing += [
                f"{name} for a request with {other}"
                for other in names
                if FEATURES[other].changes_requests and other not in feature.never_met_by
                if other != "beams"  # of many, unnamed
                if not any(
                    other in features_of(request)
                    for request in _met_for(seen, feature, FEATURES[other])
                )
            ]
    return missing


def _met_for(seen: Seen, feature: Feature, other: Feature) -> set[str]:
    if any(other.prompt_counts) and feature.met_early is not None:
        met = feature.met_early(seen)
        return {name for name in met if other.prompt_counts[place_of(name)]}
    return set() if feature.met is None else feature.met(seen)


def test_every_bundled_policy_and_drafter_is_among_the_features():
    bundled = {
        point.name
        for point in entry_points(group="aioserve")
        if point.value.startswith("aioserve_plugins.")
    }
    named = {name for name, one in FEATURES.items() if one.group in ("policy", "drafter")}
    # Of the drafters, `model` is left out, since none of these models has one and it drafts as any
    # other. One of the heads stands for all.
    assert named - {"speculation", "eagle3"} == bundled - {"model", "heads"}


@pytest.mark.sampled(FIRST_CASES)
@pytest.mark.parametrize(("pair", "model", "page_size", "seed"), cases())
@pytest.mark.asyncio
async def test_two_features_together_change_no_token(pair, model, page_size, seed, alone_on):
    path, alone = alone_on(model)
    missing = list(pair)
    for number in range(MOST_SCENES):
        seen = await played(path, scene_of(pair, page_size, seed, number), alone)
        assert_as_alone(seen)
        assert_hits(seen)
        assert seen.leaked_pages == 0
        assert seen.free[0] == seen.free[1]
        assert seen.stats.policy_faults_total == 0
        missing = didnt_happen(seen)
        if not missing:
            return
    pytest.fail(f"in none of {MOST_SCENES} scenes there was all of it: {missing} is missing")
