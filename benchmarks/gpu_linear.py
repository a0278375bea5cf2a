"""Compares linear layers in 8 and 4 bits on a GPU with cuBLAS in bfloat16.

Printed are microseconds of one call, the ratio to bfloat16's time (`x`; above 1 the layer is
faster), and bytes of weights a second.

    python benchmarks/gpu_linear.py [--shapes 4096x4096 4096x28672] [--rows 1 16 256] [--json PATH]

Each call has a weight of its own, of as many as exceed the caches, as a decode step walks through
its layers. The calls of a walk are a CUDA graph, as they are in a decode step, so the host's time
to launch them isn't counted. The option `--device cpu` tries the script if Triton interprets
kernels (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine_limits import best_gpu_seconds
from torch import Tensor

from aioserve.formats.weights import Code, GroupedRows, PackedLinear
from aioserve.ops.gpu.backend import CudaBackend

SHAPES = ("4096x4096", "4096x28672", "14336x4096")
ROWS = (1, 4, 16, 64, 256, 2048)
CACHES_BYTES = 96 << 20


class Form(NamedTuple):
    bits: int
    group: int
    """Inputs that share a scale; 0: all."""
    has_zeros: bool = False
    rounds: bool = False
    """True if rows become int8, or E4M3."""
    code: Code = "integers"
    alike: int = 1
    """Outputs that share a scale."""


FORMS = {
    "int4/32": Form(4, 32),
    "int4/128+zeros": Form(4, 128, has_zeros=True),
    "int8/128": Form(8, 128),
    "w4a8/128": Form(4, 128, rounds=True),
    "w8a8": Form(8, 0, rounds=True),
    "fp8/128x128": Form(8, 128, code="e4m3", alike=128),
    "fp8, fp8 rows": Form(8, 128, rounds=True, code="e4m3", alike=128),
    "nf4/64": Form(4, 64, code="table"),
}

Layer = Callable[[Tensor], Tensor]


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_linear.py needs a GPU: torch finds none")
    backend = CudaBackend(device)
    caches = CACHES_BYTES if device.type == "cuda" else 0
    found: list[dict[str, Any]] = []
    print(f"{'inputs x outputs':>16} {'rows':>5} {'layer':>15} {'us':>9} {'x':>6} {'GB/s':>6}")
    with torch.inference_mode():
        for shape in options.shapes:
            inputs, outputs = map(int, shape.split("x"))
            layers = {name: copies(make, caches) for name, make in makers(backend, inputs, outputs)}
            for rows in options.rows:
                x = torch.randn(rows, inputs, device=device).to(torch.bfloat16)
                found += measured(layers, x, shape, device)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def makers(
    backend: CudaBackend, inputs: int, outputs: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    yield "bfloat16", lambda: backend.linear(weight)
    for name in FORMS:
        held = random_layer(name, inputs, outputs)
        yield name, lambda held=held: backend.linear(held)


def random_layer(name: str, inputs: int, outputs: int) -> PackedLinear:
    form, random = FORMS[name], np.random.default_rng(0)
    chunk, group = form.group or 128, form.group or inputs
    chunks, groups = -(-inputs // chunk), -(-inputs // group)
    values = random.integers(0, 256, (chunks, outputs, chunk * form.bits // 8), np.uint8)
    if form.code == "e4m3":
        values &= 0xBF  # no NaN
    elif form.bits == 8:
        values = values.view(np.int8)
    run = GroupedRows(
        values,
        np.full((groups, -(-outputs // form.alike)), 0.01, np.float16),
        random.integers(0, 8, (groups, outputs), np.int8) if form.has_zeros else None,
        None,
        None,
        form.bits,
        chunk,
        -(-group // chunk),
        8 if form.bits == 4 and form.code == "integers" else 0,
        form.rounds,
        form.code,
        np.linspace(-1, 1, 16, dtype=np.float32) if form.code == "table" else None,
        form.alike,
    )
    return PackedLinear("bfloat16", inputs, (run,))


def copies(make: Callable[[], Any], caches_bytes: int) -> list[Any]:
    first = make()
    return [first, *(make() for _ in range(caches_bytes // first.num_bytes))]


def measured(
    layers: dict[str, list[Any]], x: Tensor, shape: str, device: torch.device
) -> list[dict[str, Any]]:
    seconds = {name: seconds_of(weights, x, device) for name, weights in layers.items()}
    found = []
    for name, took in seconds.items():
        ratio, rate = seconds["bfloat16"] / took, layers[name][0].num_bytes / took
        print(
            f"{shape:>16} {len(x):5} {name:>15} {took * 1e6:9.1f} {ratio:6.2f} {rate / 1e9:6.0f}",
            flush=True,
        )
        found.append(
            {"shape": shape, "rows": len(x), "layer": name, "seconds": took, "ratio": ratio}
        )
    return found


def seconds_of(weights: list[Layer], x: Tensor, device: torch.device) -> float:
    """Return a call's share of the shortest walk."""
    if device.type == "cuda":
        return best_gpu_seconds(walk(weights, x, device).replay, device) / len(weights)
    began = time.perf_counter()
    weights[0](x)
    return time.perf_counter() - began


def walk(weights: list[Layer], x: Tensor, device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of one call of each."""
    with torch.cuda.device(device):
        weights[0](x)  # compiles, and chooses kernels
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in weights:
                layer(x)
    return graph


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="T")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="a file for the same as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
