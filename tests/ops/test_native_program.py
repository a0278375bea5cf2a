"""Recorded programs give the same bits as their ops, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.formats.routing import Routing
from aioserve.ops import HostBatch, KVShape, LayerOps, SampleRows, TensorOps
from aioserve.ops.backend import AttentionKind, LayerNorm, RMSNorm
from aioserve.ops.batch import NOTHING_LEFT
from aioserve.ops.experts import Mixture
from aioserve.ops.native import NativeBackend
from aioserve.ops.native_grouped import joined_linear
from aioserve.ops.native_program import NativeProgram
from aioserve.ops.native_types import NativeLinear
from aioserve.sampling.edits import leave_out
from aioserve.sampling_params import DRAWN_FREELY
from tests.ops.grouped_integers import random_integers
from tests.ops.scenarios import one_group
from tests.tiers import examples

HIDDEN, VOCAB, HEAD_DIM, KV_HEADS = 24, 40, 8, 1
Forward = Callable[[LayerOps[Any]], Any]
NATIVE = NativeBackend()


def tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


class Layers:
    """Weights of one dtype, for every op."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.embedding = tensor(VOCAB, HIDDEN, dtype=dtype)
        self.positions = tensor(64, HIDDEN, dtype=dtype)
        self.weight, self.bias = tensor(HIDDEN, dtype=dtype), tensor(HIDDEN, dtype=dtype, seed=1)
        self.square = NATIVE.linear(tensor(HIDDEN, HIDDEN, dtype=dtype) / 5)
        self.double = NATIVE.linear(tensor(2 * HIDDEN, HIDDEN, dtype=dtype) / 5)
        self.both = NATIVE.linear(tensor(HIDDEN, 2 * HIDDEN, dtype=dtype) / 7)
        self.spread = torch.randperm(2 * VOCAB, generator=torch.Generator().manual_seed(3))[:VOCAB]
        self.qkv = NATIVE.linear(tensor(5 * HEAD_DIM, HIDDEN, dtype=dtype) / 5)
        self.head = NATIVE.linear(tensor(VOCAB, HIDDEN, dtype=dtype), out_dtype=torch.float32)
        self.tied = NATIVE.linear(tensor(VOCAB, HIDDEN, dtype=dtype))
        self.integers = random_integers(HIDDEN, HIDDEN, 16, 4, True).weight(dtype).linear()
        bytes_, floats = random_integers(10, HIDDEN, 32, 8, False), tensor(14, HIDDEN, dtype=dtype)
        parts = [bytes_.weight(dtype).linear(), NATIVE.linear(floats / 5)]
        self.joined = joined_linear(parts)
        self.gate = NATIVE.linear(tensor(1, HIDDEN, dtype=dtype), out_dtype=torch.float32)
        self.router = NATIVE.linear(tensor(5, HIDDEN, dtype=dtype) / 5, out_dtype=torch.float32)
        self.mixture = mixture(dtype, self.double)
        self.tied_integers = random_integers(VOCAB, HIDDEN, 16, 8, False).weight(dtype).linear()


def mixture(dtype: torch.dtype, first: NativeLinear) -> Mixture:
    """Make five experts, one with integers, of which a row has two."""
    ups = [NATIVE.linear(tensor(2 * HIDDEN, HIDDEN, dtype=dtype, seed=i) / 5) for i in range(4)]
    integers = random_integers(HIDDEN, HIDDEN, 16, 4, True).weight(dtype).linear(torch.float32)
    downs = [
        NATIVE.linear(tensor(HIDDEN, HIDDEN, dtype=dtype, seed=i) / 5, out_dtype=torch.float32)
        for i in range(4)
    ]
    routing = Routing(experts=5, top_k=2, normalized=True)
    return NATIVE.mixture(routing, [first, *ups], [*downs, integers])


