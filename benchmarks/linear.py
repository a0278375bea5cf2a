"""Packed linear layers against `torch.nn.functional.linear` and against oneDNN's packed layout.

The contestants take turns within one process, and the best of many turns counts, since whatever
else the machine does only ever makes a turn slower. Before each turn there is a pause, because
torch's OpenMP threads go on spinning for some milliseconds and would steal the other's cores, and
one call that isn't counted. `--streamed` gives each contestant as many copies of the weight as
exceed the caches and walks through them, as a decode step walks through its layers.

    K, N, T    inputs, outputs, rows           GB/s     weight bytes / seconds of `native`
    us         microseconds of one call        GFLOP/s  2 * T * K * N / seconds of `native`
    torch x    torch's time / native's; above 1 `native` is faster. The same for oneDNN, which
               takes part where this build of torch has it.

    python benchmarks/linear.py --threads 1
    python benchmarks/linear.py --dtype float32 --rows 1 32 --shapes 512x1024 1024x151936 --streamed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops import backend_named

Layer = Callable[[Tensor], Tensor]

SHAPES = ["512x1024", "512x512", "512x3072", "1536x512", "512x8192", "1024x4096", "2048x1024",
          "1024x6144", "3072x1024"]  # fmt: skip
ROWS = [1, 4, 32, 128, 512, 2048]
CACHES_BYTES = 96 * 2**20
PAUSE_SECONDS = 0.005


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    _native.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    cpu = _native.cpu_info()
    print(f"{options.dtype}, {options.threads} threads, {cpu['isa']}, torch {torch.__version__}")
    print(f"{'K x N':>12} {'T':>5} {'native us':>10} {'GB/s':>6} {'GFLOP/s':>8} {'torch x':>8} "
          f"{'oneDNN x':>8}")  # fmt: skip
    with torch.inference_mode():
        for shape in options.shapes:
            in_features, out_features = map(int, shape.split("x"))
            weight = torch.randn(out_features, in_features).to(dtype)
            copies = -(-CACHES_BYTES // weight.nbytes) if options.streamed else 1
            layers = {
                name: [make(weight.clone()) for _ in range(copies)]
                for name, make in contestants().items()
            }
            for rows in options.rows:
                x = torch.randn(rows, in_features).to(dtype)
                best = race(layers, x, options.seconds)
                print_row(shape, rows, weight, best)


def contestants() -> dict[str, Callable[[Tensor], Layer]]:
    makers: dict[str, Callable[[Tensor], Layer]] = {
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


def race(layers: dict[str, list[Layer]], x: Tensor, seconds: float) -> dict[str, float]:
    """The best seconds per call of each contestant."""
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


def print_row(shape: str, rows: int, weight: Tensor, best: dict[str, float]) -> None:
    native = best["native"]
    onednn = f"{best['onednn'] / native:8.2f}" if "onednn" in best else f"{'-':>8}"
    print(
        f"{shape:>12} {rows:5} {native * 1e6:10.1f} {weight.nbytes / native / 1e9:6.1f} "
        f"{2 * rows * weight.numel() / native / 1e9:8.0f} {best['torch'] / native:8.2f} {onednn}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="T")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--threads", type=int, default=_native.cpu_info()["threads"])
    parser.add_argument("--streamed", action="store_true", help="weights from memory, not caches")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
