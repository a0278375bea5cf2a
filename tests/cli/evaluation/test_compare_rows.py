"""Divergence between the rows of logits of two models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._evaluation.divergence import compare_rows


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 1.0, 30.0]))
def test_the_divergence_is_torchs(seed: int, scale: float) -> None:
    source = np.random.default_rng(seed)
    p, q = (scale * source.normal(size=(3, 50)).astype(np.float32) for _ in range(2))
    found = compare_rows(p, q)
    log_p, log_q = (torch.from_numpy(one).double().log_softmax(1) for one in (p, q))
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
    np.testing.assert_allclose(found.kl_nats, expected.clamp(min=0), rtol=1e-9, atol=1e-12)
    assert found.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert compare_rows(p, p).kl_nats.tolist() == [0.0] * 3


def test_what_the_reference_never_says_counts_nothing_and_what_the_model_never_says_all() -> None:
    row, without = np.zeros((1, 3), np.float32), np.array([[0, 0, -math.inf]], np.float32)
    assert compare_rows(without, row).kl_nats[0] == pytest.approx(math.log(3 / 2))
    assert compare_rows(row, without).kl_nats[0] == math.inf