LAYERS = {dtype: Layers(dtype) for dtype in (torch.float32, torch.bfloat16)}
# Each op is given two values, and most use only the first.
OPS: dict[str, Callable[[LayerOps[Any], Layers, Any, Any], Any]] = {
    "linear": lambda ops, w, x, _: ops.linear(x, w.square),
    "integers": lambda ops, w, x, _: ops.linear(x, w.integers),
    "joined": lambda ops, w, x, _: ops.linear(x, w.joined),
    "rms": lambda ops, w, x, _: ops.rms_norm(x, RMSNorm(w.weight, 1e-5)),
    "offset rms": lambda ops, w, x, _: ops.rms_norm(x, RMSNorm(w.weight, 1e-5, 1.0)),
    "add rms": lambda ops, w, x, y: ops.rms_norm(x, RMSNorm(w.weight, 1e-5), y),
    "layer norm": lambda ops, w, x, _: ops.layer_norm(x, LayerNorm(w.weight, w.bias, 1e-5)),
    "add layer norm": lambda ops, w, x, y: ops.layer_norm(x, LayerNorm(w.weight, None, 1e-5), y),
    "silu": lambda ops, w, x, _: ops.gated(ops.linear(x, w.double), gelu=False),
    "gelu gate": lambda ops, w, x, _: ops.gated(ops.linear(x, w.double), gelu=True),
    "gelu": lambda ops, w, x, _: ops.activated(x, "gelu_tanh"),
    "gelu by erf": lambda ops, w, x, _: ops.activated(x, "gelu"),
    "relu squared": lambda ops, w, x, _: ops.activated(x, "relu_squared"),
    "norm columns": lambda ops, w, x, _: ops.norm_columns(x, RMSNorm(w.weight[:10], 1e-5, 1.0), 3),
    "add value": lambda ops, w, x, y: ops.add(x, y),
    "scale": lambda ops, w, x, _: ops.scale(x, 0.5),
    "experts": lambda ops, w, x, _: ops.experts(x, ops.linear(x, w.router), w.mixture),
    "experts of others": lambda ops, w, x, y: ops.experts(x, ops.linear(y, w.router), w.mixture),
    "sigmoid scale": lambda ops, w, x, _: ops.sigmoid_scale(x, ops.linear(x, w.gate)),
    "positions": lambda ops, w, x, _: ops.add_positions(x, w.positions),
    "embed": lambda ops, w, x, _: ops.embed(w.embedding),
    "packed embed": lambda ops, w, x, _: ops.embed(w.tied),
    "integer embed": lambda ops, w, x, _: ops.embed(w.tied_integers),
    "attention": lambda ops, w, x, _: attention(ops, ops.linear(x, w.qkv), False),
    "concat": lambda ops, w, x, y: ops.linear(ops.concat(x, y), w.both),
    "tap": lambda ops, w, x, _: ops.tap(x, 0),
    "tap beside": lambda ops, w, x, _: ops.tap(x, HIDDEN),
}


def attention(ops: LayerOps[Any], qkv: Any, logit_rows_only: bool) -> Any:
    ops.rotary_kv_write(qkv, 0, None, None)
    return ops.paged_attention(qkv, 0, AttentionKind(0.3), logit_rows_only=logit_rows_only)


def forward(
    steps: list[tuple[str, int, int]], weights: Layers, cap: float, ends: Collection[str] = ()
) -> Forward:
    """Make a forward pass of `steps`: an op and its two values, counted back from the latest.

    `ends` are "given" for given rows, "keep" for kept logit rows, and "spread" for spread logits.
    """

    def compute(ops: LayerOps[Any]) -> Any:
        values = [ops.embed(weights.embedding)]
        if "given" in ends:
            values.append(ops.hidden_in(HIDDEN))
        for name, first, second in steps:
            x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if name.startswith("add ") and x is y:
                y = ops.embed(weights.embedding)  # a value must not be added to itself in place
                values.append(y)
            result = OPS[name](ops, weights, x, y)
            if result is not None:
                values.append(result)
        rows = [ops.logit_rows(value) for value in values[-3:]]
        x = rows[-1]
        for row in rows[:-1]:
            x = ops.rms_norm(x, RMSNorm(weights.weight, 1e-6), row)
        if "keep" in ends:
            ops.tap(x, 0)
            ops.tap(rows[0], HIDDEN)
        logits = ops.linear(x, weights.head)
        if cap:
            ops.scale(logits, 0.3)
            ops.soft_cap(logits, cap)
        return (
            ops.scatter_columns(logits, weights.spread, 2 * VOCAB) if "spread" in ends else logits
        )

    return compute


