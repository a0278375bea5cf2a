"""The noise generator against its published vectors and a plain reading of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.ops.philox import philox4x32, uniforms

words = st.integers(0, 2**32 - 1)
longs = st.integers(0, 2**64 - 1)


def one(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 of a single counter, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def many(counters: list[tuple[int, ...]], keys: list[tuple[int, ...]]) -> list[list[int]]:
    return philox4x32(np.array(counters, dtype=np.uint64), np.array(keys, dtype=np.uint64)).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: str
) -> None:
    assert " ".join(f"{word:08x}" for word in many([counter], [key])[0]) == expected


@given(
    st.lists(st.tuples(st.tuples(words, words, words, words), st.tuples(words, words)), min_size=1)
)
def test_every_row_equals_the_definition(
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    counters, keys = [counter for counter, _ in rows], [key for _, key in rows]
    assert many(counters, keys) == [one(*row) for row in rows]


@given(st.lists(st.tuples(longs, longs), min_size=1))
def test_a_uniform_is_the_top_53_bits_of_its_own_seed_and_position(
    rows: list[tuple[int, int]],
) -> None:
    drawn = uniforms([seed for seed, _ in rows], [position for _, position in rows])
    for value, (seed, position) in zip(drawn.tolist(), rows, strict=True):
        low, high, _, _ = one(
            (position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32)
        )
        assert value == ((high << 32 | low) >> 11) / 2**53
        assert 0 <= value < 1


@pytest.mark.parametrize("varies", ["seed", "position"])
def test_uniforms_are_spread_evenly_along_seeds_and_along_positions(varies: str) -> None:
    count, bins = 100_000, 100
    running, fixed = list(range(count)), [7] * count
    drawn = uniforms(running, fixed) if varies == "seed" else uniforms(fixed, running)
    histogram = np.bincount((drawn * bins).astype(int), minlength=bins)
    statistic = ((histogram - count / bins) ** 2 / (count / bins)).sum()
    assert statistic < 160  # p < 1e-4 at 99 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
