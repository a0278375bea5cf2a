"""Linear layers of 8-bit and 4-bit floats on the GPU.

Further ones have scales that are multiples, or columns in another order than the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.errors import WeightsError
from aioserve.formats.weights import CUDA, FloatRows, GroupedRows
from aioserve.models.gguf.formats import FORMATS, GGUFFormat, decoded
from aioserve.models.packed_decoding import PackedDecoding
from aioserve.models.quantization.packing import E4M3, e4m3_bits
from aioserve.models.stored import Floats
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import WeightIntegers
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.grouped_linear import GroupedLinear, parts_of
from tests.ops.gpu.held import NF4, Weight, exact, held, random_codes, random_integers, stored
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest, round_fused_products_once
from tests.ops.gpu.test_grouped_linear import DTYPES, a_bias, check
from tests.ops.grouped_integers import fused, parameters, random_rows
from tests.tiers import examples

round_bfloat16_to_nearest()

TABLES = {"e4m3": E4M3, "nf4": NF4}
LARGEST, SMALLEST = np.float32(448), np.float32(2.0**-119)
tables = pytest.mark.parametrize("table", TABLES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fused_products_are_rounded_once() -> Iterator[None]:
    with round_fused_products_once():
        yield


def layer(
    backend: CudaBackend,
    weight: Weight,
    dtype: torch.dtype,
    bias: Floats | None = None,
    *,
    rounded: bool = False,
    alike: int = 1,
    out_dtype: torch.dtype | None = torch.float32,
) -> GroupedLinear:
    joined = held([weight], dtype, bias, rounded_activations=rounded, alike=alike)
    made = backend.linear(joined, out_dtype=out_dtype)
    assert isinstance(made, GroupedLinear)
    assert isinstance(joined.runs[0], GroupedRows)
    return made


def multiplied(weight: WeightCodes, dtype: torch.dtype) -> Floats:
    """Return the weight that is multiplied: a table's numbers are rounded after scaling."""
    dense = weight.dequantized()
    return dense if len(weight.table) == 256 else torch.from_numpy(dense).to(dtype).float().numpy()


