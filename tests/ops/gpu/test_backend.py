"""The backend as a whole: accepted and refused sizes, and tiny decoders on it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.models.loader import load_model
from aioserve.ops import Backend, KVShape, Linear
from aioserve.ops.gpu.backend import CudaBackend, GpuLinear
from aioserve.ops.native_types import NativeLinear
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, WorkItem
from tests.ops.contents import by_layer, contents, fill
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.scenarios import REFERENCE, Heads, allocate, lay_out, one_group, random
from tests.parity import tiny_models
from tests.parity.paged import PagedRun
from tests.parity.planned import PlannedRun, item
from tests.parity.tiny_models import VOCAB_SIZE

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES = ["qwen3", "gemma2"]
"""Models with head norms, soft caps, windows, gelu, and norms whose weights have an offset."""


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_models.write(name, root / name) for name in [*FAMILIES, "gpt2"]}


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def test_devices_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="the backend cuda needs a CUDA device, got meta"):
        CudaBackend("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds none for cuda"):
            CudaBackend("cuda")
    else:
        with pytest.raises(ConfigError, match="cuda:99: torch finds"):
            CudaBackend("cuda:99")


@pytest.mark.more
def test_the_cpu_is_refused_where_nothing_interprets() -> None:
    program = (
        "from aioserve.ops.gpu.backend import CudaBackend, GpuLinear\n"
        "from aioserve.errors import ConfigError\n"
        "try:\n    CudaBackend('cpu')\n"
        "except ConfigError as error:\n    print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "set TRITON_INTERPRET=1 before anything imports Triton" in done.stdout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_agree(backend: CudaBackend, dtype: torch.dtype, bias: bool) -> None:
    x, weight = random(5, 40, dtype=dtype), random(24, 40, dtype=dtype, seed=1)
    added = random(24, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for out_dtype in (None, torch.float32):
        layer = backend.linear(weight, added, out_dtype=out_dtype)
        y = layer(backend.place(x))
        assert y.dtype == (out_dtype or dtype)
        torch.testing.assert_close(y.cpu().double(), exact, rtol=tolerance, atol=4 * tolerance)
    ids = backend.place(torch.tensor([3, 0, 23, 3]))
    assert torch.equal(layer.rows(ids).cpu(), weight[[3, 0, 23, 3]])


def test_which_dtypes_a_weight_may_have_is_said_by_each_kind_of_layer(backend: Backend) -> None:
    wrong = random(3, 4).double()
    with pytest.raises(TypeError, match="weight must be float32 or bfloat16 or float16, got"):
        backend.linear(wrong)
    with pytest.raises(TypeError, match=r"weight must be float32 or bfloat16, got torch.float16"):
        NativeLinear(wrong.half())
    assert torch.float16 not in Linear.dtypes
    assert torch.float16 in GpuLinear.dtypes
    with pytest.raises(TypeError, match="ids must be int64"):
        backend.linear(random(3, 4)).rows(torch.zeros(1, dtype=torch.int32))


def test_kv_pages_are_refused_where_kernels_have_none(backend: CudaBackend) -> None:
    with pytest.raises(TypeError, match="dtype must be float32, bfloat16 or float16"):
        allocate(backend, 1, 1, 16, 1, 16, torch.float64)
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 257"):
        allocate(backend, 1, 1, 16, 1, 257, torch.float32)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        allocate(backend, 1, 0, 16, 1, 16, torch.float32)


def test_pages_of_the_host_are_copied_to_and_from(backend: CudaBackend) -> None:
    cache = allocate(backend, 2, 3, 4, 2, 8, torch.float16)
    host = backend.allocate_host_kv(KVShape(one_group(2, 2, 8, torch.float16), 5, 4))
    assert host.storage.is_cpu
    fill(cache, random(*by_layer(cache).shape, dtype=torch.float16))
    host.storage.zero_()
    page = contents(cache)[:, :, 2]
    backend.copy_pages([cache, host], np.array([(0, 2, 1, 4, 4), (1, 4, 0, 0, 3)], np.int32))
    assert torch.equal(host.storage[4], page.cpu())
    assert torch.equal(contents(cache)[:, :, 0, :, :3], page[:, :, :, :3])


def test_pending_tokens_are_those_of_their_slots_and_the_host_arrays_stay(
    backend: CudaBackend,
) -> None:
    scenario = lay_out([(1, 2, 40), (2, 1, 3)], Heads(2, 1, 16))
    host = dataclasses.replace(
        scenario.host,
        token_ids=np.array([5, -1, -1]),
        pending_rows=np.array([1, 2]),
        pending_slots=np.array([3, 0]),
    )
    kv = allocate(backend, 1, scenario.num_pages, 16, 1, 16, torch.float32)
    last_tokens = backend.allocate_slots(4)
    last_tokens[:] = torch.arange(70, 74)
    batch = backend.prepare(host, kv, last_tokens)
    assert batch.token_ids.tolist() == [5, 73, 70]
    assert host.token_ids.tolist() == [5, -1, -1]
    assert batch.end_position == 40


def test_arrays_that_contradict_each_other_are_refused(backend: CudaBackend) -> None:
    scenario = lay_out([(1, 2, 40), (2, 1, 3)], Heads(2, 1, 16))
    kv = allocate(backend, 1, 2, 16, 1, 16, torch.float32)
    with pytest.raises(ValueError, match=r"batch: sequence 0 names page \d of 2"):
        backend.prepare(scenario.host, kv, backend.allocate_slots(1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*FAMILIES, "gpt2"])
def test_a_decoder_gives_the_logits_of_the_reference(
    backend: CudaBackend, directories: dict[str, Path], name: str
) -> None:
    prompts = {"a": prompt(13, 1), "b": prompt(3, 2), "c": prompt(1, 3)}
    runs = [PagedRun(load_model(directories[name], backend=each)) for each in (backend, REFERENCE)]
    for chunks in (prompts, {"c": [5], "b": [9], "a": [6, 7, 8]}, {"b": [3]}):
        got, expected = (run.step(chunks) for run in runs)
        for key in chunks:
            torch.testing.assert_close(got[key].cpu(), expected[key], rtol=1e-4, atol=1e-4)
    got, expected = (run.rows({"a": [3, 1], "b": [4]}, [2, 0]) for run in runs)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_in_bfloat16_stays_near_float32(
    backend: CudaBackend, directories: dict[str, Path]
) -> None:
    chunks = {"a": prompt(20, 1)}
    narrow = load_model(directories["qwen3"], backend=backend, dtype="bfloat16")
    logits = PagedRun(narrow).step(chunks)["a"].cpu()
    exact = PagedRun(load_model(directories["qwen3"], backend=REFERENCE)).step(chunks)["a"]
    error = (logits - exact).square().mean().sqrt() / exact.std()
    assert error.item() < 0.06


@pytest.mark.parametrize("name", FAMILIES)
def test_a_runner_decodes_what_it_sampled_through_slots_and_copied_pages(
    backend: CudaBackend, directories: dict[str, Path], name: str
) -> None:
    """There are two prompts, decodes of pending tokens, a fork, and pages to the host and back."""

    async def run(on: Backend) -> list[torch.Tensor]:
        found = []
        decoder = load_model(directories[name], backend=on)
        groups = range(decoder.layout.num_groups)
        assert len(groups) == (3 if name == "gemma2" else 1)

        def placed(slot: int, start: int, token_ids: list[int], pages: list[int]) -> WorkItem:
            """Make an item. `pages` are those of group 0; each later group has them 64 further."""
            ids = [page + 64 * group for page in pages for group in groups]
            return item(slot, start, token_ids, ids)

        def copies(
            from_tier: int, source: int, to_tier: int, target: int, num_tokens: int
        ) -> list[PageCopy]:
            return [
                PageCopy(from_tier, source + 64 * group, to_tier, target + 64 * group, num_tokens)
                for group in groups
            ]

        async with PlannedRun(decoder, 4) as planned:
            a, b = prompt(9, 5), prompt(4, 6)
            pages_a, pages_b = [3, 7, 1, 9], [4, 2, 8]
            found.append(await planned.step([placed(0, 0, a, pages_a), placed(1, 0, b, pages_b)]))
            for i in range(2):
                decodes = [
                    placed(0, 9 + i, [PENDING_TOKEN], pages_a),
                    placed(1, 4 + i, [PENDING_TOKEN], pages_b),
                ]
                found.append(await planned.step(decodes))
            # Position 11 of the fork is in page 20, which begins as a copy of page 1.
            fork = copies(0, 1, 0, 20, 3)
            out = copies(0, 4, 1, 0, 4)
            back = copies(1, 0, 0, 30, 4)
            items = [
                placed(0, 11, [PENDING_TOKEN], pages_a),
                placed(2, 11, [11], [3, 7, 20, 21]),
                placed(1, 6, [PENDING_TOKEN], [30, 2, 8]),
            ]
            found.append(await planned.step(items, [*fork, *out, *back]))
        return found

    got, expected = asyncio.run(run(backend)), asyncio.run(run(REFERENCE))
    for logits, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(logits.cpu(), wanted, rtol=1e-4, atol=1e-4)
