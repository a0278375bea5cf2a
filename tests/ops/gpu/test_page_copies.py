"""Page copies of the GPU: the op on tensors, and the CUDA kernel compiled for this processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.errors import ConfigError
from aioserve.ops import KVCache
from aioserve.ops.gpu import cupy_module
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.page_copies import THREADS, PageCopies
from tests.ops.contents import by_layer, fill
from tests.ops.scenarios import NATIVE, allocate
from tests.ops.test_kv_cache import Copies, bits_of, copied_by_hand, lists_of_copies, rows
from tests.tiers import examples

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "native" / "cuda" / "page_copies.cu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 3, 4, 8]
"""Dimensions of a head, for copies in words of 2, 4, 8 and 16 bytes."""

Bytes = npt.NDArray[np.uint8]


def numbered(
    num_pages: int, page_size: int, *, start: int, dim: int, dtype: torch.dtype
) -> KVCache:
    """Allocate a cache of two layers with different bits in every number."""
    backend = CudaBackend("cuda" if torch.cuda.is_available() else "cpu")
    cache = allocate(backend, 2, num_pages, page_size, 2, dim, dtype)
    numbers = torch.arange(start, start + cache.storage.numel())
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    fill(cache, numbers.to(bits).view(dtype).view(by_layer(cache).shape))
    return cache


@settings(deadline=None)
@given(drawn=lists_of_copies(), dtype=st.sampled_from(DTYPES), dim=st.sampled_from(WIDTHS))
def test_copies_are_done_one_after_the_other(
    drawn: tuple[int, list[int], Copies], dtype: torch.dtype, dim: int
) -> None:
    page_size, pages, copies = drawn
    caches = [
        numbered(count, page_size, start=3_000 * i, dim=dim, dtype=dtype)
        for i, count in enumerate(pages)
    ]
    expected = copied_by_hand(caches, copies)
    CudaBackend(caches[0].storage.device).copy_pages(caches, rows(copies))
    for cache, storage in zip(caches, expected, strict=True):
        assert torch.equal(bits_of(cache), storage)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        ((0, 5, 0, 0, 1), r"copies\[1\] has source page 5 of 5"),
        ((0, 0, 1, 3, 1), r"copies\[1\] has target page 3 of 3"),
        ((2, 0, 0, 0, 1), r"copies\[1\] has source cache 2 of 2"),
        ((0, 0, 0, 1, 5), r"copies\[1\] has 5 tokens; a page holds 1 to 4"),
    ],
)
def test_a_copy_that_is_impossible_is_refused_before_any_is_done(copy, message) -> None:
    caches = [numbered(n, 4, start=0, dim=3, dtype=torch.float32) for n in (5, 3)]
    before = [bits_of(cache) for cache in caches]
    with pytest.raises(ValueError, match=message):
        PageCopies(caches)(rows([(0, 0, 1, 0, 4), copy]))
    assert all(torch.equal(bits_of(c), b) for c, b in zip(caches, before, strict=True))


def test_caches_and_tables_that_do_not_fit_are_refused_by_name() -> None:
    cache = numbered(5, 4, start=0, dim=3, dtype=torch.float32)
    for other in (
        numbered(5, 4, start=0, dim=4, dtype=torch.float32),
        numbered(5, 8, start=0, dim=3, dtype=torch.float32),
        numbered(5, 4, start=0, dim=3, dtype=torch.float16),
    ):
        with pytest.raises(ValueError, match=r"caches\[1\] must be like caches\[0\]"):
            PageCopies([cache, other])
    with pytest.raises(TypeError, match=r"caches\[1\] must be one that this backend allocated"):
        PageCopies([cache, allocate(NATIVE, 2, 5, 4, 2, 3, torch.float32)])
    one = rows([(0, 0, 0, 1, 1)])
    with pytest.raises(ValueError, match=r"copies must be int32 of shape .*, got int64"):
        PageCopies([cache])(one.astype(np.int64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"copies must be int32 of shape \[N, 5\], got .*\(1, 4\)"):
        PageCopies([cache])(one[:, :4])


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        ConfigError, match=r"pip install 'aioserve\[cuda12\]', or 'aioserve\[cuda13\]'"
    ):
        cupy_module.cupy_module()


def test_the_module_has_the_text_of_the_kernel() -> None:
    assert SOURCE.read_text(encoding="utf-8") == _native.PAGE_COPIES_CU


@pytest.mark.parametrize("target", [80, 90, 100])
def test_nvcc_compiles_the_kernel_without_spills(target: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    done = subprocess.run(
        [
            nvcc,
            f"-arch=sm_{target}",
            "-cubin",
            "-std=c++17",
            "-Werror=all-warnings",
            "-Xptxas=-v",
            "-o",
            tmp_path / "page_copies.cubin",
            SOURCE,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


HOST = r"""
// A block's threads are fibers: each runs up to the next barrier, the last one first.
#include <ucontext.h>

