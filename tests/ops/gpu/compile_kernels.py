"""Compile the GPU's kernels for cards that aren't present, and show the resources they take.

    python -m tests.ops.gpu.compile_kernels [--targets 80 90 100] [--in-turn] [--only NAME]
        [--json PATH]

prints a line for each kernel and target: registers of a thread, bytes of stack (spilled registers),
and shared memory. Triton compiles without a GPU for a given target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aioserve.ops.gpu.attention_decode import decode_kernel, merge_kernel
from aioserve.ops.gpu.attention_prefill import prefill_kernel
from aioserve.ops.gpu.attention_tiles import attention_tiles, max_parts, padded_dims
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK
from tests.ops.gpu.grouped_builds import grouped_builds
from tests.ops.gpu.latent_builds import latent_builds
from tests.ops.gpu.op_builds import op_builds

TARGETS = (80, 90, 100)
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most bytes of shared memory for one program, by compute capability."""

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
PRODUCTS = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Build(NamedTuple):
    """One compilation of a kernel.

    The `signature` has a type in Triton's spelling for every argument except constants: `*bf16`,
    `i32`. A suffix `:16` means that an integer, or an address in bytes, is a multiple of 16. A
    named tuple has a type for each of its fields.
    """

    function: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    targets: tuple[int, ...] = TARGETS
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.function.__name__} {self.label}".strip()


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one program."""

    kernel: str
    target: int
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    products: tuple[str, ...]
    """Families of its instructions that multiply tiles."""


class Shape(NamedTuple):
    dtype: torch.dtype
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False

    @property
    def label(self) -> str:
        options = [name for name in ("window", "soft_cap", "sinks") if getattr(self, name)]
        size = f"{self.group}x{self.kv_heads}x{self.head_dim}/{self.page_size}"
        return " ".join([str(self.dtype).removeprefix("torch."), size, *options])


SHAPES = (
    Shape(torch.bfloat16, 2, 8, 128, 16),
    Shape(torch.bfloat16, 7, 2, 64, 128, window=True),
    Shape(torch.bfloat16, 8, 8, 64, 16, window=True, sinks=True),
    Shape(torch.float16, 2, 8, 256, 1, window=True, soft_cap=True),
    Shape(torch.float32, 2, 8, 128, 16),
)


def attention_builds(shape: Shape, target: int) -> Iterator[Build]:
    tiles = attention_tiles(shape.head_dim, shape.dtype, target)
    data = POINTERS[shape.dtype] + ":16"
    common = {
        "HEAD_DIM": shape.head_dim,
        "DIMS": padded_dims(shape.head_dim),
        "HAS_WINDOW": shape.window,
        "log_sums": None,
        **({} if shape.sinks else {"sinks": None}),
    }
    sinks = {"sinks": "*fp32:16"} if shape.sinks else {}
    heads = {
        **common,
        "GROUP": shape.group,
        "KV_HEADS": shape.kv_heads,
        "PAGE_SIZE": shape.page_size,
        "HAS_CAP": shape.soft_cap,
        "PRECISION": "ieee" if shape.dtype is torch.float32 else "tf32",
    }
    pages = {"k_pages": data, "v_pages": data, "page_table": "*i32:16", "context_lens": "*i32:16"}
    strides = {"row_stride": "i32:16", "page_stride": "i32:16", "table_stride": "i32"}
    scores = {"window": "i32", "factor": "fp32", "cap": "fp32"}
    tile = tiles.prefill
    yield Build(
        prefill_kernel,
        {
            "qkv": data,
            "out": data,
            **pages,
            "query_start": "*i32:16",
            "query_blocks": "*i32:16",
            **strides,
            **scores,
            **sinks,
        },
        {**heads, "QUERY_BLOCK": QUERY_BLOCK, "ROWS": tile.rows, "KEYS": tile.keys},
        tile.warps,
        tile.stages,
        (target,),
        shape.label,
    )
    tile = tiles.decode
    parts = {
        "KEYS": tile.keys,
        "PART_BLOCKS": triton.cdiv(tiles.part_keys, tile.keys),
        "MAX_PARTS": max_parts(shape.kv_heads),
    }
    for split in (False, True) if shape == SHAPES[0] else (not shape.sinks,):
        left = "*fp32:16" if split else data
        yield Build(
            decode_kernel,
            {
                "qkv": data,
                "out": data,
                "partials": left,
                "sums": left,
                **pages,
                **strides,
                "capacity": "i32",
                **scores,
                **sinks,
            },
            {**heads, **parts, "SPLIT": split, "ROWS": tile.rows},
            tile.warps,
            tile.stages,
            (target,),
            f"{shape.label} split" if split else shape.label,
        )
    if shape != SHAPES[0]:
        return
    yield Build(
        merge_kernel,
        {
            "out": data,
            "partials": "*fp32:16",
            "sums": "*fp32:16",
            "context_lens": "*i32:16",
            "capacity": "i32",
            "window": "i32",
        },
        {**common, **parts, "QUERY_HEADS": shape.group * shape.kv_heads, "AT_ONCE": 8},
        tile.warps,
        1,
        (target,),
        shape.label,
    )


KERNELS: list[Build] = [
    build for shape in SHAPES for target in TARGETS for build in attention_builds(shape, target)
]
KERNELS += [
    Build(function, types, constants, warps, num_stages=3, label=label)
    for function, types, constants, warps, label in op_builds()
]
KERNELS += [Build(*build[:6], f"latent {build[6]}") for build in latent_builds(TARGETS)]
KERNELS += [
    Build(*build[:5], build.targets, f"grouped {build.label}".strip()) for build in grouped_builds()
]


def compiled(build: Build, target: int) -> Any:
    """Compile with Triton. The result's machine code is `asm["cubin"]`."""
    types: dict[str, Any] = dict.fromkeys(build.constexprs, "constexpr")
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = build.function.arg_names

    def type_of(described: Any, path: tuple[int, ...]) -> Any:
        if isinstance(described, tuple):
            fields = [type_of(field, (*path, i)) for i, field in enumerate(described)]
            return type(described)(*fields)
        type_name, _, multiple = described.partition(":")
        if multiple:
            attributes[path] = [["tt.divisibility", int(multiple)]]
        return type_name

    for name, described in build.signature.items():
        types[name] = type_of(described, (names.index(name),))
    source = ASTSource(
        build.function,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in build.constexprs.items()},
        attributes,
    )
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def resources(build: Build, target: int) -> Resources:
    kernel = compiled(build, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run(
            [BINARIES / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", shown)}
    return Resources(
        kernel=build.name,
        target=target,
        warps=kernel.metadata.num_warps,
        registers=used["REG"],
        stack_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        products=tuple(sorted(set(PRODUCTS.findall(kernel.asm["ptx"])))),
    )


def in_turn(jobs: Sequence[tuple[Build, int]]) -> list[tuple[Build, int]]:
    """Choose one target for each kernel, in turn."""
    by_name: dict[str, list[tuple[Build, int]]] = {}
    for build, target in jobs:
        by_name.setdefault(build.name, []).append((build, target))
    return [of_one[i % len(of_one)] for i, of_one in enumerate(by_name.values())]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument(
        "--in-turn", action="store_true", help="each kernel for one of the targets, in turn"
    )
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--json", type=Path, help="a file for the same as JSON")
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set, so there is nothing to compile")
    jobs = [
        (build, target)
        for build in KERNELS
        for target in build.targets
        if target in chosen.targets and chosen.only in build.name
    ]
    if chosen.in_turn:
        jobs = in_turn(jobs)
    found = []
    print(f"{'kernel':60} target  warps  registers  stack  shared")
    with ThreadPoolExecutor(2) as pool:
        for one in pool.map(lambda job: resources(*job), jobs):
            found.append(asdict(one))
            print(
                f"{one.kernel:60} {f'sm_{one.target}':6} {one.warps:6} {one.registers:10} "
                f"{one.stack_bytes:6} {one.shared_bytes:7}",
                flush=True,
            )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
