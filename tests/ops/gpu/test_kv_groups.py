"""Triton's and FlashInfer's kernels on layers that keep only a window."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.flashinfer_attention import FlashInferAttention
from tests.ops.gpu import fake_flashinfer
from tests.ops.grouped_scenes import GroupedScene, grouped_scenes
from tests.tiers import examples


@settings(deadline=None, max_examples=examples(8))
@given(scene=grouped_scenes())
def test_groups_give_the_bits_of_one_group_and_read_nothing_before_a_window(
    scene: GroupedScene,
) -> None:
    backend = CudaBackend("cuda" if torch.cuda.is_available() else "cpu")
    check(scene, backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake computes on the CPU")
@settings(deadline=None, max_examples=examples(8))
@given(scene=grouped_scenes())
def test_plans_of_prompts_name_no_page_before_a_window(scene: GroupedScene) -> None:
    backend = CudaBackend("cpu")
    backend.prompt_attention = FlashInferAttention(fake_flashinfer, torch.device("cpu"))
    # FlashInfer reads whole pages, and gives unseen keys weights of 0.
    check(dataclasses.replace(scene, whole_pages=True), backend)


def check(scene: GroupedScene, backend: CudaBackend) -> None:
    rows, written = scene.attended(backend, grouped=False)
    assert not any(of_layer.isnan().any() for of_layer in rows)
    of_groups, in_groups = scene.attended(backend, grouped=True)
    assert all(map(torch.equal, of_groups, rows))
    assert all(map(torch.equal, in_groups, written))
