"""A batch that is advanced in place equals a newly laid out one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aioserve.ops import HostBatch


@given(
    contexts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 2, 4, 16]),
    groups=st.integers(1, 2),
    steps=st.integers(1, 9),
    dropped=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_a_batch_that_goes_on_is_the_one_laid_out_there(
    contexts, page_size, groups, steps, dropped, seed
):
    width = (max(contexts) + steps - 1) // page_size + 1
    pages = np.random.default_rng(seed).permutation(groups * len(contexts) * width)
    table = pages.astype(np.int32).reshape(groups, len(contexts), width)
    counts, lengths, rows = np.ones(len(contexts), int), np.array(contexts), range(len(contexts))
    batch = HostBatch.laid_out(counts, lengths, table, page_size, logit_rows=rows)
    batch.positions[:] += dropped
    for step in range(1, steps + 1):
        batch.advance(page_size)
        anew = HostBatch.laid_out(counts, lengths + step, table, page_size, logit_rows=rows)
        anew.positions[:] += dropped
        for field in fields(HostBatch):
            found, expected = getattr(batch, field.name), getattr(anew, field.name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
