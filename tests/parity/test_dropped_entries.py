"""Sequences that have lost entries in the middle, against transformers with a mask.

Positions and indices differ from then on. Rotations, learned positions and factors on queries
depend on positions. Pages and attention depend on indices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.kv.groups import making
from aioserve.models.loader import load_model
from tests.doubles.dropped_entries import DroppingGroup, positions_kept
from tests.parity.exact import float64_throughout
from tests.parity.planned import PlannedRun, item
from tests.parity.tiny_models import VOCAB_SIZE

PAGE_SIZE = 4
PROMPT, CHUNK, DECODES = 30, 5, 9
DROPPED = range(4, 12)
"""Dropped positions: two whole pages, which no window of a later token reaches."""
NAMES = ("llama3", "qwen3-sliding", "gemma3", "gpt-oss", "ministral3", "deepseek3", "gpt2")
"""Models with scaled rotations, windows with rotations of their own, sinks, factors on queries by
position, latents, and learned positions."""
TOLERANCE = 1e-5
"""Largest error, as a share of the largest logit."""
ROUNDING = 1e-4


def ids_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def masked_logits(model: Any, ids: Sequence[int], seen: torch.Tensor) -> torch.Tensor:
    """Compute logits of transformers' model, [ids, vocabulary], with a mask.

    The token of row `i` attends to those that `seen[i]`, bool [ids, ids], marks."""
    window = getattr(model.config, "sliding_window", None) or len(ids)
    at = torch.arange(len(ids))
    masks = {
        "full_attention": seen,
        "sliding_attention": seen & (at[None] > at[:, None] - window),
    }
    dtype = model.dtype
    added = {
        name: torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        for name, mask in masks.items()
    }
    shaped: Any = {name: one[None, None] for name, one in added.items()}
    if getattr(model.config, "layer_types", None) is None:
        shaped = shaped["full_attention"]
    with torch.inference_mode():
        return model(torch.tensor([ids]), attention_mask=shaped, use_cache=False).logits[0]


def all_before(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.asyncio
async def test_a_sequence_that_lost_entries_goes_on_by_position_and_index(
    name, directory_of, oracle, backend
):
    """A complete sequence runs along, in chunks and token by token. Dropped pages are NaN."""
    length = PROMPT + CHUNK + DECODES
    ids, other = ids_of(1, length), ids_of(2, length)
    pages, own = [9, 2, 14, 5, 11, 3, 8, 1, 7, 6, 12], [*range(20, 31)]
    left = [page for place, page in enumerate(pages) if place * PAGE_SIZE not in DROPPED]
    dropped = len(DROPPED)

    async with PlannedRun(load_model(directory_of(name), backend=backend), PAGE_SIZE) as run:
        await run.step([item(0, 0, ids[:PROMPT], pages), item(1, 0, other[:PROMPT], own)])
        for page in set(pages) - set(left):
            run.cache.storage[page] = float("nan")
        ends = [PROMPT + CHUNK + step for step in range(DECODES + 1)]
        found = []
        for start, end in zip([PROMPT, *ends], ends, strict=False):
            items = [item(1, start, other[start:end], own)]
            items.append(item(0, start, ids[start:end], left, dropped=dropped))
            found.append(await run.step(items))

    seen = all_before(length)
    whole = seen.clone()
    seen[PROMPT:, DROPPED.start : DROPPED.stop] = False
    model = oracle(name, dtype=torch.float64)
    with float64_throughout():
        exact = [masked_logits(model, other, whole), masked_logits(model, ids, seen)]
        unmasked = masked_logits(model, ids, whole)
    rows = [end - 1 for end in ends]
    for logits, expected in zip(torch.stack(found, dim=1), exact, strict=True):
        error = (logits.double() - expected[rows]).abs().max() / expected.abs().max()
        assert error.item() < TOLERANCE
    assert (exact[1] - unmasked)[rows].abs().max() > 100 * TOLERANCE * unmasked.abs().max()


@pytest.mark.parametrize("name", ["llama3", "ministral3", "deepseek3", "gpt2"])
@pytest.mark.asyncio
async def test_any_number_of_entries_may_be_missing(name, directory_of, oracle, backend):
    """Entries of a chunk's last tokens are overwritten, in a number that divides by nothing."""
    length, chunk, dropped = 40, 23, 7
    ids, pages = ids_of(4, length), [9, 2, 14, 5, 11, 3, 8, 1, 7]
    starts = [chunk, 30, *range(36, length)]
    async with PlannedRun(load_model(directory_of(name), backend=backend), PAGE_SIZE) as run:
        await run.step([item(0, 0, ids[:chunk], pages)])
        found = [
            await run.step([item(0, start, ids[start:end], pages, dropped=dropped)])
            for start, end in zip(starts, [*starts[1:], length], strict=True)
        ]

    seen = all_before(length)
    seen[chunk:, chunk - dropped : chunk] = False
    model = oracle(name, dtype=torch.float64)
    with float64_throughout():
        exact = masked_logits(model, ids, seen)
    rows = [end - 1 for end in [*starts[1:], length]]
    error = (torch.cat(found).double() - exact[rows]).abs().max() / exact.abs().max()
    assert error.item() < TOLERANCE