def host_batch(counts: list[int], logit_rows: list[int]) -> HostBatch:
    """Lay out sequences of `counts` tokens, each from position 0 and on a page of its own."""
    starts = np.cumsum([0, *counts])
    positions = np.concatenate([np.arange(count) for count in counts])
    pages = np.repeat(np.arange(len(counts)), counts)
    return HostBatch(
        token_ids=(np.arange(starts[-1]) * 7 % VOCAB).astype(np.int64),
        query_start=starts.astype(np.int32),
        context_lens=np.array(counts, np.int32),
        page_table=np.arange(len(counts), dtype=np.int32)[None, :, None].copy(),
        token_locations=(pages * 16 + positions).astype(np.int64)[None],
        positions=positions.astype(np.int32),
        logit_rows=np.array(logit_rows, np.int64),
        pending_rows=np.zeros(0, np.int64),
        pending_slots=np.zeros(0, np.int64),
    )


def cache(dtype: torch.dtype, num_pages: int, layers: int = 1, heads: int = KV_HEADS) -> Any:
    return NATIVE.allocate_kv(KVShape(one_group(layers, heads, HEAD_DIM, dtype), num_pages, 16))


def recorded(compute: Forward, dtype: torch.dtype) -> NativeProgram:
    shape = KVShape(one_group(1, KV_HEADS, HEAD_DIM, dtype), 1, 1)
    return NATIVE.record(compute, shape, dtype)


def both_ways(compute: Forward, dtype: torch.dtype, host: HostBatch) -> tuple[Tensor, Tensor]:
    """Compute logits op by op and by a program, on separate pages, and compare kept states."""
    program = recorded(compute, dtype)
    columns, results, kept = program.state_columns, [], []
    for by_program in (False, True):
        kv = cache(dtype, len(host.context_lens))
        batch = NATIVE.prepare(host, kv, NATIVE.allocate_slots(1))
        rows = len(host.logit_rows if program._program.keeps_logit_rows else host.token_ids)
        states = torch.full((rows, columns), 7.0, dtype=dtype) if columns else None
        shape = len(host.token_ids), program.given_columns
        given = tensor(*shape, dtype=dtype) if program.given_columns else None
        before = None if given is None else given.clone()
        if by_program:
            program.logits(batch, kv, states, given)  # leaves its values in the arena
            results.append(program.logits(batch, kv, states, given))
        else:
            results.append(compute(TensorOps(NATIVE, batch, kv, states, given)))
        assert before is None or torch.equal(before, cast("Tensor", given))
        kept.append(torch.zeros(0) if states is None else states.float())
    assert same_bits(*kept)
    return results[0], results[1]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


steps_of_any_kind = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 4), st.integers(0, 4)), max_size=12
)


@given(
    steps=steps_of_any_kind,
    dtype=st.sampled_from(list(LAYERS)),
    counts=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    cap=st.sampled_from([0.0, 3.0]),
    ends=st.sets(st.sampled_from(["given", "keep", "spread"])),
    data=st.data(),
)
@settings(max_examples=examples(150), deadline=None)
def test_any_program_computes_what_its_ops_do(steps, dtype, counts, cap, ends, data):
    if "keep" in ends:
        steps = [step for step in steps if not step[0].startswith("tap")]
    rows = st.lists(st.integers(0, sum(counts) - 1), unique=True, max_size=4).map(sorted)
    host = host_batch(counts, data.draw(rows))
    plain, program = both_ways(forward(steps, LAYERS[dtype], cap, ends), dtype, host)
    assert same_bits(plain, program)


