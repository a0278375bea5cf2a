"""Compares native ops with torch: microseconds per call, and how many times faster.

    python benchmarks/ops.py [--threads 2] [--repeats 30]

Attention is compared with `scaled_dot_product_attention` over keys already gathered into dense
tensors (which an engine with pages would have to do first). The other ops are compared with the
reference backend. Each number is the minimum of the repeats, taken in turns so that a busy machine
affects both sides alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from aioserve import _native
from aioserve.ops import Backend, HostBatch, KVCache, KVShape, backend_named
from aioserve.ops.backend import AttentionKind, HeadNorms, KVLayer, RMSNorm, Rotation
from aioserve.ops.kv_cache import format_of_floats
from aioserve.paging.format import KVEntry
from aioserve.paging.layout import LayerKV, kv_layout

PAGE_SIZE = 16
NATIVE, REFERENCE = backend_named("native"), backend_named("reference")
ATTENTION = [  # name, sequences, query tokens, context, query heads, KV heads, head size
    ("decode 32 x 256", 32, 1, 256, 8, 4, 64),
    ("decode 1 x 2048", 1, 1, 2048, 8, 4, 64),
    ("decode 32 x 256", 32, 1, 256, 16, 8, 128),
    ("decode 1 x 2048", 1, 1, 2048, 16, 8, 128),
    ("prefill 2048", 1, 2048, 2048, 8, 4, 64),
    ("prefill 2048", 1, 2048, 2048, 16, 8, 128),
]


def best_microseconds(repeats: int, *calls: Callable[[], object]) -> list[float]:
    best = [float("inf")] * len(calls)
    for _ in range(repeats + 2):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    return [1e6 * seconds for seconds in best]


def batch_of(sequences: int, tokens: int, context: int) -> HostBatch:
    """Return equal sequences whose pages are scattered over the cache."""
    pages = -(-context // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(sequences * pages).reshape(sequences, pages)
    counts, contexts = np.full(sequences, tokens), np.full(sequences, context)
    return HostBatch.laid_out(counts, contexts, table.astype(np.int32)[None], PAGE_SIZE)


def cache_for(
    backend: Backend,
    layers: int,
    num_pages: int,
    page_size: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
) -> KVCache:
    layer = LayerKV(KVEntry(format_of_floats(dtype), heads, dim))
    kv = backend.allocate_kv(KVShape(kv_layout([layer] * layers, 1), num_pages, page_size))
    kv.storage.normal_()
    return kv


def report(name: str, dtype: torch.dtype, ours: float, theirs: float) -> None:
    print(f"{name:<40} {str(dtype)[6:]:<9} {ours:>10.1f} {theirs:>10.1f} {theirs / ours:>7.2f}x")


def attention(dtype: torch.dtype, repeats: int) -> None:
    for name, sequences, tokens, context, q_heads, kv_heads, dim in ATTENTION:
        host = batch_of(sequences, tokens, context)
        kv = cache_for(NATIVE, 1, host.page_table.size, PAGE_SIZE, kv_heads, dim, dtype)
        batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
        qkv = torch.randn(sequences * tokens, (q_heads + 2 * kv_heads) * dim).to(dtype)
        q = qkv.view(sequences * tokens, -1, dim)[:, :q_heads]
        dense_q = q.reshape(sequences, tokens, q_heads, dim).transpose(1, 2)
        keys = torch.randn(sequences, kv_heads, context, dim).to(dtype)
        values = torch.randn_like(keys)
        ours, theirs = best_microseconds(
            min(repeats, 5) if tokens > 1 else repeats,
            partial(NATIVE.paged_attention, qkv, KVLayer(batch, kv, 0), AttentionKind(dim**-0.5)),
            partial(
                scaled_dot_product_attention,
                dense_q,
                keys,
                values,
                is_causal=tokens > 1,
                enable_gqa=True,
            ),
        )
        report(f"attention {name}, {q_heads}/{kv_heads} x {dim}", dtype, ours, theirs)


def small_ops(dtype: torch.dtype, tokens: int, repeats: int) -> None:
    host = batch_of(tokens, 1, 256)
    x, residual = torch.randn(tokens, 512).to(dtype), torch.randn(tokens, 512).to(dtype)
    weight, head_weight = torch.ones(512).to(dtype), torch.ones(64).to(dtype)
    qkv = torch.randn(tokens, 16 * 64).to(dtype)
    gate_up = torch.randn(tokens, 3072).to(dtype)
    rotation = Rotation(torch.rand(256, 32), torch.rand(256, 32))
    norms = HeadNorms(head_weight, head_weight, 1e-6)
    places = []
    for backend in (NATIVE, REFERENCE):
        kv = cache_for(backend, 1, host.page_table.size, PAGE_SIZE, 4, 64, dtype)
        batch = backend.prepare(host, kv, backend.allocate_slots(1))
        places.append((backend, KVLayer(batch, kv, 0)))
    cases: dict[str, Callable[[Backend, KVLayer], object]] = {
        "rms_norm": lambda ops, _: ops.rms_norm(x, RMSNorm(weight, 1e-6)),
        "rms_norm of a sum": lambda ops, _: ops.rms_norm(x, RMSNorm(weight, 1e-6), residual),
        "gated, silu": lambda ops, _: ops.gated(gate_up, gelu=False),
        "gated, gelu": lambda ops, _: ops.gated(gate_up, gelu=True),
        "rotary_kv_write": lambda ops, at: ops.rotary_kv_write(qkv, at, rotation, norms),
    }
    for name, op in cases.items():
        calls = [partial(op, *place) for place in places]
        report(f"{name}, {tokens} tokens", dtype, *best_microseconds(10 * repeats, *calls))


def page_copies(dtype: torch.dtype, repeats: int) -> None:
    """Copy pages of 8 layers from one cache to another, as sequences are swapped."""
    for num_pages, page_size in ((32, 16), (512, 16), (8192, 1)):
        caches = [cache_for(NATIVE, 8, num_pages, page_size, 4, 64, dtype) for _ in range(2)]
        sources, targets = torch.randperm(num_pages), torch.randperm(num_pages)
        zeros = torch.zeros(num_pages, dtype=torch.int64)
        columns = (zeros, sources, zeros + 1, targets, zeros + page_size)
        copies = torch.stack(columns, dim=1).int().numpy()
        ours, theirs = best_microseconds(
            min(repeats, 10),
            partial(NATIVE.copy_pages, caches, copies),
            partial(REFERENCE.copy_pages, caches, copies),
        )
        report(f"copy_pages, {num_pages} of {page_size} tokens", dtype, ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Native ops against torch.")
    parser.add_argument("--threads", type=int, default=_native.cpu_info()["threads"])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _native.set_num_threads(arguments.threads)
    print(_native.cpu_info())
    print(f"{'':<40} {'':<9} {'native us':>10} {'torch us':>10} {'ratio':>8}")
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            attention(dtype, arguments.repeats)
            for tokens in (1, 32):
                small_ops(dtype, tokens, arguments.repeats)
            page_copies(dtype, arguments.repeats)


if __name__ == "__main__":
    main()
