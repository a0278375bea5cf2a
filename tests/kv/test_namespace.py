"""Keys that no other combination of parts can have."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.namespace import KVContent, cache_key, namespace_key
from aioserve.paging.format import KV_FORMATS

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


contents = st.builds(
    KVContent,
    weights=st.binary(max_size=3),
    computation=st.binary(max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kv_format=st.sampled_from(list(KV_FORMATS.values())),
    page_size=st.sampled_from([1, 16]),
    kernels=st.text(max_size=3),
)
keyed = st.tuples(contents, st.binary(max_size=3), st.lists(st.integers(0, 2**31 - 1), max_size=3))


@given(keyed, keyed, st.data())
def test_cache_keys_are_equal_exactly_if_all_that_counts_is(
    left: tuple, right: tuple, data: st.DataObject
) -> None:
    right = data.draw(st.sampled_from([right, left]))
    if data.draw(st.booleans()):
        field = data.draw(st.sampled_from(KVContent.__struct_fields__))
        changed = msgspec.structs.replace(left[0], **{field: getattr(right[0], field)})
        right = (changed, *left[1:])
    keys = [cache_key(one, space, np.array(ids, np.int32)) for one, space, ids in (left, right)]
    assert len(keys[0]) == 32
    assert (keys[0] == keys[1]) == (left == right)


def test_the_cache_key_is_this_one_in_every_version_of_python() -> None:
    content = KVContent(
        weights=b"w",
        computation=b"c",
        dtype="bfloat16",
        activation_quantization="int8",
        kv_format=KV_FORMATS["bfloat16"],
        page_size=16,
        kernels="native avx2",
    )
    key = cache_key(content, namespace_key(salt="x"), np.array([1, 2, 300], np.int32))
    written = (
        b"aioserve kv1:1,weights1:w,computation1:c,dtype8:bfloat16,"
        b"activation_quantization4:int8,kv_format8:bfloat16,page_size2:16,"
        b"kernels11:native avx2,namespace8:salt1:x,,"
        b"tokens12:\x01\0\0\0\x02\0\0\0\x2c\x01\0\0,"
    )
    assert key == hashlib.sha256(written).digest()
