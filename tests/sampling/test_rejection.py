"""Rejection sampling of draft tokens: its tokens have the target's distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.ops import Backend, SampleRows
from aioserve.request import SamplingParams
from aioserve.sampling.rejection import tokens_by_rejection
from aioserve.sampling.sampler import SlotTable
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE
from tests.sampling.chi_square import deviate
from tests.tiers import examples

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

FLAT = [1.0] * 8
FALLING = [8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625]
ONE = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
LOW = [0.3, 0.2, 0.4, 0.1, 0.0, 0.0, 0.0, 0.0]
HIGH = [0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
UNEVEN = [0.02, 0.4, 0.03, 0.1, 0.2, 0.05, 0.05, 0.15]

PAIRS: list[tuple[list[float], list[float], dict[str, Any]]] = [
    (FALLING, FLAT, {}),
    (FLAT, FALLING, {}),
    (UNEVEN, UNEVEN, {}),
    (UNEVEN, FALLING, {"temperature": 0.7}),
    (LOW, HIGH, {}),  # nothing is ever kept
    (UNEVEN, ONE, {}),  # a draft token that is certain to the draft
    (ONE, FALLING, {}),  # one that the target forces
    (UNEVEN, FALLING, {"top_k": 4}),
    (UNEVEN, FALLING, {"top_p": 0.8, "temperature": 1.5}),
    (FALLING, UNEVEN, {"min_p": 0.1}),
    (FALLING, UNEVEN, {"typical_p": 0.7, "temperature": 2.0}),
]


def rows_of(params: SamplingParams, count: int, seed: int, position: int) -> SampleRows:
    """A slot for each row; seeds follow each other."""
    slots = SlotTable(1)
    slots.start(0, params, seed)
    row = slots.rows([0], [position])
    return SampleRows(
        slots=np.arange(count),
        columns={name: column.repeat(count) for name, column in row.columns.items()},
        seeds=np.arange(seed, seed + count, dtype=np.uint64),
        positions=np.full(count, position, np.uint64),
    )


def verified(
    backend: Backend,
    target: list[float],
    draft: list[float],
    params: SamplingParams,
    count: int,
    seed: int = 0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], torch.Tensor, torch.Tensor]:
    """Tokens, draft tokens, and the probabilities of the target and the draft, of so many rows."""
    rows = rows_of(params, count, seed, position=17)
    logits, other = (torch.tensor(each).log().expand(count, -1) for each in (target, draft))
    draft_tokens = backend.draw(other, rows, backend.allocate_slots(count)).token_ids
    one = rows_of(params, 1, seed, position=17)
    p, q = (backend.probabilities(each[:1], one) for each in (logits, other))
    tokens = tokens_by_rejection(
        backend, p.expand(count, -1), q.expand(count, -1), draft_tokens, rows
    )
    return tokens.numpy(), draft_tokens.numpy(), p[0], q[0]


@pytest.mark.hypothesis  # more rows in `make test-more`
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "count"),
    [(NATIVE, examples(10**6)), (REFERENCE, 4000)],
    ids=["native", "reference"],
)
@pytest.mark.parametrize(("target", "draft", "limits"), PAIRS)
def test_tokens_have_the_distribution_of_the_target(
    target: list[float], draft: list[float], limits: dict[str, Any], backend: Backend, count: int
) -> None:
    """And draft tokens are kept as often as they can be: sum(min(p, q)), to five deviations."""
    params = SamplingParams(**limits)
    tokens, draft_tokens, p, q = verified(backend, target, draft, params, count)
    expected = p.double().numpy() / float(p.double().sum()) * count
    assert abs(deviate(np.bincount(tokens, minlength=8), expected)) < 4
    share = float(torch.minimum(p, q).sum())
    spread = math.sqrt(max(0.0, share * (1 - share)) / count)
    assert abs(np.mean(tokens == draft_tokens) - share) < 5 * spread + 1e-6


@pytest.mark.hypothesis
def test_what_a_draft_becomes_says_nothing_of_the_next() -> None:
    """Each token comes beside each at two positions with the same seed."""
    count, params = examples(10**6), SamplingParams()
    p = torch.tensor(FALLING) / sum(FALLING)
    q = torch.tensor(UNEVEN) / sum(UNEVEN)
    pairs = np.zeros(count, np.int64)
    for position in (5, 6):
        rows = rows_of(params, count, 0, position)
        draft_tokens = NATIVE.draw(q.log().expand(count, -1), rows, NATIVE.allocate_slots(count))
        both = p.expand(count, -1), q.expand(count, -1)
        pairs = 8 * pairs + tokens_by_rejection(NATIVE, *both, draft_tokens.token_ids, rows).numpy()
    expected = torch.outer(p, p).flatten().double().numpy() * count
    assert abs(deviate(np.bincount(pairs, minlength=64), expected)) < 4


@on_every_backend
@settings(max_examples=examples(40))
@given(
    generator=st.integers(0, 10**6),
    vocab=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_a_row_alone_has_the_same_token_up_to_the_first_that_is_not_kept(
    generator: int, vocab: int, lengths: list[int], backend: Backend
) -> None:
    """The same seeds and positions, the same tokens; behind it drafts are given."""
    random = np.random.default_rng(generator)
    count = sum(lengths)
    p, q = (torch.from_numpy(each) for each in random.dirichlet(np.full(vocab, 0.3), (2, count)))
    p, q = p.float(), q.float()
    draft_tokens = torch.from_numpy(random.integers(0, vocab, count))
    slots = np.repeat(np.arange(len(lengths)), lengths)
    rows = replace(rows_of(SamplingParams(), count, generator, 3), slots=slots)
    tokens = tokens_by_rejection(backend, p, q, draft_tokens, rows)
    kept = True
    for row in range(count):
        one = rows.repeated([int(i == row) for i in range(count)], rows.positions[row : row + 1])
        at = slice(row, row + 1)
        kept = kept or slots[row] != slots[row - 1]
        alone = tokens_by_rejection(backend, p[at], q[at], draft_tokens[at], one)
        assert tokens[at] == (alone if kept else draft_tokens[at])
        kept = kept and bool(tokens[at] == draft_tokens[at])
        if bool(alone != draft_tokens[at]):
            assert p[row, alone] > q[row, alone]


@on_every_backend
def test_a_token_that_the_target_leaves_out_never_comes(backend: Backend) -> None:
    """The target's zero stays out even if nothing else is left of the two distributions. Rounding
    leaves out other tokens than a mask."""
    p = torch.tensor([[0.0, 1.0, 0.0]]).expand(100, -1)
    for q in ([0.0, 1.0, 0.0], [1e-9, 1.0, 0.0], [0.0, 0.5, 0.5]):
        rows = rows_of(SamplingParams(), 100, 0, 1)
        both = p, torch.tensor([q]).expand(100, -1)
        for draft_token in range(3):
            tokens = tokens_by_rejection(backend, *both, torch.full((100,), draft_token), rows)
            assert tokens.tolist() == [1] * 100


def test_seeds_reach_what_is_decided() -> None:
    tokens = [
        verified(NATIVE, UNEVEN, FALLING, SamplingParams(), 1000, seed)[0] for seed in (0, 0, 5000)
    ]
    assert (tokens[0] == tokens[1]).all()
    assert (tokens[0] != tokens[2]).any()
