"""Keys that no other combination of parts can have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.namespace import namespace_key

parts = st.none() | st.text() | st.sampled_from(["salt1:x,", "1:x,", "adapter", "\ud800"])


@given(st.tuples(parts, parts), st.tuples(parts, parts))
def test_keys_are_equal_exactly_if_all_parts_are(left: tuple, right: tuple) -> None:
    left_key = namespace_key(adapter=left[0], salt=left[1])
    right_key = namespace_key(adapter=right[0], salt=right[1])
    assert (left_key == right_key) == (left == right)


def test_an_adapter_and_a_salt_of_the_same_name_differ() -> None:
    assert namespace_key(adapter="x") == b"adapter1:x,"
    assert namespace_key(salt="x") == b"salt1:x,"
    assert namespace_key(adapter="abc", salt="x") == b"adapter3:abc,salt1:x,"


def test_no_value_passes_for_another_part() -> None:
    assert namespace_key(adapter="a,salt1:x") != namespace_key(adapter="a", salt="x")
    assert namespace_key(adapter="", salt="x") != namespace_key(salt="x")
    assert namespace_key(salt="") != namespace_key() == b""


def test_lengths_count_bytes() -> None:
    assert namespace_key(salt="é") == b"salt2:\xc3\xa9,"


def test_a_part_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="salt must be a string, got bytes"):
        namespace_key(salt=b"x")  # pyright: ignore[reportArgumentType]
