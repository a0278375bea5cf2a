"""Shares of a trace's blocks that the prefix tree finds, of those seen before.

In made-up traces it finds as many as a set of paths, in recorded ones as many as their publishers
say. The recorded traces are not in the repository; without them their tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.traces.formats import read_agentic, read_mooncake
from aioserve.traces.trace_request import TraceRequest
from tests import made_up_traces

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def block_hit_share(requests: list[TraceRequest]) -> float:
    """Share of blocks found in a tree that never evicts. A block is a page of one token, its id."""
    num_blocks = sum(len(request.block_ids) for request in requests)
    pool = PagePool(num_blocks, page_size=1)
    tree = PrefixTree(pool)
    hits = 0
    for step, request in enumerate(requests):
        ids = np.array(request.block_ids, np.int32)
        match = tree.match(request.session.encode(), ids)
        found = len(match.page_ids)
        pages = pool.acquire(len(ids) - found)
        assert tree.insert(match.receipt, ids[found:], pages, step) == len(pages)
        pool.release(pages, NO_STEP)
        tree.release(match.receipt)
        hits += found
    tree.sanity_check()
    assert tree.num_evictable == pool.num_held == num_blocks - hits
    return hits / num_blocks


@pytest.mark.parametrize(
    ("write", "read"),
    [(made_up_traces.mooncake, read_mooncake), (made_up_traces.agentic, read_agentic)],
    ids=["mooncake", "agentic"],
)
def test_an_unbounded_cache_finds_every_block_of_a_made_up_trace_that_was_seen_before(
    write: Callable[[Path], Path],
    read: Callable[[Path], list[TraceRequest]],
    tmp_path: Path,
) -> None:
    path = write(tmp_path)
    found = block_hit_share(read(path))
    assert 0.5 < found < 1
    assert found == pytest.approx(made_up_traces.share_seen_before(path))


@pytest.mark.parametrize(
    ("name", "read", "published", "share"),
    [
        ("mooncake_conversation", read_mooncake, 0.30, 0.303),
        ("mooncake_synthetic", read_mooncake, 0.17, 0.170),
        ("agentic_coding", read_agentic, 0.95, 0.945),
    ],
)
def test_an_unbounded_cache_finds_the_share_of_blocks_that_was_seen_before(
    name: str, read: Callable[[Path], list[TraceRequest]], published: float, share: float
) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the repository")
    found = block_hit_share(read(path))
    print(f"{name}: {found:.3f}")
    assert round(found, 3) == share
    assert round(found, 2) == published
