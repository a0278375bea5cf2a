"""`RequestView.prefix_key` is equal exactly where KV may be shared, whatever was asked before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.bench import Bench

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.sampled_from([b"", b"a", b"ab"]),
    ),
    min_size=2,
    max_size=2,
)


@given(requests=REQUESTS, asked=st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_two_keys_are_equal_where_namespace_and_tokens_are(requests, asked):
    bench = Bench()
    ids = [bench.submit(prompt, namespace=namespace) for prompt, namespace in requests]
    views = [bench.view(sequence_id) for sequence_id in ids]
    (prompt, namespace), (other_prompt, other_namespace) = requests
    for count in asked:
        alike = namespace == other_namespace and prompt[:count] == other_prompt[:count]
        one, other = (view.prefix_key(count) for view in views)
        assert (one == other) is alike


def test_a_key_of_more_tokens_than_there_are_grows_with_the_answer():
    bench = Bench()
    view = bench.view(bench.submit([1, 2], max_tokens=4))
    before = view.prefix_key(99)
    bench.step()
    assert view.generated_tokens == 1
    assert view.prefix_key(99) != before
    assert view.prefix_key(2) == before
