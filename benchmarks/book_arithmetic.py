"""Claims of the books that arithmetic alone decides: their formulas, computed again.

Nothing is measured, so that each figure is the same on every machine.
"""

from __future__ import annotations

import numpy as np
from book_claims import CORRECTED, HOLDS, NANO, NOT, SCRATCH, Claim, Found

from aioserve.capacity.capacity import kv_bytes_per_token, weight_bytes
from aioserve.capacity.models import read_sizes
from aioserve.kv.page_pool import PagePool
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.paging.pages import pages_for

PAGE_SIZE = 16
SEVEN_REQUESTS = (1000, 100, 120, 100, 150, 200, 80)
"""Output tokens of the requests in Nano-Serving's picture of continuous batching."""
THREE_PROMPTS = (200, 50, 1500)
"""Tokens of the requests in its picture of fragmentation."""
TREE_SEQUENCES = ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 8, 9), (1, 2, 3, 10, 11))
CHAT_PROMPTS = (
    (1, 2, 3, 4, 5, 10, 11, 12),
    (1, 2, 3, 4, 5, 20, 21),
    (1, 2, 3, 4, 5, 30, 31, 32, 33),
)
"""Three prompts behind one system prompt, in its example of a radix cache."""


def memory_formula() -> tuple[float, float]:
    """Megabytes of 32 requests: set aside for 2,048 tokens each, and for 120.

    The formula is that of `analyze_memory_efficiency`: 4 bytes, 12 heads, 64 dimensions, keys and
    values."""
    bytes_per_token = 4 * 12 * 64 * 2
    contiguous, paged = (32 * tokens * bytes_per_token / 1e6 for tokens in (2048, 120))
    return contiguous, paged


def memory() -> Found:
    contiguous, paged = memory_formula()
    here = f"{contiguous:.1f} MB and {paged:.1f} MB, ratio {contiguous / paged:.1f}"
    why = (
        "32 x 2,048 x 6,144 bytes, and 32 x 120 x 6,144 bytes. Both printed figures are about "
        "twice as large, so the ratio is right. One layer is counted"
    )
    return Found(here, CORRECTED, why)


def seven_requests() -> Found:
    tokens, static = sum(SEVEN_REQUESTS), sum(SEVEN_REQUESTS[:4])
    here = f"{tokens:,} tokens, {tokens / 1000:.2f} a step, {tokens / static:.2f} times"
    sums = " + ".join(map(str, SEVEN_REQUESTS))
    return Found(here, CORRECTED, f"{sums} = {tokens:,}")


