"""Models whose layers keep only a window have the tokens of models that keep everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioserve.models.loader import load_model
from aioserve.ops import Backend, backend_named
from aioserve.ops.native import NativeBackend
from aioserve.paging.layout import kv_layout
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import VOCAB_SIZE
from tests.tiers import examples

WINDOWED = (
    "mistral",
    "qwen2-sliding",
    "qwen3-sliding",
    "gemma2",
    "gemma3",
    "olmo3",
    "cohere2",
)
NATIVE = NativeBackend()


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


@st.composite
def chunks(draw: st.DrawFn) -> list[dict[str, list[int]]]:
    """Draw steps of up to three sequences, in which some prompts go on and others decode."""
    steps = []
    for number in range(draw(st.integers(1, 7))):
        names = draw(st.sets(st.sampled_from("abc"), min_size=1))
        lengths = {name: draw(st.sampled_from([1, 1, 2, 5, 17])) for name in sorted(names)}
        steps.append({name: ids(count, 7 * number + count) for name, count in lengths.items()})
    return steps


@pytest.mark.parametrize("use_program", [True, False])
@pytest.mark.parametrize("name", WINDOWED)
@settings(
    deadline=None,
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=chunks(), page_size=st.sampled_from([1, 3, 4]))
def test_pages_that_left_the_window_change_no_bit(
    steps, page_size, name, use_program, directory_of
):
    runs = []
    for grouped in (False, True):
        model = load_model(directory_of(name), backend=NATIVE, use_program=use_program)
        run = PagedRun(model, num_pages=600, page_size=page_size, grouped=grouped)
        assert (len(run.groups) > 1) == grouped
        runs.append([run.step(step) for step in steps])
    for whole, windows in zip(*runs, strict=True):
        assert whole.keys() == windows.keys()
        for sequence, logits in whole.items():
            assert not logits.isnan().any()
            assert torch.equal(windows[sequence], logits), sequence


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", WINDOWED)
def test_long_decodes_agree_with_a_whole_prompt(name, backend, directory_of):
    made: Backend = backend_named(backend)
    model = load_model(directory_of(name), backend=made)
    prompt = ids(90, 1)
    whole = PagedRun(model, grouped=False).step({"a": prompt})["a"]
    run = PagedRun(model, grouped=True, num_pages=120, page_size=4)
    logits = [run.step({"a": prompt[:21]})["a"]]
    logits += [run.step({"a": [token]})["a"] for token in prompt[21:]]
    torch.testing.assert_close(torch.cat(logits), whole, rtol=1e-4, atol=1e-5)
    layout = kv_layout(model.config.kv_layers(model.kv_format), model.max_model_len)
    window = -(-layout.window // 4) + 1
    assert run.num_held <= -(-len(prompt) // 4) + layout.num_window_groups * window
