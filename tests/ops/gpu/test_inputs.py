"""Steps in one block of bytes: nothing is lost, and padding changes nothing of others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.ops import HostBatch, KVShape, SampleRows
from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.ops.gpu import inputs as inputs_module
from aioserve.ops.gpu import sampling
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.gpu_batch import HostPrompts
from aioserve.ops.gpu.inputs import DeviceInputs, InputLayout, InputShape, Padding, fill_pending
from tests.ops.contents import fill
from tests.ops.gpu.batches import gpu_batch
from tests.ops.scenarios import Heads, lay_out, one_group, random

PAGE_SIZE = 4


def empty_layout(**maxima: int) -> InputLayout:
    sizes = {"max_tokens": 300, "max_sequences": 9, "max_rows": 40, "max_pages": 12, **maxima}
    return InputLayout(**sizes, page_size=PAGE_SIZE)


def samples_for(rows: int, generator: np.random.Generator) -> SampleRows:
    return SampleRows(
        slots=generator.permutation(rows).astype(np.int64),
        columns={
            "temperature": generator.choice([0.0, 0.7, 1.3], rows),
            "top_k": generator.integers(0, 50, rows),
            "top_p": generator.random(rows) + 1e-3,
            "min_p": generator.choice([0.0, 0.05], rows),
            "typical_p": generator.choice([1.0, 0.8], rows),
        },
        seeds=generator.integers(0, 2**64, rows, np.uint64),
        positions=generator.integers(0, 2**64, rows, np.uint64),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[HostBatch, SampleRows]:
    """Draw decodes, then chunks of prompts, with pending tokens and rows of logits.

    The first of these rows are sampled."""
    counts = [1] * draw(st.integers(0, 4)) + draw(st.lists(st.integers(1, 200), max_size=2))
    contexts = [count + draw(st.integers(0, 40)) for count in counts]
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    tokens = sum(counts)
    width = max([-(-context // PAGE_SIZE) for context in contexts], default=0)
    rows, groups = draw(st.integers(0, min(tokens, 40))), draw(st.integers(1, 3))
    pending = generator.permutation(tokens)[: draw(st.integers(0, tokens))]
    host = HostBatch(
        token_ids=generator.integers(0, 1000, tokens),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        page_table=generator.integers(0, 90, (groups, len(counts), width), np.int32),
        token_locations=generator.integers(0, 400, (groups, tokens)),
        positions=generator.integers(0, 400, tokens, np.int32),
        logit_rows=generator.integers(0, max(tokens, 1), rows),
        pending_rows=pending,
        pending_slots=generator.integers(0, 30, len(pending)),
    )
    return host, samples_for(draw(st.integers(0, rows)), generator)


def packed(
    layout: InputLayout,
    host: HostBatch,
    samples: SampleRows | None,
    device: torch.device,
    padding: Padding | None = None,
) -> tuple[InputShape, DeviceInputs]:
    """Only what is said to be needed reaches the device; the rest there is noise."""
    block = np.full(layout.num_bytes, 0xAA, np.uint8)
    num_unsampled = 0 if samples is None else len(host.logit_rows) - len(samples)
    shape = layout.pack(host, samples, block, num_unsampled=num_unsampled, padding=padding)
    there = torch.full((layout.num_bytes,), 0x55, dtype=torch.uint8)
    there[: shape.num_bytes] = torch.from_numpy(block[: shape.num_bytes])
    return shape, layout.views(there.to(device), shape, 3)


def check_equal(inputs: DeviceInputs, host: HostBatch, samples: SampleRows) -> None:
    batch, expected = inputs.batch, gpu_batch(host, torch.device("cpu"), num_splits=3)
    for field in dataclasses.fields(batch):
        value, wanted = getattr(batch, field.name), getattr(expected, field.name)
        if field.name in ("page_tables", "token_locations"):
            assert len(value) == len(wanted)
            for own, of_group in zip(value, wanted, strict=True):
                columns = own if own.dim() == 1 else own[:, : of_group.shape[1]]
                assert torch.equal(columns.cpu(), of_group), field.name
        elif isinstance(wanted, torch.Tensor):
            assert value.dtype is wanted.dtype
            assert torch.equal(value.cpu(), wanted), field.name
        elif isinstance(wanted, HostPrompts):
            for array in dataclasses.fields(wanted):
                assert np.array_equal(getattr(value, array.name), getattr(wanted, array.name))
        else:
            assert value == wanted, field.name
    slots = inputs.token_slots.cpu().numpy()
    assert np.array_equal(np.flatnonzero(slots >= 0), np.sort(host.pending_rows))
    assert np.array_equal(slots[host.pending_rows], host.pending_slots)
    found = inputs.samples
    own = {"slots": found.slots, "seeds": found.seeds, "positions": found.positions}
    assert found.columns.keys() == samples.columns.keys()
    for name, array in samples.arrays().items():
        bits = array.view(np.int64) if array.dtype == np.uint64 else array
        there = own[name] if name in own else found[name]
        assert np.array_equal(there.cpu().numpy(), bits), name
    assert inputs.samples.draws is sampling.Draws.of(samples)


@settings(deadline=None)
@given(step=steps(), spare=st.integers(0, 3))
def test_what_is_packed_is_what_is_seen(step: tuple[HostBatch, SampleRows], spare: int) -> None:
    host, samples = step
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = InputLayout(
        max_tokens=len(host.token_ids) + spare,
        max_sequences=len(host.context_lens) + spare,
        max_rows=len(samples) + spare,
        max_unsampled=len(host.logit_rows) - len(samples),
        max_pages=host.page_table.shape[2] + spare,
        page_size=PAGE_SIZE,
        num_groups=len(host.page_table),
    )
    shape, inputs = packed(layout, host, samples, device)
    check_equal(inputs, host, samples)
    assert (shape.num_rows, shape.num_samples) == (len(host.logit_rows), len(samples))
    assert shape.pending == (len(host.pending_rows) > 0)
    # Places are the same in every step, where a graph reads them.
    for tensor in (inputs.batch.token_ids, inputs.batch.page_tables[0], inputs.samples.seeds):
        assert tensor.data_ptr() % 16 == 0


def decodes(count: int, *, seed: int = 0, pending: bool = True) -> tuple[HostBatch, SampleRows]:
    generator = np.random.default_rng(seed)
    contexts = generator.integers(1, 40, count)
    rows = np.arange(count)
    host = HostBatch(
        token_ids=generator.integers(0, 1000, count),
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=contexts.astype(np.int32),
        page_table=generator.integers(0, 90, (1, count, 10), np.int32),
        token_locations=generator.integers(0, 360, (1, count)),
        positions=(contexts - 1).astype(np.int32),
        logit_rows=rows,
        pending_rows=rows[::2].copy() if pending else rows[:0],
        pending_slots=rows[::2] + 1 if pending else rows[:0],
    )
    return host, samples_for(count, generator)


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_padding_has_no_context_and_a_page_and_slot_of_its_own(
    device: torch.device, count: int
) -> None:
    host, samples = decodes(count)
    layout = empty_layout()
    shape, inputs = packed(layout, host, samples, device, Padding(8, page=91, slot=77))
    batch = inputs.batch
    sizes = shape.num_tokens, shape.num_sequences, shape.num_rows, shape.num_decodes
    assert sizes == (8, 8, 8, 8)
    assert (batch.num_sequences, batch.num_decodes) == (8, 8)
    assert batch.query_start.tolist() == list(range(9))
    assert batch.logit_rows.tolist() == list(range(8))
    (page_table,), (locations,) = batch.page_tables, batch.token_locations
    assert page_table.shape == (8, 12)
    assert batch.token_ids[:count].tolist() == host.token_ids.tolist()
    assert page_table[:count, :10].tolist() == host.page_table[0].tolist()
    assert batch.context_lens.tolist() == [*host.context_lens.tolist(), *[0] * (8 - count)]
    added = slice(count, 8)
    assert (page_table[added] == 91).all()
    assert (locations[added] == 91 * PAGE_SIZE).all()
    assert (batch.positions[added] == 0).all()
    assert (inputs.token_slots[added] == -1).all()
    assert (inputs.samples.slots[added] == 77).all()
    assert (inputs.samples["temperature"][added] == 0).all()
    assert (inputs.samples["top_p"][added] == 1).all()
    assert inputs.samples.slots[:count].tolist() == samples.slots.tolist()
    assert shape.pending


def test_only_decodes_with_a_row_each_are_padded() -> None:
    layout, block = empty_layout(), np.zeros(empty_layout().num_bytes, np.uint8)
    host, samples = decodes(3)
    with pytest.raises(ValueError, match=r"a step of 3 tokens of 3 sequences .* to 2 decodes"):
        layout.pack(host, samples, block, padding=Padding(2, 0, 0))
    fewer = dataclasses.replace(host, logit_rows=np.arange(2))
    with pytest.raises(ValueError, match=r"with 2 rows of logits, 0 of them .* to 4 decodes"):
        layout.pack(fewer, None, block, padding=Padding(4, 0, 0))
    _, two = decodes(2)
    with pytest.raises(ValueError, match="with 3 rows of logits, 1 of them not sampled, can't be"):
        layout.pack(host, two, block, num_unsampled=1, padding=Padding(4, 0, 0))


def test_steps_larger_than_the_layout_are_refused_by_name() -> None:
    host, samples = decodes(5)
    for name, limit, message in (
        ("max_tokens", 4, "at most 4 tokens, got 5"),
        ("max_sequences", 4, "at most 4 sequences, got 5"),
        ("max_rows", 4, "at most 4 sampled rows, got 5"),
        ("max_pages", 2, "at most 2 pages of a sequence, got"),
    ):
        layout = empty_layout(**{name: limit})
        with pytest.raises(ValueError, match=f"a step may have {message}"):
            layout.pack(host, samples, np.zeros(layout.num_bytes, np.uint8))
    layout, wrong = empty_layout(), decodes(4)[1]
    block = np.zeros(layout.num_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"5 rows of logits, 0 of .* must have 5 rows .* got 4"):
        layout.pack(host, wrong, block)
    with pytest.raises(ValueError, match=r"5 rows of logits, 2 of .* must have 3 rows .* got 4"):
        layout.pack(host, wrong, block, num_unsampled=2)
    layout = empty_layout(max_rows=4)
    with pytest.raises(ValueError, match="a step may have at most 4 rows of logits, got 5"):
        layout.pack(host, wrong, np.zeros(layout.num_bytes, np.uint8), num_unsampled=1)
    layout = empty_layout(max_rows=3, max_unsampled=1)
    with pytest.raises(ValueError, match="a step may have at most 4 rows of logits, got 5"):
        layout.pack(host, decodes(3)[1], np.zeros(layout.num_bytes, np.uint8), num_unsampled=2)


def test_a_step_leaves_no_trace_in_the_next_one(device: torch.device) -> None:
    layout = empty_layout()
    block = np.zeros(layout.num_bytes, np.uint8)
    for count, pending in ((7, True), (3, False), (5, True)):
        host, samples = decodes(count, seed=count, pending=pending)
        shape = layout.pack(host, samples, block)
        check_equal(
            layout.views(torch.from_numpy(block.copy()).to(device), shape, 3), host, samples
        )


@pytest.mark.parametrize("tile", [2, 256])
def test_pending_tokens_come_from_their_slots_and_others_stay(
    device: torch.device, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "_TILE", tile)
    host, samples = decodes(5)
    _, inputs = packed(empty_layout(), host, samples, device, Padding(8, 91, 40))
    last_tokens = torch.arange(1000, 1041, device=device)
    # The last slot belongs to no sequence.
    last_tokens[-1] = -1
    fill_pending(inputs, last_tokens)
    ids = host.token_ids.tolist()
    expected = [1001, ids[1], 1003, ids[3], 1005, 0, 0, 0]
    assert inputs.batch.token_ids.tolist() == expected
    fill_pending(inputs, last_tokens)
    assert inputs.batch.token_ids.tolist() == expected


def test_padded_sequences_change_no_page_and_no_slot_of_others(device: torch.device) -> None:
    """Ops of a layer and a draw run over three decodes, bare and padded to eight."""
    backend, heads = CudaBackend(device), Heads(4, 2, 16)
    scenario = lay_out([(1, 1, 7), (2, 1, 12), (3, 1, 1)], heads, page_size=PAGE_SIZE)
    host = scenario.host
    samples = samples_for(3, np.random.default_rng(0))
    pages = scenario.num_pages
    storage = torch.cat([scenario.storage, torch.full_like(scenario.storage[:, :, :1], 5.0)], dim=2)
    found = []
    for padding in (None, Padding(8, page=pages, slot=3)):
        layout = one_group(1, heads.kv, heads.dim, torch.float32)
        kv = backend.allocate_kv(KVShape(layout, pages + 1, PAGE_SIZE))
        fill(kv, storage)
        last_tokens = torch.full((6,), -5, device=device)
        _, inputs = packed(empty_layout(), host, samples, device, padding)
        size = inputs.batch.num_sequences
        qkv = random(size, heads.q + 2 * heads.kv, heads.dim, seed=3).flatten(1)
        qkv[:3] = random(3, heads.q + 2 * heads.kv, heads.dim, seed=4).flatten(1)
        qkv = qkv.to(device)
        at = KVLayer(inputs.batch, kv, 0)
        backend.rotary_kv_write(qkv, at, None, None)
        attended = backend.paged_attention(qkv, at, AttentionKind(0.3))
        logits = random(size, 50, seed=6)
        logits[:3] = random(3, 50, seed=7)
        tokens = torch.empty(size, dtype=torch.int64, device=device)
        statuses = torch.empty(size, dtype=torch.int32, device=device)
        sampling.draw(logits.to(device), inputs.samples, last_tokens, tokens, statuses)
        assert not statuses.any()
        found.append((attended[:3], kv.storage[:pages], tokens[:3], last_tokens))
        if padding is None:
            assert (kv.storage[pages] == 5).all()
            assert last_tokens[3:].tolist() == [-5] * 3
    bare, padded = found
    assert torch.equal(bare[0], padded[0])
    assert torch.equal(bare[1].view(torch.int32), padded[1].view(torch.int32))
    assert torch.equal(bare[2], padded[2])
    assert bare[3].tolist()[:3] == padded[3].tolist()[:3]
    assert padded[3].tolist()[4:] == [-5] * 2


@pytest.mark.parametrize("context", [1, 9, 64, 65, 500])
def test_kernels_needn_t_be_compiled_for_the_length_of_page_tables(context: int) -> None:
    """Triton compiles again for a stride that is not a multiple of 16, and for a stride of 1."""
    table = np.arange(2 * -(-context // PAGE_SIZE), dtype=np.int32).reshape(1, 2, -1)
    counts = np.ones(2, np.int64)
    host = HostBatch.laid_out(counts, counts * context, table, PAGE_SIZE)
    layout = InputLayout.of(host, PAGE_SIZE)
    packed = np.zeros(layout.num_bytes, np.uint8)
    shape = layout.pack(host, None, packed)
    (seen,) = layout.views(torch.from_numpy(packed), shape, 1).batch.page_tables
    assert seen.stride(0) % 16 == 0
    assert seen.tolist() == table[0].tolist()