@pytest.mark.parametrize("dtype", LAYERS)
def test_every_instruction_set_and_number_of_threads(dtype, isa, threads):
    steps = [(name, 0, 1) for name in OPS]
    host = host_batch([16, 1, 9, 16], [0, 15, 16, 41])
    compute = forward(steps, LAYERS[dtype], 0.0)
    results = []
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        results += both_ways(compute, dtype, host)
    assert all(same_bits(results[0], other) for other in results[1:])


def test_what_only_the_next_layer_reads_is_fused_into_it():
    weights = LAYERS[torch.float32]

    def compute(ops: LayerOps[Any]) -> Any:
        x = ops.embed(weights.embedding)
        for _ in range(3):
            normed = ops.rms_norm(x, RMSNorm(weights.weight, 1e-5))
            gated = ops.gated(ops.linear(normed, weights.double), gelu=False)
            x = ops.linear(gated, weights.square)
        return ops.linear(ops.logit_rows(x), weights.head)

    program = recorded(compute, torch.float32)
    assert program._program.num_ops == 1 + 3 * 2 + 2


def test_a_value_that_is_read_again_is_not_fused_away():
    weights = LAYERS[torch.float32]

    def compute(ops: LayerOps[Any]) -> Any:
        normed = ops.rms_norm(ops.embed(weights.embedding), RMSNorm(weights.weight, 1e-5))
        x = ops.linear(normed, weights.square)
        return ops.linear(ops.logit_rows(ops.rms_norm(x, RMSNorm(weights.bias, 1e-5), normed)),
                          weights.head)  # fmt: skip

    plain, program = both_ways(compute, torch.float32, host_batch([5], [0, 4]))
    assert same_bits(plain, program)


@pytest.mark.parametrize("dtype", LAYERS)
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_a_norm_before_a_layer_made_of_several_is_computed_once(dtype, tokens):
    weights = LAYERS[dtype]
    norm = RMSNorm(weights.weight, 1e-5)

    def compute(ops: LayerOps[Any]) -> Any:
        residual = ops.embed(weights.embedding)
        x = ops.linear(residual, weights.square)
        for _ in range(2):  # the sum that the norm adds to in place is read again
            x = ops.linear(ops.rms_norm(x, norm, residual), weights.joined)
        return ops.linear(ops.logit_rows(ops.rms_norm(x, norm, residual)), weights.head)

    program = recorded(compute, dtype)
    assert program._program.num_ops == 1 + 1 + 2 + 3, "a norm isn't fused into the joined layer"
    counts = [tokens] if tokens < 16 else [16, tokens - 16]
    plain, together = both_ways(compute, dtype, host_batch(counts, sorted({0, tokens - 1})))
    assert same_bits(plain, together)


