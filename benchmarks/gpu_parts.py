"""Parts of `gpu.py`, each of which measures something.

They run in a process that `gpu.py` starts, several one after the other, and write a line of JSON
for each to a file. A part that fails ends the process: a device may compute nothing more after an
error, so the next part gets a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_engine import WatchedEngine, watched_engine
from gpu_peers import PEERS, MissingPeerError, Setup, measure_peer
from gpu_workloads import SCALES, Request, Scale, model_directory, vocab_size_of
from machine_limits import Limits, cost_of, measure_gpu_limits, measure_limits

from aioserve.cli.doctor import everything
from aioserve.execution.runner import ModelSource
from aioserve.simulation.roofline import RooflineCost

__all__ = ["PARTS", "Bench", "run_parts"]

ONLINE_LOADS = (0.5, 0.8)
"""Shares of the requests a second that the offline test has reached."""


@dataclass
class Bench:
    """State that parts share in one process: options, and the engine that the last one has left."""

    device: str
    dtype: str
    scale: Scale
    folder: Path
    """Folder of models with random weights."""
    repeats: int
    rate: float | None
    """Requests a second of the online run; None: taken from the offline test."""
    engine_options: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    """Results of the parts that have been measured."""
    source_of: Callable[[Path], ModelSource | None] = lambda path: None
    """Source by which an engine loads a model; None: the usual one."""

    def __post_init__(self) -> None:
        self._stack = AsyncExitStack()
        self._open: tuple[str, dict[str, Any]] | None = None
        self._engine: WatchedEngine | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def model(self, shape: str) -> Path:
        drawn_by = self.device if self.is_gpu else "cpu"
        return model_directory(self.folder, shape, self.dtype, drawn_by)

    def cost(self, path: Path) -> RooflineCost | None:
        """Return a cost model; None without the limits of the card."""
        found = self.results.get("card")
        if found is None:
            return None
        return cost_of(str(path), getattr(torch, self.dtype), Limits(**found["limits"]))

    async def engine(self, shape: str, **options: Any) -> WatchedEngine:
        """Return a warm engine with that model; the open one, if it has the same model and
        options.
        """
        wanted = shape, options
        if self._engine is None or self._open != wanted:
            await self.aclose()
            path = self.model(shape)
            every = {
                "device": self.device,
                "dtype": self.dtype,
                "max_model_len": self.scale.max_model_len,
                "max_num_seqs": 256,
                "max_waiting": 65_536,
                **self.engine_options,
                **options,
            }
            self._engine = await self._stack.enter_async_context(
                watched_engine(path, self.cost(path), self.source_of(path), **every)
            )
            self._open = wanted
            # Kernels are compiled and chosen here.
            await self._engine.run(self.scale.warm_up(self._engine.vocab_size))
        return self._engine

    async def aclose(self) -> None:
        await self._stack.aclose()
        self._engine = self._open = None
        gc.collect()  # frees device memory of objects in cycles, which the next engine needs


# -- the parts


async def card(bench: Bench) -> dict[str, Any]:
    """Measure the limits of the machine."""
    dtype = getattr(torch, bench.dtype)
    if bench.is_gpu:
        limits = measure_gpu_limits(dtype, torch.device(bench.device))
    elif bench.scale.shape == "tiny":
        limits = measure_limits(dtype, seconds=0, read_mib=16)
    else:
        limits = measure_limits(dtype)
    return {"limits": vars(limits), "machine": everything()}


async def offline(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    engine = await bench.engine(scale.shape)
    return await repeated(bench, engine, lambda seed: scale.offline(engine.vocab_size, seed))


async def single(bench: Bench) -> dict[str, Any]:
    engine = await bench.engine(bench.scale.shape)
    return await repeated(bench, engine, lambda seed: bench.scale.single(engine.vocab_size, seed))


async def prefill(bench: Bench) -> dict[str, Any]:
    engine = await bench.engine(bench.scale.shape)
    return await repeated(bench, engine, lambda seed: bench.scale.long(engine.vocab_size, seed))


async def online(bench: Bench) -> dict[str, Any]:
    engine = await bench.engine(bench.scale.shape)
    rates = {"given": bench.rate}
    if bench.rate is None:
        found = bench.results.get("offline")
        if found is None:
            raise ValueError("online needs the part offline before it, or --rate")
        reached = found["best"]["throughput"]["requests_per_second"]
        rates = {f"{load:.0%} of offline": load * reached for load in ONLINE_LOADS}
    runs = {}
    for seed, (name, rate) in enumerate(rates.items()):
        requests = bench.scale.online(engine.vocab_size, seed, float(rate or 0))
        runs[name] = {"requests_per_second": rate, **await engine.run(requests)}
    return {"runs": runs}


async def prefix(bench: Bench) -> dict[str, Any]:
    """Measure prompts that begin alike, and as long ones that don't."""
    engine = await bench.engine(bench.scale.shape)
    runs = {
        "alike": await engine.run(bench.scale.prefixed(engine.vocab_size, 0, shared=True)),
        "distinct": await engine.run(bench.scale.prefixed(engine.vocab_size, 0, shared=False)),
    }
    return {"runs": runs, "ratio": runs["distinct"]["seconds"] / runs["alike"]["seconds"]}