LENGTHS = (3, 11, 9, 5, 7, 6, 20, 33)
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"num_pages": 128},
    "one step after the other": {"num_pages": 128, "overlap": False},
    "swapped": {"num_pages": 20, "num_host_pages": 64, "preemption": "swap"},
}


@pytest.fixture
def _entries_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(making.KINDS, "full", DroppingGroup)


def engine_of(directory: Any, backend: Any, **options: Any) -> Engine:
    return Engine(
        str(directory),
        backend=backend,
        dtype="float32",
        page_size=PAGE_SIZE,
        prefix_caching=False,
        output_reserve_tokens=0,
        **options,
    )


def seen_by(length: int, ends: Sequence[int]) -> torch.Tensor:
    """Mask of the tokens that each token attends to, bool [length, length].

    Steps compute up to each of `ends`, and then one token each."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    held: list[int] = []
    start = 0
    for end in [*ends, *range(ends[-1] + 1, length + 1)]:
        held = positions_kept(held, PAGE_SIZE)
        for position in range(start, end):
            held.append(position)
            seen[position, held] = True
        start = end
    return seen


def assert_logprobs(model: Any, prompt: list[int], answer: Any, ends: list[int]) -> None:
    """Check that each token of a completion has the log-probability of the model with a mask."""
    ids = prompt + list(answer.token_ids)
    logits = masked_logits(model, ids, seen_by(len(ids), ends))
    expected = torch.log_softmax(logits, dim=1)
    assert answer.logprobs is not None
    for position, one in enumerate(answer.logprobs, len(prompt)):
        assert abs(one.logprob - expected[position - 1, ids[position]].item()) < ROUNDING


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["llama3", "gpt2"])
@pytest.mark.usefixtures("_entries_are_dropped")
@pytest.mark.asyncio
async def test_answers_of_an_engine_that_drops_entries_are_those_of_a_mask(
    name, settings, directory_of, oracle, backend
):
    prompts = [ids_of(seed, length) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=0)
    async with engine_of(directory_of(name), backend.name, **SETTINGS[settings]) as engine:
        answers = await asyncio.gather(*(engine.generate(ids, params) for ids in prompts))
        stats = engine.stats()

    for prompt, answer in zip(prompts, answers, strict=True):
        assert_logprobs(oracle(name), prompt, answer, [len(prompt)])
    assert (stats.preemptions_total > 0) == (settings == "swapped")


@pytest.mark.usefixtures("_entries_are_dropped")
@pytest.mark.asyncio
async def test_samples_fork_off_a_prompt_that_lost_entries(directory_of, oracle, backend):
    """Their shared page is copied before it is written."""
    prompt, chunk = ids_of(8, 43), 13
    params = SamplingParams(
        temperature=0.8, seed=5, n=3, max_tokens=30, ignore_eos=True, logprobs=0
    )
    options = {"num_pages": 128, "max_num_batched_tokens": chunk}
    async with engine_of(directory_of("llama3"), backend.name, **options) as engine:
        answer = await engine.generate(prompt, params)

    ends = [*range(chunk, len(prompt), chunk), len(prompt)]
    texts = [list(sample.token_ids) for sample in answer.samples]
    assert len({tuple(one) for one in texts}) == 3
    for sample in answer.samples:
        assert_logprobs(oracle("llama3"), prompt, sample, ends)
