"""Drafters by example: what they draft, what they refuse, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aioserve.drafting.drafter import NO_IDS, DraftedSequence, Drafter
from aioserve.drafting.ngram import NgramDrafter
from aioserve.drafting.suffix import SuffixDrafter
from aioserve.errors import ConfigError, InvariantError

BOTH = pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
Make = Callable[..., NgramDrafter | SuffixDrafter]


def sequence(
    prompt: Any, answer: Any = (), *, namespace: bytes = b"", predicted: Any = NO_IDS
) -> DraftedSequence:
    return DraftedSequence(
        known_ids=np.array([*prompt, *answer], np.int32),
        prompt_tokens=len(prompt),
        namespace=namespace,
        predicted_ids=np.array(predicted, np.int32),
    )


def answer(
    drafter: Drafter, slot: int, prompt: list[int], tokens: list[int], namespace: bytes = b""
) -> None:
    """All of a sequence's life."""
    drafter.start(slot, sequence(prompt, namespace=namespace))
    drafter.extend(slot, tokens)
    drafter.end(slot)


@BOTH
def test_what_followed_before_is_drafted(make: Make) -> None:
    drafter = make()
    drafter.start(0, sequence([1, 2, 3, 4, 5, 6, 9, 2, 3]))
    assert drafter.draft(0, 2) == [4, 5]
    drafter.extend(0, [4])
    assert drafter.draft(0, 3) == [5, 6, 9]
    drafter.extend(0, [7])
    assert drafter.draft(0, 3) == []


@BOTH
def test_a_loop_is_drafted_on_behind_its_end(make: Make) -> None:
    drafter = make()
    drafter.start(0, sequence([9, 1, 2, 3, 1, 2, 3, 1, 2, 3]))
    assert drafter.draft(0, 6) == [1, 2, 3, 1, 2, 3]


@BOTH
def test_a_prediction_is_followed_from_the_first_token_on(make: Make) -> None:
    drafter = make()
    predicted = [5, 6, 7, 8, 9]
    drafter.start(0, sequence([1, 2, 5, 1, 2, 5], predicted=predicted))
    assert drafter.draft(0, 3) == [5, 6, 7]
    drafter.extend(0, [5])
    assert drafter.draft(0, 8) == [6, 7, 8, 9]


@BOTH
def test_a_prediction_is_found_again_behind_what_it_does_not_say(make: Make) -> None:
    drafter = make()
    drafter.start(0, sequence([1], predicted=[5, 6, 7, 8, 9]))
    drafter.extend_all([0], [[5, 4]])
    assert drafter.draft(0, 3) == []
    drafter.extend_all([0], [[7]])
    assert drafter.draft(0, 3) == []
    drafter.extend_all([0], [[8]])
    assert drafter.draft(0, 3) == [9]


def test_a_draft_is_what_followed_most_often() -> None:
    drafter = SuffixDrafter()
    drafter.start(0, sequence([1, 2, 1, 2, 1, 3, 4, 5, 1]))
    assert drafter.draft(0, 1) == [2]


def test_of_equals_the_last_one_is_drafted() -> None:
    drafter = SuffixDrafter()
    drafter.start(0, sequence([1, 2, 7, 1, 3, 8, 1]))
    assert drafter.draft(0, 1) == [3]


def test_a_draft_ends_where_it_gets_unlikely() -> None:
    before = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2]
    for least, drafts in ((0.3, [3, 6]), (0.4, [3])):
        drafter = SuffixDrafter(min_probability=least, max_factor=1)
        drafter.start(0, sequence(before))
        assert drafter.draft(0, 8) == drafts


def test_a_longer_match_allows_more_tokens() -> None:
    drafter = SuffixDrafter()
    drafter.start(0, sequence([*range(20), 5, 6]))
    assert drafter.draft(0, 8) == [7, 8, 9]


def test_recent_answers_are_drafted_from_their_first_token_on() -> None:
    drafter = SuffixDrafter(max_factor=1)
    answer(drafter, 0, [1, 2, 3], [10, 11, 12, 13])
    drafter.start(0, sequence([4]))
    assert drafter.draft(0, 4) == [10]
    drafter.extend(0, [10])
    assert drafter.draft(0, 4) == [11, 12]
    drafter.extend(0, [12])
    assert drafter.draft(0, 4) == [13]


def test_prompts_of_others_are_not_drafted() -> None:
    drafter = SuffixDrafter()
    answer(drafter, 0, [10, 11, 12, 13], [1])
    drafter.start(0, sequence([9]))
    assert drafter.draft(0, 4) == [1]
    drafter.extend(0, [10, 11])
    assert drafter.draft(0, 4) == []


def test_answers_of_another_namespace_are_not_drafted() -> None:
    drafter = SuffixDrafter()
    answer(drafter, 0, [1], [10, 11, 12, 13], b"a")
    for namespace, drafts in ((b"b", []), (b"", []), (b"a", [12, 13])):
        drafter.start(0, sequence([2], [10, 11], namespace=namespace))
        assert drafter.draft(0, 2) == drafts
        drafter.end(0)


def test_a_sequence_that_starts_again_counts_once() -> None:
    drafter = SuffixDrafter(max_factor=8)
    for _ in range(2):
        answer(drafter, 0, [1], [10, 11])
    drafter.start(0, sequence([2]))
    drafter.extend(0, [10, 12])
    for known in ([10, 12], [10, 12, 13]):
        drafter.end(0)  # preempted
        drafter.start(0, sequence([2], known))
    drafter.end(0)
    drafter.start(1, sequence([3]))
    drafter.extend(1, [10])
    assert drafter.draft(1, 1) == [11]


