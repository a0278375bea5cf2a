"""Logits are those of whole prompts, however sequences are cut into chunks, mixed and paged."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import VOCAB_SIZE
from tests.tiers import examples

LENGTHS = {"a": 41, "b": 23, "c": 3}
MODELS = ("gemma3", "qwen3", "gpt2", "olmo3", "cohere2", "ministral3", "gpt-oss")


def token_ids(name: str) -> list[int]:
    return [(ord(name) * 31 + 17 * i * i + i) % VOCAB_SIZE for i in range(LENGTHS[name])]


@st.composite
def schedules(draw: st.DrawFn) -> list[dict[str, int]]:
    """Draw steps that each compute further tokens of some sequences, until all are done."""
    left = dict(LENGTHS)
    steps = []
    while left:
        names = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {}
        for name in names:
            step[name] = draw(st.integers(1, left[name]))
            left[name] -= step[name]
        left = {name: count for name, count in left.items() if count}
        steps.append(step)
    return steps


@pytest.fixture(scope="module")
def whole(directory_of, backend):
    """Return, by model, the decoder and the logits of each sequence alone, in one step."""

    @cache
    def compute(model: str) -> tuple[Decoder, dict[str, torch.Tensor]]:
        decoder = load_model(directory_of(model), backend=backend)
        alone = {n: PagedRun(decoder).step({n: token_ids(n)})[n] for n in LENGTHS}
        return decoder, alone

    return compute


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("model", MODELS)
def test_any_schedule_gives_the_logits_of_whole_prompts(model, whole, data):
    decoder, expected = whole(model)
    run = PagedRun(
        decoder, num_pages=128, page_size=data.draw(st.sampled_from((1, 2, 16, 64)), "page size")
    )
    done = dict.fromkeys(LENGTHS, 0)

    for step in data.draw(schedules(), "schedule"):
        chunks = {n: token_ids(n)[done[n] : done[n] + count] for n, count in step.items()}
        for name, logits in run.step(chunks).items():
            part = expected[name][done[name] : done[name] + len(chunks[name])]
            assert (logits - part).abs().max().item() < 1e-4
            done[name] += len(chunks[name])
