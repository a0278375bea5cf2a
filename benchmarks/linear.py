"""Compares packed linear layers with `torch.nn.functional.linear` and oneDNN's packed layout.

With `--integers` it compares weights of integers with the packed weight of floats. With `--codes`
it compares weights of few bits that become floats on the way.

The contestants take turns within one process. The best of many turns counts, since other work of
the machine only ever makes a turn slower. Before each turn there is a pause and one call that isn't
counted. Without the pause, torch's OpenMP threads would spin for some milliseconds more and steal
the other's cores. With `--streamed` each contestant has as many copies of the weight as exceed the
caches. It walks through them, as a decode step walks through its layers.

    K, N, T    inputs, outputs, rows           GB/s     weight bytes / seconds of `native`
    us         microseconds of one call        GFLOP/s  2 * T * K * N / seconds of `native`
    torch x    torch's time / native's; above 1 `native` is faster. The same for oneDNN, which
               takes part where this build of torch has it.
    int4 x     native's time / that of integers of 4 bits in groups of 32; above 1 integers are
               faster. `+min`: with minimums. Beside it their own GB/s.
    fp8 x      the same of E4M3 in groups of 128; nf4: 4 bits that choose a float, in groups of 64.

    python benchmarks/linear.py --threads 1
    python benchmarks/linear.py --dtype float32 --rows 1 32 --shapes 512x1024 1024x151936 --streamed
    python benchmarks/linear.py --integers --rows 1 2 4 8 16 64 256 --shapes 2048x2048 8192x8192
    python benchmarks/linear.py --codes --rows 1 4 16 64 256 --shapes 2048x2048 --streamed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops import backend_named
from aioserve.ops.native_grouped import CodedWeight, GroupedWeight

Layer = Callable[[Tensor], Tensor]
Makers = dict[str, Callable[[Tensor], Layer]]

SHAPES = ["512x1024", "512x512", "512x3072", "1536x512", "512x8192", "1024x4096", "2048x1024",
          "1024x6144", "3072x1024"]  # fmt: skip
ROWS = [1, 4, 32, 128, 512, 2048]
CACHES_BYTES = 96 * 2**20
PAUSE_SECONDS = 0.005
NUMBERS = np.linspace(-1, 1, 16, dtype=np.float32)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    _native.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    cpu = _native.cpu_info()
    print(f"{options.dtype}, {options.threads} threads, {cpu['isa']}, torch {torch.__version__}")
    few_bits = options.integers or options.codes
    makers = contestants()
    if options.integers:
        makers = integer_contestants(options.group_size)
    if options.codes:
        makers = integer_contestants(options.group_size, in_floats=True) | coded_contestants()
    print_head(makers, few_bits)
    with torch.inference_mode():
        for shape in options.shapes:
            in_features, out_features = map(int, shape.split("x"))
            weight = torch.randn(out_features, in_features).to(dtype)
            copies = -(-CACHES_BYTES // weight.nbytes) if options.streamed else 1
            layers = {
                name: [make(weight.clone()) for _ in range(copies)] for name, make in makers.items()
            }
            for rows in options.rows:
                x = torch.randn(rows, in_features).to(dtype)
                best = race(layers, x, options.seconds)
                print_row(shape, rows, weight, best)
                if few_bits:
                    print_integers(layers, best)
                else:
                    print_peers(makers, best)


def contestants() -> Makers:
    makers: Makers = {
        "native": backend_named("native").linear,
        "torch": backend_named("reference").linear,
    }
    onednn = torch.ops.mkldnn
    if hasattr(onednn, "_reorder_linear_weight") and hasattr(onednn, "_linear_pointwise"):
        makers["onednn"] = onednn_layer
    return makers


def onednn_layer(weight: Tensor) -> Layer:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def coded_contestants() -> Makers:
    return {"fp8": partial(random_codes, 128, None), "nf4": partial(random_codes, 64, NUMBERS)}


def random_codes(group_size: int, numbers: Any, like: Tensor) -> Layer:
    out_features, in_features = like.shape
    weight = CodedWeight(
        out_features, in_features, group_size=group_size, numbers=numbers, dtype=like.dtype
    )
    random = np.random.default_rng(0)
    codes = random.integers(0, 127 if numbers is None else 16, (out_features, in_features), np.int8)
    weight.set_rows(0, codes, np.full((out_features, weight.native.groups), 0.01, np.float32))
    return weight.linear()


def integer_contestants(group_size: int, *, in_floats: bool = False) -> Makers:
    makers: Makers = {"native": backend_named("native").linear}
    for bits, has_minimums in (
        (8, False),
        (8, True),
        (6, False),
        (5, False),
        (4, False),
        (4, True),
    ):
        name = f"int{bits}{'+min' if has_minimums else ''}"
        makers[name] = partial(random_integers, group_size, bits, has_minimums, in_floats)
    return makers


def random_integers(
    group_size: int, bits: int, has_minimums: bool, in_floats: bool, like: Tensor
) -> Layer:
    out_features, in_features = like.shape
    weight = GroupedWeight(
        out_features,
        in_features,
        group_size=group_size,
        bits=bits,
        has_minimums=has_minimums,
        in_floats=in_floats,
        dtype=like.dtype,
    )
    random = np.random.default_rng(0)
    low = 0 if has_minimums and bits < 8 else -(1 << (bits - 1))
    high = low + (1 << bits) - 1
    scales = np.full((out_features, weight.native.groups), 0.01, np.float32)
    values = random.integers(low, high, (out_features, in_features), np.int8, endpoint=True)
    weight.set_rows(0, values, scales, -scales if has_minimums else None)
    return weight.linear()


def race(layers: dict[str, list[Layer]], x: Tensor, seconds: float) -> dict[str, float]:
    """Return the best seconds per call of each contestant."""
    best = dict.fromkeys(layers, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best.values():
        for name, copies in layers.items():
            time.sleep(PAUSE_SECONDS)
            copies[-1](x)
            for layer in copies * (4 if x.shape[0] <= 128 else 1):
                start = time.perf_counter()
                layer(x)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def print_head(makers: Makers, integers: bool) -> None:
    head = f"{'K x N':>12} {'T':>5} {'native us':>10} {'GB/s':>6} {'GFLOP/s':>8}"
    for name in list(makers)[1:] if integers else ("torch", "oneDNN"):
        head += f" {name + ' x':>8}" + (f" {'GB/s':>5}" if integers else "")
    print(head)


def print_row(shape: str, rows: int, weight: Tensor, best: dict[str, float]) -> None:
    native = best["native"]
    print(
        f"{shape:>12} {rows:5} {native * 1e6:10.1f} {weight.nbytes / native / 1e9:6.1f} "
        f"{2 * rows * weight.numel() / native / 1e9:8.0f}",
        end="",
    )


def print_peers(makers: Makers, best: dict[str, float]) -> None:
    for name in ("torch", "onednn"):
        print(f" {best[name] / best['native']:8.2f}" if name in makers else f" {'-':>8}", end="")
    print(flush=True)


def print_integers(layers: dict[str, list[Any]], best: dict[str, float]) -> None:
    for name, (layer, *_) in list(layers.items())[1:]:
        rate = layer.num_bytes / best[name] / 1e9
        print(f" {best['native'] / best[name]:8.2f} {rate:5.1f}", end="")
    print(flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="T")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--threads", type=int, default=_native.cpu_info()["threads"])
    parser.add_argument("--streamed", action="store_true", help="weights from memory, not caches")
    parser.add_argument("--integers", action="store_true", help="against weights of integers")
    parser.add_argument("--codes", action="store_true", help="against what is decoded on the way")
    parser.add_argument("--group-size", type=int, default=32, help="of those integers")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
