"""Requests of a trace: equal blocks are equal tokens, at another rate and scale too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError, TraceError
from aioserve.traces.request import TraceRequest, at_rate, with_scaled_lengths

BLOCK = 4


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=5, unique=True), st.integers(1 - BLOCK, 3)),
        min_size=2,
        max_size=6,
    )
)
def test_blocks_are_equal_just_where_their_ids_are(prompts: list[tuple[list[int], int]]) -> None:
    seen: dict[tuple[int, ...], int] = {}
    rests = set()
    for number, (ids, more) in enumerate(prompts):
        length = max(len(ids) * BLOCK + more, 1)
        tokens = TraceRequest(number, 0.0, length, 1, tuple(ids), BLOCK).prompt_ids()
        assert (tokens.dtype, tokens.shape) == (np.int32, (length,))
        assert tokens.flags.c_contiguous
        for index, id in enumerate(ids):
            block = tuple(tokens[index * BLOCK : (index + 1) * BLOCK].tolist())
            full = tuple(range(id * BLOCK, (id + 1) * BLOCK))
            assert block == full[: len(block)]
            seen[full] = id
        rest = set(tokens[len(ids) * BLOCK :].tolist())
        assert rests.isdisjoint(rest)
        rests |= rest
    of_blocks = [token for block in seen for token in block]
    assert len(of_blocks) == len(set(of_blocks))
    assert rests.isdisjoint(of_blocks)


def test_an_id_too_large_for_int32_tokens_is_refused() -> None:
    last = (2**31 - 1) // 512 - 1
    tokens = TraceRequest(0, 0.0, 512, 1, (last,), 512).prompt_ids()
    assert tokens[-1] == last * 512 + 511
    # 2**55 * 512 is 0 in int64, and 2**23 * 512 in int32.
    for block_id in (last + 1, -1, 2**23, -(2**23), 2**55, 2**63, 10**30):
        message = f"request 3: block_ids must be 0 to {last} with blocks of 512 .*, got {block_id}$"
        with pytest.raises(TraceError, match=message):
            TraceRequest(3, 0.0, 1024, 1, (0, block_id), 512).prompt_ids()


@pytest.mark.parametrize("began", [0.0, 60.0, 1.7e9])
def test_a_rate_stretches_all_arrivals_evenly(began: float) -> None:
    trace = [TraceRequest(n, began + t, 10, 2, (), 10) for n, t in enumerate([0.0, 1.0, 4.0])]
    assert [r.arrival_seconds for r in at_rate(trace, 0.5)] == [0.0, 1.5, 6.0]
    for rate, limit in ((0.0, "more than 0"), (-1.0, "more than 0"), (float("inf"), "at most")):
        with pytest.raises(ConfigError, match=f"rate must be {limit}"):
            at_rate(trace, rate)
    for at_once in (trace[:1], trace[:1] * 3):
        message = rf"rate 1.0: .* all requests of the trace \({len(at_once)}\) arrive at once$"
        with pytest.raises(ConfigError, match=message):
            at_rate(at_once, 1.0)


def test_scaled_lengths_share_what_was_shared() -> None:
    trace = [
        TraceRequest(0, 0.0, 1025, 7, (0, 1, 2), 512),
        TraceRequest(1, 0.0, 1024 + 17, 0, (0, 1, 3), 512, max_tokens=33),
    ]
    first, second = with_scaled_lengths(trace, 1 / 16)
    assert (first.prompt_tokens, first.output_tokens, first.block_tokens) == (65, 1, 32)
    assert (second.prompt_tokens, second.output_tokens, second.max_tokens) == (66, 0, 3)
    assert (first.prompt_ids()[:64] == second.prompt_ids()[:64]).all()
    assert first.prompt_ids()[64] != second.prompt_ids()[64]
    assert with_scaled_lengths(trace, 2.0)[0].block_tokens == 1024


def test_a_scale_that_breaks_blocks_is_refused() -> None:
    trace = [TraceRequest(0, 0.0, 1025, 7, (0, 1, 2), 512)]
    with pytest.raises(ConfigError, match=r"scale_lengths 0.3 makes .* tokens of blocks of 512"):
        with_scaled_lengths(trace, 0.3)
    with pytest.raises(ConfigError, match=r"scale_lengths must be (more than 0|at most)"):
        with_scaled_lengths(trace, 0.0)
    plain = [TraceRequest(0, 0.0, 1025, 7, (), 1025)]
    assert with_scaled_lengths(plain, 0.3)[0].prompt_tokens == 308
