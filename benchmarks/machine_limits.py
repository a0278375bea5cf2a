"""Measures the limits of this machine: how fast it reads memory and multiplies matrices.

On a CPU all threads of the pool read memory that no cache holds, and this package's kernels and
torch's take turns with large products. On a GPU torch copies and sums up arrays many times as large
as its cache, and multiplies matrices, by the device's own clock. The best counts each time: a limit
is what the machine can do, and other work only makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch

from aioserve import _native
from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ModelShape
from aioserve.execution.process_memory import total_memory_bytes
from aioserve.models.files import model_files
from aioserve.ops import backend_named
from aioserve.ops.kv_cache import format_of_floats
from aioserve.simulation.roofline import RooflineCost

READ_MIB = 1024
"""Many times the caches of a processor."""
READ_PASSES = 15
PRODUCTS = ((512, 2048, 2048), (2048, 2048, 2048), (1024, 4096, 4096))
"""Rows, inputs and outputs."""
PRODUCT_SECONDS = 1.0

GPU_READ_MIB = 4096
"""Many times the cache of a GPU."""
GPU_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336))
GPU_REPEATS = 20


@dataclass(frozen=True)
class Limits:
    """Limits of one dtype on this machine."""

    bytes_per_second: float
    flops_per_second: float
    fastest_product: str
    """Name of the kernel and sizes of the product."""
    fastest_read: str = "sum of all threads"
    memory_bytes: int = 0
    """Memory of the device; 0: all that the machine has."""

    def hardware(self) -> Hardware:
        """Return the measured limits as hardware for a roofline, and nothing else."""
        return Hardware(
            "this machine",
            self.flops_per_second,
            self.bytes_per_second,
            self.memory_bytes or total_memory_bytes(),
            step_seconds=0.0,
            compute_efficiency=1.0,
            bandwidth_efficiency=1.0,
        )


def cost_of(model: str, dtype: torch.dtype, limits: Limits) -> RooflineCost:
    """Return the cost of steps of the model in this directory, at the limits."""
    shape = ModelShape.of(model_files(model).config())
    shape = msgspec.structs.replace(
        shape, bytes_per_value=dtype.itemsize, kv_format=format_of_floats(dtype)
    )
    return RooflineCost(shape, limits.hardware())


# -- a CPU


def measure_limits(
    dtype: torch.dtype, seconds: float = PRODUCT_SECONDS, read_mib: int = READ_MIB
) -> Limits:
    """Measure the rates of all threads of the pool together.

    Each product takes `seconds`.
    """
    passes = _native.read_seconds(read_mib << 20, READ_PASSES)
    rates = {
        f"{name}, {rows} x {inputs} x {outputs}": rate
        for rows, inputs, outputs in PRODUCTS
        for name, rate in product_rates(dtype, rows, inputs, outputs, seconds).items()
    }
    fastest = max(rates, key=lambda name: rates[name])
    return Limits((read_mib << 20) / min(passes), rates[fastest], fastest)


def product_rates(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, seconds: float
) -> dict[str, float]:
    """Return operations a second of [rows, inputs] times [inputs, outputs], by kernel.

    The kernels take turns, and the best turn counts.
    """
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    layers = {
        "native": backend_named("native").linear(weight),
        "torch": backend_named("reference").linear(weight),
    }
    best = dict.fromkeys(layers, float("inf"))
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end or float("inf") in best.values():
            for name, layer in layers.items():
                began = time.perf_counter()
                layer(x)
                best[name] = min(best[name], time.perf_counter() - began)
    return {name: 2 * rows * inputs * outputs / took for name, took in best.items()}


# -- a GPU


def measure_gpu_limits(
    dtype: torch.dtype, device: torch.device, read_mib: int = GPU_READ_MIB
) -> Limits:
    """Measure the rates of torch's kernels on a CUDA device.

    It takes twice `read_mib` of the device's memory.
    """
    return gpu_limits(
        dtype,
        device,
        lambda work: best_gpu_seconds(work, device),
        read_mib=read_mib,
        products=GPU_PRODUCTS,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
    )


def gpu_limits(
    dtype: torch.dtype,
    device: torch.device,
    best_seconds: Callable[[Callable[[], object]], float],
    *,
    read_mib: int,
    products: tuple[tuple[int, int, int], ...],
    memory_bytes: int,
) -> Limits:
    """Measure limits, where `best_seconds` returns the time of a piece of work on the device."""
    reads = read_rates(device, best_seconds, read_mib << 20)
    rates = {}
    for rows, inputs, outputs in products:
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        out = torch.empty(rows, outputs, device=device, dtype=dtype)
        seconds = best_seconds(lambda x=x, w=weight, out=out: torch.mm(x, w.T, out=out))
        rates[f"torch, {rows} x {inputs} x {outputs}"] = 2 * rows * inputs * outputs / seconds
    read, product = (max(found, key=lambda name: found[name]) for found in (reads, rates))
    return Limits(reads[read], rates[product], product, read, memory_bytes)


def read_rates(
    device: torch.device, best_seconds: Callable[[Callable[[], object]], float], num_bytes: int
) -> dict[str, float]:
    """Return bytes a second, by operation."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return {
        # A copy reads and writes.
        "copy": 2 * num_bytes / best_seconds(lambda: target.copy_(source)),
        "sum": num_bytes / best_seconds(lambda: torch.sum(source)),
    }


def best_gpu_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the best of `GPU_REPEATS` times, after some to warm up."""
    with torch.cuda.device(device):
        for _ in range(3):
            work()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(GPU_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
    return min(before.elapsed_time(after) for before, after in pairwise(events)) / 1000