def sample_rows(count: int, temperature: float) -> SampleRows:
    return SampleRows.alike(
        {**DRAWN_FREELY, "temperature": temperature},
        np.arange(count, dtype=np.int64),
        seeds=np.arange(count, dtype=np.uint64),
        positions=np.full(count, 3, np.uint64),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_program_draws_what_the_backend_draws_from_its_logits(temperature):
    compute = forward([("linear", 0, 0)], LAYERS[torch.float32], 0.0)
    host = host_batch([3, 4], [2, 6])
    kv = cache(torch.float32, 2)
    slots, expected_slots = NATIVE.allocate_slots(2), NATIVE.allocate_slots(2)
    batch = NATIVE.prepare(host, kv, slots)
    program = recorded(compute, torch.float32)
    rows = sample_rows(2, temperature)
    drawn = program.draw(batch, kv, rows, slots)
    expected = NATIVE.draw(program.logits(batch, kv), rows, expected_slots)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert slots.tolist() == expected_slots.tolist() == drawn.token_ids.tolist()
    with pytest.raises(ValueError, match="rows must be 2"):
        program.draw(batch, kv, sample_rows(3, temperature), NATIVE.allocate_slots(3))


class Masked:
    """Edits that mask tokens of some rows, by a seed."""

    def __init__(self, rows: list[int], seed: int) -> None:
        self.rows = rows
        self._seed = seed

    def apply(self, logits: Tensor) -> None:
        random = np.random.default_rng(self._seed)
        masks = [(row, random.integers(-(2**31), 2**31, 2, np.int32)) for row in self.rows]
        leave_out(logits, masks)


@given(
    temperatures=st.lists(st.sampled_from([0.0, 0.0, 0.7, 1.5]), min_size=1, max_size=6),
    cap=st.sampled_from([0.0, 3.0]),
    dtype=st.sampled_from(list(LAYERS)),
    data=st.data(),
)
@settings(deadline=None)
def test_a_program_draws_from_what_edits_leave(temperatures, cap, dtype, data):
    count = len(temperatures)
    changed = st.lists(st.integers(0, count - 1), unique=True)
    edits = Masked(data.draw(changed), data.draw(st.integers(0, 1000)))
    compute = forward([("linear", 0, 0)], LAYERS[dtype], cap)
    kv = cache(dtype, 1)
    slots, expected_slots = NATIVE.allocate_slots(count), NATIVE.allocate_slots(count)
    batch = NATIVE.prepare(host_batch([8], list(range(count))), kv, slots)
    program = recorded(compute, dtype)
    rows = sample_rows(count, 0.0)
    rows = replace(rows, columns={**rows.columns, "temperature": np.array(temperatures)})
    drawn = program.draw(batch, kv, rows, slots, edits)
    logits = program.logits(batch, kv)
    edits.apply(logits)
    expected = NATIVE.draw(logits, rows, expected_slots)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.row_errors == expected.row_errors
    assert slots.tolist() == expected_slots.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_edits_leave_nothing_of_is_reported(temperature):
    class Nothing:
        rows = (1,)

        def apply(self, logits: Tensor) -> None:
            logits[1] = -torch.inf

    kv, slots = cache(torch.float32, 1), NATIVE.allocate_slots(2)
    batch = NATIVE.prepare(host_batch([2], [0, 1]), kv, slots)
    program = recorded(forward([], LAYERS[torch.float32], 0.0), torch.float32)
    drawn = program.draw(batch, kv, sample_rows(2, temperature), slots, Nothing())
    assert drawn.row_errors == {1: NOTHING_LEFT}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_bad_logits_is_reported_and_disturbs_no_other(bad):
    weights = Layers(torch.float32)
    weights.embedding[7] = bad
    compute = forward([], weights, 0.0)
    kv, slots = cache(torch.float32, 1), NATIVE.allocate_slots(2)
    batch = NATIVE.prepare(host_batch([2], [0, 1]), kv, slots)  # token ids 0 and 7
    program = recorded(compute, torch.float32)
    drawn = program.draw(batch, kv, sample_rows(2, 0.0), slots)
    assert list(drawn.row_errors) == [1]
    assert drawn.token_ids[0] == program.logits(batch, kv)[0].argmax()
    assert drawn.token_ids[1] == 0


def test_the_time_of_each_kind_of_op_is_counted_on_request():
    program = recorded(forward([("attention", 0, 0)], LAYERS[torch.float32], 0.0), torch.float32)
    kv = cache(torch.float32, 1)
    batch = NATIVE.prepare(host_batch([9], [8]), kv, NATIVE.allocate_slots(1))
    program.logits(batch, kv)
    assert set(program.nanoseconds.values()) == {0}
    program.measure(True)
    program.logits(batch, kv)
    assert all(spent > 0 for spent in program.nanoseconds.values())
    assert set(program.nanoseconds) == {"linear", "attention", "rowwise"}