def test_the_oldest_answers_go() -> None:
    drafter = SuffixDrafter(cache_tokens=12)
    answer(drafter, 0, [1], [10, 11, 12, 13])
    answer(drafter, 0, [1], [20, 21, 22, 23])
    assert drafter.num_cached_tokens == 12
    for tokens, drafts in (([20, 21], [22, 23]), ([10, 11], [])):
        drafter.start(0, sequence([2], tokens))
        assert drafter.draft(0, 2) == drafts
        drafter.end(0)
    assert drafter.num_cached_tokens <= 12


def test_memory_is_bounded_by_what_is_said_of_it() -> None:
    drawn = np.random.default_rng(1)
    length = 20_000
    for text in (
        drawn.integers(0, 2, length),
        drawn.integers(0, 2**31 - 1, length),
        drawn.zipf(1.3, length) % 10_000,
        np.zeros(length),
    ):
        suffix = SuffixDrafter()
        suffix.start(0, sequence(text))
        suffix.extend(0, text.astype(int).tolist())
        assert suffix.num_bytes < 2 * length * 2 * 104
        suffix.end(0)
        assert suffix.num_cached_tokens == length + 2
        assert suffix.num_bytes < length * 2 * 132 + 1000
        ngram = NgramDrafter(min_ngram=1, max_ngram=4)
        ngram.start(0, sequence(text))
        ngram.extend(0, text.astype(int).tolist())
        assert ngram.num_bytes < 2 * length * (8 + 4 * 16)
        ngram.end(0)
        assert ngram.num_bytes == 0


def test_memory_of_recent_answers_stays_bounded_whatever_namespaces_come() -> None:
    drafter = SuffixDrafter(cache_tokens=1000)
    drawn = np.random.default_rng(1)
    largest = 0
    for i in range(600):
        count = int(drawn.integers(1, 400)) if i % 50 == 0 else 3
        tokens = drawn.integers(0, 1000, count).tolist()
        answer(drafter, 0, [1], tokens, bytes([i % 7]))
        largest = max(largest, drafter.num_bytes)
    drafter.sanity_check()
    assert largest < 4 * 1000 * 2 * 132 + 7 * 5000


def test_many_restarts_leave_no_room_taken() -> None:
    drafter = SuffixDrafter(cache_tokens=100)
    answer(drafter, 0, [9], [1, 2, 3])
    for length in range(200):
        drafter.start(0, sequence([1], [5] * length))
        drafter.extend(0, [5])
        drafter.end(0)
        drafter.sanity_check()
        assert drafter.num_cached_tokens <= 100


@BOTH
def test_slots_that_have_not_started_and_not_ended_are_told(make: Make) -> None:
    drafter = make()
    for call in (
        lambda: drafter.draft(3, 1),
        lambda: drafter.extend(3, [1]),
        lambda: drafter.end(3),
    ):
        with pytest.raises(InvariantError, match="slot 3 has not started"):
            call()
    drafter.start(3, sequence([1]))
    with pytest.raises(InvariantError, match="slot 3 has not ended"):
        drafter.start(3, sequence([1]))


@BOTH
def test_a_call_for_several_slots_changes_none_where_one_is_wrong(make: Make) -> None:
    drafter = make()
    drafter.start(0, sequence([1, 2, 3, 4, 1, 2]))
    with pytest.raises(InvariantError, match="slot 1 has not started"):
        drafter.extend_all([0, 1], [[9], [9]])
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 2147483647\], got -1"):
        drafter.extend_all([0], [[9, -1]])
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 2147483647\], got 2147483648"):
        drafter.extend_all([0], [[9, 2**31]])
    with pytest.raises(ValueError, match="token_ids must have 1 entries, got 2"):
        drafter.extend_all([0], [[9], [9]])
    assert drafter.draft(0, 2) == [3, 4]


@BOTH
def test_what_a_sequence_can_not_be_is_refused(make: Make) -> None:
    drafter = make()
    with pytest.raises(ValueError, match=r"known_ids must be in \[0, 2147483647\], got -3"):
        drafter.start(0, sequence([1, -3]))
    with pytest.raises(ValueError, match=r"predicted_ids must be in \[0, 2147483647\], got -2"):
        drafter.start(0, sequence([1], predicted=[-2]))
    with pytest.raises(ValueError, match=r"prompt_tokens must be in \[0, 1\], got 2"):
        drafter.start(0, DraftedSequence(known_ids=np.array([1], np.int32), prompt_tokens=2))
    with pytest.raises(TypeError, match="known_ids must be a one-dimensional int32 array"):
        drafter.start(0, DraftedSequence(known_ids=np.array([1.0]), prompt_tokens=1))
    drafter.start(0, sequence([1]))
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        drafter.draft(0, 0)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (NgramDrafter, {"max_ngram": 9}, r"max_ngram must be an int in \[1, 8\], got 9"),
        (NgramDrafter, {"min_ngram": 0}, r"min_ngram must be an int in \[1, 5\], got 0"),
        (
            NgramDrafter,
            {"min_ngram": 3, "max_ngram": 2},
            r"min_ngram must be an int in \[1, 2\], got 3",
        ),
        (SuffixDrafter, {"max_depth": 1}, r"max_depth must be an int in \[2, 256\], got 1"),
        (SuffixDrafter, {"max_factor": 0}, "max_factor must be a number above 0 and finite, got 0"),
        (SuffixDrafter, {"min_probability": 1.5}, r"min_probability .* in \[0, 1\], got 1.5"),
        (SuffixDrafter, {"cache_tokens": -1}, r"cache_tokens .* in \[0, 16777216\], got -1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    make: Make, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)
