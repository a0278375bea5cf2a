"""The noise generator against its published vectors and a plain reading of its definition."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.ops import philox
from aioserve.ops.philox import Words, exponentials, philox4x32, second_draws

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


def own_bits(seed: int, position: int, token_id: int) -> int:
    """Compute the 64 bits of a token, by their definition."""
    block, place = divmod(token_id, 64)
    word, lane = divmod(place, 16)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    upper, lower = (
        one((position & 0xFFFFFFFF, position >> 32, 16 * block + lane, half), key)[word]
        for half in (1, 2)
    )
    return upper << 32 | lower


@given(longs, longs, st.lists(st.integers(0, 2**31 - 1), min_size=1, unique=True))
def test_an_exponential_is_a_function_of_seed_position_and_id(
    seed: int, position: int, ids: list[int]
) -> None:
    noise = exponentials(seed, position, np.array(ids)).tolist()
    for value, token_id in zip(noise, ids, strict=True):
        # This gives 1 - u to the last bit, which a float64 near 1 lacks.
        upper_end = Fraction(2 * (2**64 - own_bits(seed, position, token_id)) - 1, 2**65)
        with localcontext(prec=60):
            expected = -(Decimal(upper_end.numerator) / Decimal(upper_end.denominator)).ln()
        assert math.isclose(value, expected, rel_tol=1e-14)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, 2.0**-65),
        (1, 1.5 * 2.0**-64),
        (2**32, 2.0**-32),
        (2**63 - 1, math.log(2)),
        (2**63, math.log(2)),
        (2**64 - 1, 65 * math.log(2)),
    ],
)
def test_the_ends_of_the_unit_interval_are_as_fine_as_its_middle(
    bits: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(counter: Words, _: Words) -> Words:
        upper = counter[:, 3] == 1
        return (
            np.where(upper, bits >> 32, bits & 0xFFFFFFFF).astype(np.uint64)[:, None].repeat(4, 1)
        )

    monkeypatch.setattr(philox, "philox4x32", words)
    (value,) = exponentials(1, 2, np.array([3])).tolist()
    assert math.isclose(value, expected, rel_tol=1e-9)


@pytest.mark.parametrize("varies", ["seed", "position", "id"])
def test_exponentials_are_spread_as_they_should_be(varies: str) -> None:
    count, bins = 20_000 if varies == "id" else 5000, 50
    if varies == "id":
        noise = exponentials(7, 7, np.arange(count))
    else:
        each = np.array([7])
        noise = np.concatenate(
            [
                exponentials(i, 7, each) if varies == "seed" else exponentials(7, i, each)
                for i in range(count)
            ]
        )
    uniform = -np.expm1(-noise)
    histogram = np.bincount((uniform * bins).astype(int), minlength=bins)
    statistic = ((histogram - count / bins) ** 2 / (count / bins)).sum()
    assert statistic < 97  # p < 1e-4 at 49 degrees of freedom
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.06


@given(st.lists(st.tuples(longs, longs), min_size=1, max_size=5))
def test_second_draws_are_words_of_a_counter_that_races_do_not_have(
    keys: list[tuple[int, int]],
) -> None:
    seeds, positions = np.array(keys, np.uint64).T
    numbers, others = second_draws(np.ascontiguousarray(seeds), np.ascontiguousarray(positions))
    for (seed, position), number, other in zip(
        keys, numbers.tolist(), others.tolist(), strict=True
    ):
        words = one((position % 2**32, position >> 32, 0, 3), (seed % 2**32, seed >> 32))
        assert number == ((words[0] << 32 | words[1]) >> 11) / 2**53
        assert other == words[2] << 32 | words[3]
