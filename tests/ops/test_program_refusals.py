"""Programs refuse values that don't fit when they are recorded, and tensors when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioserve.ops import LayerOps, TensorOps
from aioserve.ops.backend import RMSNorm
from tests.ops.test_native_program import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    NATIVE,
    VOCAB,
    Forward,
    attention,
    cache,
    forward,
    host_batch,
    recorded,
    tensor,
)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    compute = forward([("attention", 0, 0)], LAYERS[torch.float32], 0.0)
    program = recorded(compute, torch.float32)
    kv = cache(torch.float32, 1)
    kv.storage.zero_()
    host = host_batch([3], [2])
    for token_id in (-1, VOCAB):
        host.token_ids[1] = token_id
        batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
        with pytest.raises(IndexError, match=f"from 0 to {VOCAB - 1}, got {token_id}"):
            program.logits(batch, kv)
    host.token_ids[1] = 0
    for other in (cache(torch.bfloat16, 1), cache(torch.float32, 1, heads=2)):
        batch = NATIVE.prepare(host, other, NATIVE.allocate_slots(1))
        with pytest.raises(ValueError, match="pages must have"):
            program.logits(batch, other)
    batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
    with pytest.raises(ValueError, match="was prepared for 1 pages"):
        program.logits(batch, cache(torch.float32, 2))
    assert not kv.storage.any()


def test_what_does_not_fit_is_refused_when_it_is_recorded():
    weights, half = LAYERS[torch.float32], LAYERS[torch.bfloat16]

    def embedded(ops: LayerOps[Any]) -> Any:
        return ops.embed(weights.embedding)

    cases: list[tuple[str, Forward]] = [
        ("weight must be", lambda ops: ops.rms_norm(embedded(ops), RMSNorm(half.weight, 1e-5))),
        (
            f"of {HIDDEN} inputs reads a value of {2 * HIDDEN}",
            lambda ops: ops.linear(ops.linear(embedded(ops), weights.double), weights.square),
        ),
        ("must be float32, of the logit rows", embedded),
        (
            r"must have \(Hq \+ 2\) \* 8 columns, got 8",
            lambda ops: attention(ops, ops.linear(embedded(ops), narrow), False),
        ),
    ]
    narrow = NATIVE.linear(tensor(HEAD_DIM, HIDDEN, dtype=torch.float32))
    for message, compute in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            recorded(compute, torch.float32)


def test_experts_with_scores_that_don_t_fit_are_refused():
    weights = LAYERS[torch.float32]

    def of(scores: Callable[[LayerOps[Any], Any], Any]) -> Forward:
        def compute(ops: LayerOps[Any]) -> Any:
            x = ops.embed(weights.embedding)
            x = ops.experts(x, scores(ops, x), weights.mixture)
            return ops.linear(ops.logit_rows(x), weights.head)

        return compute

    for wrong in (
        lambda ops, x: x,
        lambda ops, x: ops.linear(x, weights.gate),
        lambda ops, x: ops.logit_rows(ops.linear(x, weights.router)),
    ):
        with pytest.raises(ValueError, match="experts must read a value of 24 columns"):
            recorded(of(wrong), torch.float32)

    def scaled(ops: LayerOps[Any]) -> Any:
        x = ops.embed(weights.embedding)
        ops.sigmoid_scale(x, x)
        return ops.linear(ops.logit_rows(x), weights.head)

    with pytest.raises(ValueError, match="scales the rows of a value by a float32 column"):
        recorded(scaled, torch.float32)


def test_what_is_kept_has_a_place():
    host, kv = host_batch([3], [2]), cache(torch.float32, 1)
    batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
    keeping = forward([("tap beside", 0, 0)], LAYERS[torch.float32], 0.0)
    program = recorded(keeping, torch.float32)
    with pytest.raises(ValueError, match="keeps 48 columns of each token"):
        program.logits(batch, kv)
    with pytest.raises(ValueError, match=r"states must be .* of shape \(3, 48\)"):
        program.logits(batch, kv, torch.empty(3, 24))
    with pytest.raises(ValueError, match="states must be a tensor"):
        keeping(TensorOps(NATIVE, batch, kv))
    program = recorded(forward([], LAYERS[torch.float32], 0.0), torch.float32)
    with pytest.raises(ValueError, match=r"states must be .* of shape \(3, 0\)"):
        program.logits(batch, kv, torch.empty(3, 24))
    program = recorded(forward([], LAYERS[torch.float32], 0.0, ["keep"]), torch.float32)
    with pytest.raises(ValueError, match="keeps 48 columns of each logit row"):
        program.logits(batch, kv)
    with pytest.raises(ValueError, match=r"states must be .* of shape \(1, 48\)"):
        program.logits(batch, kv, torch.empty(3, 48))


def test_rows_are_given_to_programs_that_read_them():
    host, kv = host_batch([3], [2]), cache(torch.float32, 1)
    batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
    reading = forward([], LAYERS[torch.float32], 0.0, ["given"])
    program = recorded(reading, torch.float32)
    with pytest.raises(ValueError, match="is given rows of 24 columns"):
        program.logits(batch, kv)
    with pytest.raises(ValueError, match=r"hidden_in must be .* of shape \(3, 24\)"):
        program.logits(batch, kv, None, torch.empty(2, 24))
    for rows in (None, torch.empty(3, 12)):
        with pytest.raises(ValueError, match="hidden_in must be rows of 24 columns"):
            reading(TensorOps(NATIVE, batch, kv, None, rows))
    program = recorded(forward([], LAYERS[torch.float32], 0.0), torch.float32)
    with pytest.raises(ValueError, match=r"hidden_in must be .* of shape \(3, 0\)"):
        program.logits(batch, kv, None, torch.empty(3, 24))


def test_values_that_do_not_go_together_are_refused_when_they_are_recorded():
    weights = LAYERS[torch.float32]
    every = weights.embedding
    cases: list[tuple[str, Callable[[LayerOps[Any], Any, Any], Any]]] = [
        ("keeps values with a row for each token, or", lambda ops, x, row: ops.tap(row, 0)),
        ("of the same rows side by side", lambda ops, x, row: ops.concat(x, row)),
        ("is given rows once", lambda ops, x, row: (ops.hidden_in(3), ops.hidden_in(3))),
        (
            "columns must be",
            lambda ops, x, row: ops.scatter_columns(row, weights.spread[:3], 2 * VOCAB),
        ),
        (
            f"columns must be from 0 to {VOCAB - 1}",
            lambda ops, x, row: ops.scatter_columns(
                ops.linear(row, weights.head), weights.spread, VOCAB
            ),
        ),
    ]
    for message, refused in cases:

        def compute(ops: LayerOps[Any], refused: Any = refused) -> None:
            x = ops.embed(every)
            ops.tap(x, 0)
            refused(ops, x, ops.logit_rows(x))

        with pytest.raises(ValueError, match=message):
            recorded(compute, torch.float32)
    half = LAYERS[torch.bfloat16]

    def spreading(ops: LayerOps[Any]) -> None:
        narrow = ops.linear(ops.embed(half.embedding), half.tied)
        ops.scatter_columns(narrow, half.spread, 2 * VOCAB)

    with pytest.raises(ValueError, match="spreads float32 columns alone"):
        recorded(spreading, torch.bfloat16)
