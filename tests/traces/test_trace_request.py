"""Requests of a trace: equal blocks are equal tokens, at another rate and scale too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError, TraceError
from aioserve.traces.trace_request import (
    MAX_REQUESTS,
    TraceRequest,
    at_rate,
    repeated,
    with_scaled_lengths,
)

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


def test_a_repeated_trace_goes_on_as_it_began() -> None:
    trace = [
        TraceRequest(3, 5.0, 10, 2, (7,), 10, session="s"),
        TraceRequest(0, 1.0, 11, 3, (), 10, tenant="c"),
        TraceRequest(5, 9.0, 12, 4, (), 10, follows=3),
    ]
    found = repeated(trace, 8)
    assert [r.arrival_seconds for r in found] == [1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0]
    assert [r.number for r in found] == [0, 3, 5, 6, 9, 11, 12, 15]
    assert [r.follows for r in found] == [None, None, 3, None, None, 9, None, None]
    for place, request in enumerate(found):
        first = sorted(trace, key=lambda r: r.arrival_seconds)[place % 3]
        changed = {"number", "arrival_seconds", "follows"}
        for name in set(request.__struct_fields__) - changed:
            assert getattr(request, name) == getattr(first, name)
    assert repeated(trace, 3) == sorted(trace, key=lambda r: r.arrival_seconds)
    assert repeated(trace, 2) == found[:2]


@pytest.mark.parametrize("count", [0, -1, 1.5, MAX_REQUESTS + 1])
def test_a_trace_is_repeated_for_a_possible_number_of_requests(count: int) -> None:
    trace = [TraceRequest(n, 1.0 * n, 10, 2, (), 10) for n in range(2)]
    with pytest.raises(ConfigError, match="count must be"):
        repeated(trace, count)


def test_a_trace_that_cannot_be_repeated_says_why() -> None:
    trace = [TraceRequest(n, 1.0 * n, 10, 2, (), 10) for n in range(2)]
    for at_once in ([], trace[:1], trace[:1] * 3):
        message = rf"count 4: .* all requests of the trace \({len(at_once)}\) arrive at once$"
        with pytest.raises(ConfigError, match=message):
            repeated(at_once, 4)
    late = [TraceRequest(n, 9e9 * n, 10, 2, (), 10) for n in range(2)]
    assert len(repeated(late, 2)) == 2
    with pytest.raises(ConfigError, match="count 3 makes the trace end after 1e"):
        repeated(late, 3)
    sparse = [TraceRequest(n * (MAX_REQUESTS // 2 - 1), 1.0 * n, 10, 2, (), 10) for n in range(2)]
    assert repeated(sparse, 4)[-1].number == MAX_REQUESTS - 1
    message = f"count 5 makes numbers of .*; they may be at most {MAX_REQUESTS - 1}"
    with pytest.raises(ConfigError, match=message):
        repeated(sparse, 5)


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
