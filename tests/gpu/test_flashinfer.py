"""FlashInfer's kernels on a GPU compute what Triton's do, and planning doesn't wait."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.scenarios import Heads, lay_out
from tests.parity.tiny_models import CONFIGS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer isn't installed"),
    # Warnings of packages that it imports.
    pytest.mark.filterwarnings("default"),
    # Kernels are compiled at their first use.
    pytest.mark.timeout(1800),
]

DECODES = [(1, 1, 7), (3, 1, 170)]
CHUNKS = [(2, 300, 300), (4, 90, 1023), (6, 1, 33), (8, 129, 129)]


@pytest.fixture(scope="module")
def attention() -> Any:
    from aioserve.ops.gpu.flashinfer_attention import FlashInferAttention, import_flashinfer

    return FlashInferAttention(import_flashinfer(), torch.device("cuda", 0))


def prepared(sequences: list[tuple[int, int, int]], heads: Heads, **options: Any) -> Any:
    from aioserve.ops.gpu.attention_tiles import attention_tiles
    from tests.ops.gpu.prepared import Prepared

    major, minor = torch.cuda.get_device_capability(0)
    scenario = lay_out(sequences, heads, **options)
    tiles = attention_tiles(heads.dim, scenario.q.dtype, 10 * major + minor)
    return Prepared(scenario, torch.device("cuda", 0), tiles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "window", "soft_cap"),
    [
        (Heads(32, 8, 128), 0, 0.0),
        (Heads(14, 2, 64), 0, 0.0),
        (Heads(8, 4, 256), 100, 50.0),
        (Heads(4, 4, 128), 33, 0.0),
        (Heads(8, 4, 256), 0, 50.0),
    ],
    ids=str,
)
def test_it_computes_what_triton_does(
    attention: Any, heads: Heads, window: int, soft_cap: float, dtype: torch.dtype
) -> None:
    from tests.ops.gpu.prepared import assert_close

    how: dict[str, Any] = {"scale": heads.dim**-0.5, "window": window, "soft_cap": soft_cap}
    for page_size in (1, 16, 128):
        for sequences in ([*DECODES, *CHUNKS], CHUNKS[:1], CHUNKS[1:3]):
            step = prepared(sequences, heads, page_size=page_size, dtype=dtype)
            assert_close(step.rows(attention, **how), step.rows(**how))


def test_two_steps_are_planned_behind_a_busy_device_without_waiting_for_it(attention: Any) -> None:
    from tests.ops.gpu.prepared import assert_close

    heads = Heads(32, 8, 128)
    steps = [
        prepared([(name, 40 * name, 50 * name)], heads, dtype=torch.bfloat16)
        for name in range(1, 9)
    ]
    expected = [step.rows() for step in steps]
    kinds: list[dict[str, Any]] = [{}, {"window": 33}]
    for step in steps[:3]:  # compiles and allocates everything
        for kind in kinds:
            step.rows(attention, **kind)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for first in range(0, len(steps), 2):
            torch.cuda._sleep(1_000_000_000)
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = []
                for step in steps[first : first + 2]:
                    got.append(step.rows(attention))
                    step.rows(attention, window=33)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not stream.query(), "planning has waited for the device"
            stream.synchronize()
            for rows, wanted in zip(got, expected[first : first + 2], strict=True):
                assert_close(rows, wanted)


@pytest.mark.asyncio
async def test_an_engine_serves_with_it(tmp_path: Path) -> None:
    from aioserve import Engine, SamplingParams
    from aioserve.testing.random_model import write_random_model

    config = CONFIGS["gemma2"] | {"head_dim": 64}
    path = write_random_model(tmp_path, config, seed=0, dtype="bfloat16")
    engine = Engine(path, device="cuda", attention="flashinfer", num_pages=100)
    async with engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        done = await engine.generate(list(range(3, 60)), params)
        assert len(done.token_ids) == 8
        assert engine.dump()["model"]["attention"]["prompts"] == "flashinfer"
    automatic = Engine(path, device="cuda", num_pages=100)
    async with automatic:
        assert " ms with Triton" in automatic.dump()["model"]["attention"]["why"]