def trie_nodes(sequences: tuple[tuple[int, ...], ...]) -> int:
    """Nodes of a trie with one token for each node, the root included."""
    return 1 + len(
        {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    )


def tree_of(sequences: tuple[tuple[int, ...], ...]) -> PrefixTree:
    """Our prefix tree of these sequences, at one token to a page."""
    pool = PagePool(64, 1)
    tree = PrefixTree(pool)
    for sequence in sequences:
        ids = np.array(sequence, np.int32)
        match = tree.match(b"", ids)
        fresh = pool.acquire(len(ids) - match.num_pages)
        tree.insert(match.receipt, ids[match.num_pages :], fresh, 0)
        tree.release(match.receipt)
    return tree


def nodes() -> Found:
    trie, radix = trie_nodes(TREE_SEQUENCES), tree_of(TREE_SEQUENCES).num_nodes
    here = f"{trie} nodes in a trie, {radix} in our prefix tree"
    saved = 1 - radix / trie
    return Found(here, CORRECTED, f"The root and the tokens 1 to 11. {saved:.0%} fewer, not 57 %")


def impact() -> Found:
    baseline = 32 * (100 + 20)
    cached = 32 * (1 + 20)
    counts = (baseline, baseline / 8, cached, cached / 2, cached / 2 * 0.4)
    here = ", ".join(f"{count:,.0f}" for count in counts) + " steps"
    why = (
        "The function beside the table computes these. The table says 4,960, 584, 403, 272 and "
        "173. With the KV cache the function has more steps than before it"
    )
    return Found(here, CORRECTED, why)


def example_hits() -> tuple[int, int]:
    """Prompt tokens that the example's tree had, and all of them."""
    seen: set[tuple[int, ...]] = set()
    hits = total = 0
    for prompt in CHAT_PROMPTS:
        prefixes = [prompt[:end] for end in range(1, len(prompt) + 1)]
        hits += sum(prefix in seen for prefix in prefixes)
        total += len(prompt)
        seen.update(prefixes)
    return hits, total


def example() -> Found:
    hits, total = example_hits()
    here = f"{hits} of {total} prompt tokens, {hits / total:.1%}"
    return Found(here, CORRECTED, "Two prompts find 5 tokens each; the first finds none")


def fragmentation() -> Found:
    used, pages = sum(THREE_PROMPTS), sum(pages_for(count, PAGE_SIZE) for count in THREE_PROMPTS)
    room = pages * PAGE_SIZE
    here = (
        f"{1 - used / (3 * 2048):.1%} of 6,144 tokens; {1 - used / room:.1%} of {room:,} tokens in "
        f"{pages} pages"
    )
    return Found(here, HOLDS, "111 pages hold 1,776 tokens, not 1,777")


def paged_capacity() -> Found:
    contiguous, paged = (256 * tokens * 36_000 / 1e9 for tokens in (2048, 300))
    exact = 256 * PAGE_SIZE * pages_for(300, PAGE_SIZE) * 36_864 / 1e9
    here = (
        f"{contiguous:.1f} GB and {paged:.2f} GB, {1 - paged / contiguous:.0%} less; "
        f"{exact:.2f} GB in whole pages of 36,864 bytes a token"
    )
    return Found(here, CORRECTED, "18.9 GB to 2.77 GB is 85 % less. The ratio of 6.8 is right")


def twenty_requests() -> Found:
    sizes = read_sizes("llama-3-70b")
    each = kv_bytes_per_token(sizes, "bfloat16")
    kv = 20 * 4096 * each
    weights = weight_bytes(sizes.parameters, "bfloat16")
    here = f"{kv / 2**30:.1f} GiB of KV beside {weights / 1e9:.0f} GB of weights"
    why = (
        f"{each:,} bytes a token: 80 layers, 8 KV heads of 128, keys and values, 2 bytes. With all "
        f"64 heads it would be {8 * kv / 2**30:.0f} GiB"
    )
    return Found(here, CORRECTED, why)


def system_prompt() -> Found:
    without, shared = 1000 * 550, 500 + 1000 * 50
    pages = 1000 * 550 - 999 * (500 // PAGE_SIZE * PAGE_SIZE)
    here = (
        f"{shared:,} tokens, {1 - shared / without:.1%} fewer, {without / shared:.1f} times; in "
        f"whole pages of 16 {pages:,} tokens, {without / pages:.1f} times"
    )
    why = "That is the prefill alone; each completion takes its steps as before"
    return Found(here, HOLDS, why)


def speedup_by_hits() -> Found:
    rates = (0.91, 0.73, 0.45, 0.05)
    here = ", ".join(f"{1 / (1 - rate):.2f}" for rate in rates) + " times"
    why = "1 / (1 - hit rate) bounds the prefill. Decode has no hits, so a request gains less"
    return Found(here, NOT, why)


CLAIMS = (
    Claim(
        "memory-formula",
        NANO,
        "786.4 MB set aside, 46.1 MB in pages, 17.1 times less",
        "32 requests, 2,048 tokens set aside, 120 used",
        memory,
    ),
    Claim(
        "seven-requests",
        NANO,
        "1,850 tokens in 1,000 steps, 1.85 a step, 1.4 times static batching",
        "seven requests on four seats",
        seven_requests,
    ),
    Claim("trie-nodes", NANO, "14 nodes become 6", "its picture of a trie and a radix tree", nodes),
    Claim(
        "impact-steps",
        NANO,
        "4,960 steps become 155 in its table",
        "`analyze_optimization_impact`, printed below the table",
        impact,
    ),
    Claim(
        "example-hits",
        NANO,
        "62.5 % of tokens are hits",
        "three prompts of 8, 7 and 9 tokens, 5 in common",
        example,
    ),
    Claim(
        "fragmentation",
        NANO,
        "71.5 % wasted without pages, 1.5 % with them",
        "prompts of 200, 50 and 1,500 tokens",
        fragmentation,
    ),
    Claim(
        "paged-capacity",
        NANO,
        "18.9 GB become 2.77 GB, a 98 % reduction",
        "256 requests of 300 tokens, GPT-2, 2,048 set aside",
        paged_capacity,
    ),
    Claim(
        "system-prompt",
        NANO,
        "91 % fewer prompt tokens, 10.9 times",
        "1,000 requests, 500 tokens in common, 50 of their own",
        system_prompt,
    ),
    Claim(
        "hits-to-speed",
        NANO,
        "hit rates of 91, 73, 45 and 5 % speed a workload up 10, 3.7, 1.8 and 1.1 times",
        "`analyze_cache_hit_rates`",
        speedup_by_hits,
    ),
    Claim(
        "twenty-requests",
        SCRATCH,
        "twenty requests of 4,000 tokens take more memory than the 140 GB of weights",
        "Llama 70B in 16 bits",
        twenty_requests,
    ),
)