async def eager(bench: Bench) -> dict[str, Any]:
    """Measure one stream without graphs."""
    options = {"graph_sizes": ()} if bench.is_gpu else {}
    engine = await bench.engine(bench.scale.shape, **options)
    return await repeated(bench, engine, lambda seed: bench.scale.single(engine.vocab_size, seed))


async def large_single(bench: Bench) -> dict[str, Any]:
    engine = await bench.engine(bench.scale.large_shape)
    return await repeated(bench, engine, lambda seed: bench.scale.single(engine.vocab_size, seed))


async def large_offline(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    engine = await bench.engine(scale.large_shape)

    def requests(seed: int) -> list[Request]:
        return scale.offline(engine.vocab_size, seed, scale.large_requests)

    return await repeated(bench, engine, requests)


def peer(bench: Bench, name: str) -> dict[str, Any]:
    """Run the offline test and one stream on another engine."""
    scale, path = bench.scale, bench.model(bench.scale.shape)
    vocab_size = vocab_size_of(scale.shape)
    workloads = {
        "offline": [scale.offline(vocab_size, seed) for seed in range(bench.repeats)],
        "single": [scale.single(vocab_size, seed) for seed in range(bench.repeats)],
    }
    warm_up = scale.warm_up(vocab_size)
    every = [r for runs in workloads.values() for requests in runs for r in requests] + warm_up
    setup = Setup(
        path=path,
        dtype=bench.dtype,
        device=bench.device,
        max_model_len=scale.max_model_len,
        longest_prompt=max(len(request.prompt) for request in every),
        longest_answer=max(request.output_tokens for request in every),
        most_requests=scale.requests,
    )
    return measure_peer(name, setup, workloads, warm_up)


async def repeated(
    bench: Bench, engine: WatchedEngine, requests: Callable[[int], list[Request]]
) -> dict[str, Any]:
    """Return runs of requests that differ in their seeds, so that none finds another's prefixes."""
    runs = [await engine.run(requests(seed)) for seed in range(bench.repeats)]
    model = engine.engine.dump()["model"]
    return {
        "best": min(runs, key=lambda run: run["seconds"]),
        "all_seconds": [run["seconds"] for run in runs],
        "engine": {"loading_seconds": model["loading_seconds"]}
        | {name: model[name] for name in ("device", "dtype", "kv_cache_bytes")},
    }


PARTS: dict[str, Callable[[Bench], Awaitable[dict[str, Any]]]] = {
    "card": card,
    "offline": offline,
    "single": single,
    "prefill": prefill,
    "prefix": prefix,
    "single-eager": eager,
    "online": online,
    "8b-single": large_single,
    "8b-offline": large_offline,
}


async def run_parts(bench: Bench, names: list[str], report: Path) -> None:
    try:
        for name in names:
            began = time.perf_counter()
            try:
                bench.results[name] = await PARTS[name](bench)
            except Exception as error:
                traceback.print_exc()
                write(report, name, began, "failed", f"{type(error).__name__}: {error}")
                return
            write(report, name, began, "ok", bench.results[name])
    finally:
        await bench.aclose()


def run_peer(bench: Bench, name: str, report: Path) -> None:
    """Run it outside any event loop, on the main thread: engines have loops and signal handlers."""
    began = time.perf_counter()
    try:
        write(report, name, began, "ok", peer(bench, name))
    except MissingPeerError as error:
        write(report, name, began, "missing", str(error))
    except Exception as error:
        traceback.print_exc()
        write(report, name, began, "failed", f"{type(error).__name__}: {error}")


def write(report: Path, part: str, began: float, status: str, found: Any) -> None:
    entry = {"part": part, "status": status, "seconds": time.perf_counter() - began}
    entry["result" if status == "ok" else "error"] = found
    with report.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by gpu.py.")
    parser.add_argument("settings", help="JSON")
    settings = json.loads(parser.parse_args().settings)
    names, report = settings.pop("parts"), Path(settings.pop("report"))
    settings["scale"] = SCALES[settings["scale"]]
    settings["folder"] = Path(settings["folder"])
    bench = Bench(**settings)
    if names[0] in PEERS:
        run_peer(bench, names[0], report)
    else:
        asyncio.run(run_parts(bench, names, report))


if __name__ == "__main__":
    main()
