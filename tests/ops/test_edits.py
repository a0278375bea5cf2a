"""Masks of native code against torch's own, on every instruction set."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioserve.sampling.edits import leave_out


def masks_of(vocab: int, rows: list[int], density: float, seed: int) -> npt.NDArray[np.int32]:
    """Draw a mask for each row. Bits past the vocabulary are random, too."""
    random = np.random.default_rng(seed)
    bits = random.random((len(rows), -(-vocab // 32) * 32)) < density
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@given(
    vocab=st.integers(1, 200),
    rows=st.lists(st.integers(0, 5), unique=True),
    density=st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]),
    seed=st.integers(0, 10_000),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_masks_leave_out_what_torch_does(isa, vocab, rows, density, seed):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed))
    logits[seed % 6, seed % vocab] = math.nan
    expected = logits.clone()
    masks = masks_of(vocab, rows, density, seed)
    for row, mask in zip(rows, masks, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab)
        expected[row].masked_fill_(torch.from_numpy(allowed == 0), -math.inf)
    leave_out(logits, list(zip(rows, masks, strict=True)))
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def test_so_many_masks_that_threads_share_them():
    logits = torch.zeros(40, 50_001)
    masks = masks_of(50_001, list(range(40)), 0.5, 1)
    leave_out(logits, list(enumerate(masks)))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=50_001)
    assert torch.equal(logits == 0, torch.from_numpy(bits == 1))


def test_what_does_not_fit_is_refused_before_anything_is_left_out():
    logits, none = torch.zeros(2, 40), np.zeros(2, np.int32)
    with pytest.raises(IndexError, match="rows must be from 0 to 1, got 2"):
        leave_out(logits, [(0, none), (2, none)])
    with pytest.raises(IndexError, match="got -1"):
        leave_out(logits, [(0, none), (-1, none)])
    with pytest.raises(ValueError, match="masks must have 2 words, got 1"):
        leave_out(logits, [(0, none), (1, none[:1])])
    with pytest.raises(TypeError, match=r"logits must be torch\.float32"):
        leave_out(logits.double(), [(0, none)])
    with pytest.raises(ValueError, match="logits must be contiguous"):
        leave_out(logits.T, [(0, none)])
    assert not logits.any()
