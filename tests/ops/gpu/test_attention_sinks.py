"""Sinks and the log-sum-exp of attention on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.ops.gpu.attention import paged_attention
from aioserve.ops.gpu.attention_tiles import AttentionTiles, Tile
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.gpu.batches import GpuStep, on_gpu
from tests.ops.scenarios import REFERENCE, Heads, Scenario, lay_out, random

SMALL = AttentionTiles(prefill=Tile(32, 16, 4, 1), decode=Tile(16, 16, 4, 1), part_keys=32)
SINKS = {"20": torch.full((6,), 20.0), "-20": torch.full((6,), -20.0), "random": random(6, seed=5)}
HEADS = Heads(6, 2, 32)
DECODES = [(1, 1, 1), (3, 1, 17), (5, 1, 75)]
CHUNKS = [(2, 21, 21), (4, 9, 50)]
every_sink = pytest.mark.parametrize("sinks", SINKS)


def run(
    step: GpuStep,
    sinks: Tensor | None,
    window: int = 0,
    soft_cap: float = 0.0,
    prompts: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention [T, Hq * D], and the log-sum-exp [T, Hq]."""
    kind = AttentionKind(
        0.2, window, soft_cap, None if sinks is None else sinks.to(step.qkv.device)
    )
    sums = torch.full((len(step.qkv), HEADS.q), float("nan"), device=step.qkv.device)
    rows = paged_attention(step.qkv, step.at, kind, tiles=SMALL, prompts=prompts, log_sum_exp=sums)
    return rows.cpu(), sums.cpu()


def check(
    scenario: Scenario, got: tuple[Tensor, Tensor], sinks: Tensor, window: int, soft_cap: float
) -> None:
    step = scenario.on(REFERENCE, wide=True)
    sums = torch.empty(len(step.qkv), HEADS.q)
    kind = AttentionKind(0.2, window, soft_cap, sinks)
    rows = REFERENCE.paged_attention(step.qkv, step.at, kind, log_sum_exp=sums)
    torch.testing.assert_close(got[0].double(), rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], sums, rtol=1e-5, atol=1e-5)


@every_sink
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (21, 0.0), (33, 4.0)])
def test_sinks_take_their_share_of_decodes_and_prompts(
    device: torch.device, window: int, soft_cap: float, sinks: str
) -> None:
    scenario = lay_out([*DECODES, *CHUNKS], HEADS)
    got = run(on_gpu(scenario, device), SINKS[sinks], window, soft_cap)
    check(scenario, got, SINKS[sinks], window, soft_cap)


@every_sink
@pytest.mark.parametrize("window", [0, 21])
def test_a_sink_counts_once_however_a_decode_is_split(
    device: torch.device, window: int, sinks: str
) -> None:
    scenario = lay_out(DECODES, HEADS)
    whole = run(on_gpu(scenario, device), SINKS[sinks], window)
    check(scenario, whole, SINKS[sinks], window, 0.0)
    for splits in (2, 5):
        rows, sums = run(on_gpu(scenario, device, num_splits=splits), SINKS[sinks], window)
        assert torch.equal(rows, whole[0]), splits
        assert torch.equal(sums, whole[1]), splits


def test_a_row_is_the_same_to_the_last_bit_in_any_batch_and_chunk(device: torch.device) -> None:
    whole = run(on_gpu(lay_out([(7, 60, 60)], HEADS), device), SINKS["random"], 21)
    for page_size, chunk, end in [(1, 7, 60), (16, 2, 17), (5, 20, 48)]:
        scenario = lay_out([(3, 1, 17), (7, chunk, end)], HEADS, page_size=page_size)
        got = run(on_gpu(scenario, device), SINKS["random"], 21)
        for rows, expected in zip(got, whole, strict=True):
            assert torch.equal(rows[1:], expected[end - chunk : end])


def test_a_sink_of_nothing_and_the_log_sum_exp_change_no_bit(device: torch.device) -> None:
    nothing = torch.full((6,), float("-inf"))
    for splits, sequences in ((1, [*DECODES, *CHUNKS]), (3, DECODES)):
        step = on_gpu(lay_out(sequences, HEADS), device, num_splits=splits)
        plain = paged_attention(step.qkv, step.at, AttentionKind(0.2), tiles=SMALL).cpu()
        assert torch.equal(run(step, None)[0], plain)
        assert torch.equal(run(step, nothing)[0], plain)


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_without_a_context_stays_0(device: torch.device, splits: int) -> None:
    scenario = lay_out([(1, 1, 70), (2, 1, 1)], HEADS)
    scenario.host.context_lens[1] = 0
    step = on_gpu(scenario, device, num_splits=splits)
    for sinks in (None, SINKS["20"], torch.full((6,), float("-inf"))):
        rows, sums = run(step, sinks)
        assert not rows[1].any()
        assert torch.equal(sums[1], torch.full((6,), float("-inf")) if sinks is None else sinks)


def test_layers_with_sinks_leave_their_prompts_to_triton(device: torch.device) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("knows no sinks")

    scenario = lay_out([*DECODES, *CHUNKS], HEADS)
    got = run(on_gpu(scenario, device), SINKS["20"], prompts=refuse)
    check(scenario, got, SINKS["20"], 0, 0.0)


def test_the_logit_rows_alone_are_those_of_all_rows(device: torch.device) -> None:
    rows = [5, 0, 2, 2, 30]
    scenario = lay_out([*DECODES, *CHUNKS], HEADS)
    host = dataclasses.replace(scenario.host, logit_rows=np.array(rows, np.int64))
    step = on_gpu(dataclasses.replace(scenario, host=host), device)
    backend, at = CudaBackend(device), KVLayer(*step.at)
    kind = AttentionKind(0.2, 0, 0.0, SINKS["random"].to(device))
    all_sums = torch.empty(len(step.qkv), 6, device=device)
    sums = torch.empty(len(rows), 6, device=device)
    whole = backend.paged_attention(step.qkv, at, kind, log_sum_exp=all_sums)
    got = backend.paged_attention(step.qkv, at, kind, logit_rows_only=True, log_sum_exp=sums)
    assert torch.equal(got, whole[rows])
    assert torch.equal(sums, all_sums[rows])