@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 700),
    group=st.sampled_from([16, 32, 64, 128, 256, 0]),
    table=st.sampled_from(list(TABLES)),
    alike=st.sampled_from([1, 3, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(15))
def test_any_shape_agrees(
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    table: str,
    alike: int,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    backend = CudaBackend("cuda" if torch.cuda.is_available() else "cpu")
    sizes = outputs, inputs, group or inputs
    weight = random_codes(*sizes, TABLES[table], alike=alike, seed=seed)
    bias = a_bias(outputs) if has_bias else None
    # A layer may be given rows of a wider tensor.
    x = random_rows(rows, inputs, dtype, seed)
    wide = torch.zeros(rows, inputs + 5, dtype=dtype)
    wide[:, :inputs] = x
    made = layer(backend, weight, dtype, bias, alike=alike, out_dtype=None)
    check(made(backend.place(wide)[:, :inputs]), x, multiplied(weight, dtype), bias)
    if rows:
        ids = torch.arange(rows) * 7 % outputs
        expected = torch.from_numpy(weight.dequantized()).to(dtype)[ids]
        assert torch.equal(made.rows(backend.place(ids)).cpu(), expected)


@dtypes
def test_every_number_of_e4m3_is_decoded_exactly(backend: CudaBackend, dtype: torch.dtype) -> None:
    codes = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8).reshape(2, 127)
    weight = WeightCodes(codes, E4M3, np.ones((2, 1), np.float32), 127)
    found = layer(backend, weight, dtype)(backend.place(torch.eye(127, dtype=dtype)))
    assert np.array_equal(found.cpu().numpy().T, E4M3[codes])


@dtypes
def test_codes_of_a_table_are_the_weight_that_loading_would_round(
    backend: CudaBackend, dtype: torch.dtype
) -> None:
    weight = random_codes(40, 96, 32, NF4)
    found = layer(backend, weight, dtype)(backend.place(torch.eye(96, dtype=dtype)))
    expected = torch.from_numpy(weight.dequantized()).to(dtype).float()
    assert torch.equal(found.cpu().T, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("table", "group", "inputs", "dtype", "rounded"),
    [
        ("e4m3", 128, 1024, torch.bfloat16, False),
        ("e4m3", 600, 600, torch.float16, False),
        ("e4m3", 128, 1024, torch.bfloat16, True),
        ("e4m3", 32, 320, torch.float16, True),
        ("nf4", 64, 1024, torch.bfloat16, False),
        ("nf4", 64, 320, torch.float32, False),
    ],
)
def test_a_row_is_the_same_to_the_last_bit_in_any_batch(
    backend: CudaBackend, table: str, group: int, inputs: int, dtype: torch.dtype, rounded: bool
) -> None:
    made = layer(backend, random_codes(40, inputs, group, TABLES[table]), dtype, rounded=rounded)
    x = backend.place(random_rows(129, inputs, dtype))
    together = made(x)
    for first, count in ((128, 1), (100, 7), (3, 16), (40, 17), (7, 64)):
        alone = made(x[first : first + count])
        assert torch.equal(alone, together[first : first + count]), (first, count)


def product(x: Tensor, weight: WeightCodes, part: int) -> Tensor:
    """Compute the product in float32, bit for bit.

    Rows are E4M3 with a scale for each chunk. Parts of `part` inputs are added in order."""
    rows, size = x.float().numpy(), weight.group_size if weight.group_size < 128 else 128
    total = acc = np.zeros((len(rows), len(weight.codes)), np.float32)
    for begin in range(0, rows.shape[1], size):
        chunk = rows[:, begin : begin + size]
        amax = np.abs(chunk).max(axis=1, keepdims=True)
        is_zero = amax < SMALLEST
        factor = np.where(is_zero, np.float32(0), LARGEST / np.maximum(amax, SMALLEST))
        rounded = E4M3[e4m3_bits(chunk * factor)].astype(np.float64)
        values = E4M3[weight.codes[:, begin : begin + size]].astype(np.float64)
        term = (rounded @ values.T).astype(np.float32) * weight.scales[
            :, begin // weight.group_size
        ]
        row_scale = np.where(is_zero, np.float32(0), amax / LARGEST)
        acc = fused(row_scale, term, acc)
        if (begin + size) % part == 0 or begin + size >= rows.shape[1]:
            total, acc = total + acc, np.zeros_like(acc)
    return torch.from_numpy(total)


@pytest.mark.usefixtures("fused_products_are_rounded_once")
@pytest.mark.parametrize(("group", "inputs"), [(32, 96), (128, 1300), (300, 300), (128, 2048)])
@dtypes
def test_rows_of_e4m3_give_the_bits_that_are_stated(
    backend: CudaBackend, dtype: torch.dtype, group: int, inputs: int
) -> None:
    weight = random_codes(50, inputs, group)
    x = random_rows(9, inputs, dtype)
    x[2] = 0
    x[3, :40] *= 2.0**-14
    made = layer(backend, weight, dtype, rounded=True)
    chunk = group if group < 128 else 128
    part = chunk * parts_of(50, -(-inputs // chunk), chunk)
    found, stated = made(backend.place(x)).cpu(), product(x, weight, part)
    if torch.cuda.is_available():  # tensor cores keep about 13 bits below the largest product
        _, size = exact(x, weight.dequantized())
        assert ((found - stated).double().abs() <= 2.0**-12 * size).all()
    else:
        assert torch.equal(found, stated)
    # Half a step of a number is a 16th of it; of the smallest numbers, 2 ** -10 in units of 448.
    dense = torch.from_numpy(weight.dequantized()).double().abs()
    steps = x.double().abs() / 16 + x.double().abs().max() / 448 * 2.0**-10
    expected, size = exact(x, weight.dequantized())
    assert ((found.double() - expected).abs() <= steps @ dense.T + 1e-5 * size).all()


def test_a_row_without_numbers_is_nan_and_disturbs_no_other(backend: CudaBackend) -> None:
    x = random_rows(3, 200, torch.float32)
    made = layer(backend, random_codes(40, 200, 200), torch.float32, rounded=True)
    before = made(backend.place(x))
    x[1, 77] = float("inf")
    after = made(backend.place(x))
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_rows_stay_floats_where_no_activation_may_be_rounded() -> None:
    never = msgspec.structs.replace(CUDA, integer_activations=False)
    weight = random_codes(4, 64, 64)
    for formats, rounds in ((CUDA, True), (never, False)):
        run = held([weight], torch.bfloat16, rounded_activations=True, formats=formats).runs[0]
        assert isinstance(run, GroupedRows)
        assert run.rounded_activations is rounds


def test_weights_that_share_scales_are_one_run_whatever_their_outputs(backend: CudaBackend) -> None:
    """Queries, keys and values have a scale each, or blocks that end within a weight."""
    for alike, sizes in ((0, (48, 16, 16)), (16, (48, 16, 8)), (16, (40, 24, 8))):
        weights = [random_codes(size, 96, 96, alike=alike or size, seed=size) for size in sizes]
        parts = [
            stored(weight, alike=alike or size) for weight, size in zip(weights, sizes, strict=True)
        ]
        joined = PackedDecoding("float32", CUDA).held(parts, [])
        (run,) = joined.runs
        assert isinstance(run, GroupedRows)
        assert run.alike == (8 if sizes[0] == 40 else 16)
        dense = np.concatenate([weight.dequantized() for weight in weights])
        ids = torch.arange(len(dense))
        assert np.array_equal(backend.linear(joined).rows(backend.place(ids)).cpu().numpy(), dense)


def test_a_block_of_rows_that_begins_within_shared_scales_has_its_own() -> None:
    weight = random_codes(300, 64, 64, alike=128)
    part = stored(weight, alike=128).sliced(100, 300)
    (run,) = PackedDecoding("float32", CUDA).held([part], []).runs
    assert isinstance(run, GroupedRows)
    assert run.alike == 4
    assert np.array_equal(np.repeat(run.scales[0], 4), weight.scales[100:, 0])


@pytest.mark.parametrize(("table", "group"), [("e4m3", 128), ("e4m3", 1024), ("nf4", 64)])
def test_bytes_are_those_of_codes_and_scales_and_are_foretold(
    backend: CudaBackend, table: str, group: int
) -> None:
    alike = 128 if group == 128 else 1
    weight = random_codes(256, 1024, group, TABLES[table], alike=alike)
    code_bytes = 256 * 1024 // (1 if table == "e4m3" else 2)
    scale_bytes = 4 * 256 // alike * (1024 // group)
    expected = code_bytes + scale_bytes + (64 if table == "nf4" else 0)
    assert layer(backend, weight, torch.bfloat16, alike=alike).num_bytes == expected
    part = stored(weight, alike=alike)
    assert PackedDecoding("bfloat16", CUDA).expected_sizes([part], []) == [(256, expected)]


@pytest.mark.parametrize("group", [24, 100])
def test_groups_that_no_chunk_holds_are_floats(group: int) -> None:
    joined = held([random_codes(8, 400, group)], torch.float32)
    assert isinstance(joined.runs[0], FloatRows)


# -- scales that are multiples


def k_quant(bits: int, group: int, kind: str = "plain") -> WeightIntegers:
    """Draw a weight with scales and minimums in the form of K-quants."""
    plain = random_integers(20, 512, group, bits, kind)
    random = np.random.default_rng(bits)
    scales = parameters(random, 20, 512 // group, group, "multiples")
    scales[:2] *= -128 / np.maximum(scales[:2].max(axis=1, keepdims=True), 1)
    scales[:2] = np.rint(scales[:2])
    minimums = None
    if kind == "minimums":
        minimums = -parameters(random, 20, 512 // group, group, "multiples")
    return WeightIntegers(plain.values, scales, None, minimums, group, bits)


@pytest.mark.parametrize(("bits", "group", "kind"), [(4, 32, "minimums"), (6, 16, "plain")])
def test_scales_that_are_multiples_take_a_byte_and_give_the_same_bits(
    backend: CudaBackend, bits: int, group: int, kind: str
) -> None:
    weight = k_quant(bits, group, kind)
    x = backend.place(random_rows(5, 512, torch.bfloat16))
    ids = backend.place(torch.arange(0, 20, 4))
    whole = held([weight], torch.bfloat16)
    multiples = held([weight], torch.bfloat16, scales="multiples")
    (wide,), (run,) = whole.runs, multiples.runs
    assert isinstance(wide, GroupedRows)
    assert isinstance(run, GroupedRows)
    one, other = backend.linear(whole), backend.linear(multiples)
    assert torch.equal(one(x), other(x))
    assert torch.equal(one.rows(ids), other.rows(ids))
    count = 2 if kind == "minimums" else 1
    assert wide.scales.dtype == np.float32
    assert other.num_bytes == run.values.nbytes + count * 20 * (512 // group + 2 * 4)
    (sizes,) = PackedDecoding("bfloat16", CUDA).expected_sizes(
        [stored(weight, scales="multiples")], []
    )
    assert sizes == (20, run.num_bytes)


K_QUANTS = [form for form in FORMATS.values() if form.scales == "multiples"]


@pytest.mark.parametrize("form", K_QUANTS, ids=[form.name for form in K_QUANTS])
def test_any_blocks_of_k_quants_have_such_scales(backend: CudaBackend, form: GGUFFormat) -> None:
    random = np.random.default_rng(form.number)
    content = random.integers(0, 256, (6, form.bytes_per_row(512)), np.uint8)
    blocks = content.view(form.block)
    for name in [name for name in ("d", "dmin") if name in (form.block.names or ())]:
        blocks[name] = (random.normal(size=blocks.shape) * 0.01).astype(np.float16)
        blocks[name][0, 0] = 0
        blocks[name][1, 0] = np.float16(6e-8)
    weight = decoded(form, content)
    assert isinstance(weight, WeightIntegers)
    joined = held([weight], torch.float32, scales="multiples")
    (run,) = joined.runs
    assert isinstance(run, GroupedRows)
    assert run.scales.dtype == np.int8
    found = backend.linear(joined).rows(backend.place(torch.arange(6))).cpu().numpy()
    assert np.array_equal(found, weight.dequantized())


def test_scales_that_are_no_multiples_are_refused_by_name() -> None:
    weight = random_integers(4, 256, 16, 8)
    with pytest.raises(WeightsError, match="multiples, by -128 to 127, of one number for 256"):
        held([weight], torch.float32, scales="multiples")


# -- columns in another order


@pytest.mark.parametrize(("bits", "kind"), [(4, "zeros"), (8, "plain"), (4, "minimums")])
@dtypes
def test_columns_in_another_order_are_multiplied_by_the_inputs_that_they_are(
    backend: CudaBackend, dtype: torch.dtype, bits: int, kind: str
) -> None:
    plain = random_integers(40, 200, 32, bits, kind)
    order = np.random.default_rng(0).permutation(200).astype(np.int32)
    weight = replace(plain, order=order)
    joined = held([plain, weight], dtype)
    assert [type(run) for run in joined.runs] == [GroupedRows, GroupedRows]
    made = backend.linear(joined, out_dtype=torch.float32)
    x = random_rows(17, 200, dtype)
    found = made(backend.place(x))
    check(found[:, 40:], x, weight)
    assert torch.equal(made(backend.place(x[:3])), found[:3])
    ids = torch.arange(40, 80)
    expected = torch.from_numpy(weight.dequantized()).to(dtype)
    assert torch.equal(made.rows(backend.place(ids)).cpu(), expected)
    parts = [stored(plain), stored(weight)]
    sizes = PackedDecoding(str(dtype).removeprefix("torch."), CUDA).expected_sizes(parts, [])
    assert sizes == list(joined.sizes)