#include <vector>

#define __global__
#define __device__

struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t here, fibers[1024];
static unsigned running;

static void __syncthreads() {
    swapcontext(&fibers[running], &here);
    threadIdx.x = running;
}

#include "%s"

static char* const* storages;
static const Copy* copies;
static long long num_copies, part_bytes, token_bytes;
static bool ended[1024];

static void run_thread() {
    copy_pages(storages, copies, num_copies, part_bytes, token_bytes);
    ended[running] = true;
    for (;;) swapcontext(&fibers[running], &here);
}

extern "C" void launch(unsigned grid, unsigned threads, char* const* given_storages,
                       const Copy* given_copies, long long count, long long bytes_of_part,
                       long long bytes_of_token) {
    storages = given_storages, copies = given_copies, num_copies = count;
    part_bytes = bytes_of_part, token_bytes = bytes_of_token;
    gridDim.x = grid, blockDim.x = threads;
    std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 16));
    for (unsigned block = 0; block < grid; ++block) {
        blockIdx.x = block;
        for (unsigned i = 0; i < threads; ++i) {
            ended[i] = false;
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks[i].data();
            fibers[i].uc_stack.ss_size = stacks[i].size();
            makecontext(&fibers[i], run_thread, 0);
        }
        for (bool some = true; some;) {
            some = false;
            for (unsigned i = threads; i-- > 0;) {
                if (ended[i]) continue;
                running = threadIdx.x = i;
                swapcontext(&here, &fibers[i]);
                some |= !ended[i];
            }
        }
    }
}
"""

Launch = Callable[[list[Bytes], Copies, int, int], None]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Compile the kernel as plain C++, for caches of uint8 [pages, parts, bytes of a part]."""
    folder = tmp_path_factory.mktemp("page_copies")
    (folder / "host.cpp").write_text(HOST % SOURCE, encoding="utf-8")
    library = folder / "host.so"
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-o", library, folder / "host.cpp"],
        check=True,
    )
    call = ctypes.CDLL(str(library)).launch

    def run(caches: list[Bytes], copies: Copies, threads: int, token: int) -> None:
        table = np.array([cache.ctypes.data for cache in caches], np.int64)
        given = rows(copies)
        _, parts, part_bytes = caches[0].shape
        call(
            ctypes.c_uint(parts),
            ctypes.c_uint(threads),
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_void_p(given.ctypes.data),
            *(ctypes.c_longlong(value) for value in (len(copies), part_bytes, token)),
        )

    return run


def aligned(shape: tuple[int, ...], generator: np.random.Generator) -> Bytes:
    size = int(np.prod(shape))
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].reshape(shape)
    array[:] = generator.integers(0, 256, shape, np.uint8)
    return array


def after(caches: list[Bytes], copies: Copies, token_bytes: int) -> list[Bytes]:
    expected = [cache.copy() for cache in caches]
    for source_cache, source, target_cache, target, tokens in copies:
        size = tokens * token_bytes
        moved = expected[source_cache][source, :, :size].copy()
        expected[target_cache][target, :, :size] = moved
    return expected


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drawn=lists_of_copies(),
    token_bytes=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 80]),
    threads=st.sampled_from([1, 3, THREADS]),
    seed=st.integers(0, 99),
)
def test_the_kernel_copies_what_the_model_copies(
    launch: Launch,
    drawn: tuple[int, list[int], Copies],
    token_bytes: int,
    threads: int,
    seed: int,
) -> None:
    page_size, pages, copies = drawn
    generator = np.random.default_rng(seed)
    caches = [aligned((count, 6, page_size * token_bytes), generator) for count in pages]
    expected = after(caches, copies, token_bytes)
    launch(caches, copies, threads, token_bytes)
    for cache, wanted in zip(caches, expected, strict=True):
        assert np.array_equal(cache, wanted)


def test_a_copy_waits_for_all_threads_of_the_one_before(launch: Launch) -> None:
    """The first copy has words of 16 bytes, the second words of 8.

    Two threads of the second read what one thread of the first wrote."""
    caches = [aligned((3, 1, 32), np.random.default_rng(0))]
    copies = [(0, 0, 0, 1, 4), (0, 1, 0, 2, 1), (0, 1, 0, 0, 3)]
    expected = after(caches, copies, 8)
    launch(caches, copies, 8, 8)
    assert np.array_equal(caches[0], expected[0])
