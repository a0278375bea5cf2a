"""Kernels at the sizes of real models, which take too long in the interpreter.

The scenes are those of tests/ops. Everything in tests/ops/gpu also runs on a GPU if there is one,
with odd shapes, small tiles, padding and poison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.formats.weights import GroupedRows, PackedLinear
from aioserve.models.weight_integers import E2M1_TWICE
from aioserve.ops import KVShape
from aioserve.ops.backend import AttentionKind, RMSNorm
from aioserve.ops.experts import Routes
from aioserve.ops.gpu.backend import CudaBackend
from tests.gpu.place import Place
from tests.ops.contents import by_layer, contents, fill
from tests.ops.gpu.test_attention import check
from tests.ops.latent_scenes import Latents, on, scene
from tests.ops.scenarios import REFERENCE, Heads, Scenario, lay_out, one_group, random
from tests.ops.test_experts import routes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEADS = {
    "Qwen3-0.6B": Heads(16, 8, 128),
    "Llama-3.1-8B": Heads(32, 8, 128),
    "Gemma-2-2B": Heads(8, 4, 256),
    "Phi-3-mini": Heads(32, 32, 96),
    "Qwen2-7B": Heads(28, 4, 128),
}
LATENTS = {"DeepSeek-V2-Lite": Latents(16, 512, 64), "DeepSeek-V3": Latents(128, 512, 64)}
BATCH = [(1, 1, 1), (2, 1, 700), (3, 1, 3001), (4, 300, 300), (5, 65, 900), (6, 7, 8)]
"""Decodes, a prompt, and chunks that follow a prefix."""


@pytest.fixture(scope="module")
def backend(place: Place) -> CudaBackend:
    if not place.is_card:
        pytest.skip("this takes a card, and can't be rehearsed")
    return CudaBackend(place.device)


def attend(
    backend: CudaBackend, scenario: Scenario, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Attend as a decoder does; returns `[T, Hq * D]`."""
    step = scenario.on(backend)
    kind = AttentionKind(step.kv.head_dim**-0.5, window, soft_cap)
    return backend.paged_attention(backend.place(step.qkv), step.at, kind).cpu()


@dtypes
@pytest.mark.parametrize("model", HEADS)
def test_attention_agrees_with_the_reference(
    backend: CudaBackend, model: str, dtype: torch.dtype
) -> None:
    window, soft_cap = (500, 50.0) if "Gemma" in model else (0, 0.0)
    scenario = lay_out(BATCH, HEADS[model], dtype=dtype)
    check(scenario, attend(backend, scenario, window, soft_cap), window, soft_cap)


@dtypes
def test_a_row_of_attention_has_the_same_bits_alone_and_among_others(
    backend: CudaBackend, dtype: torch.dtype
) -> None:
    heads = HEADS["Qwen3-0.6B"]
    together = attend(backend, lay_out(BATCH, heads, dtype=dtype))
    first = 0
    for one in BATCH:
        alone = attend(backend, lay_out([one], heads, dtype=dtype, seed=3))
        assert torch.equal(alone, together[first : first + one[1]]), one
        first += one[1]


@dtypes
@pytest.mark.parametrize("window", [0, 128])
def test_sinks_take_their_share_at_the_sizes_of_gpt_oss(
    backend: CudaBackend, window: int, dtype: torch.dtype
) -> None:
    """Compared with attention without sinks, whose sums give the remaining share."""
    scenario, sinks = lay_out(BATCH, Heads(64, 8, 64), dtype=dtype), random(64, seed=4)
    step = scenario.on(backend)
    found, sums = [], []
    for kind in (AttentionKind(0.125, window), AttentionKind(0.125, window, 0.0, sinks)):
        placed = dataclasses.replace(
            kind, sinks=None if kind.sinks is None else backend.place(kind.sinks)
        )
        sums.append(torch.empty(len(scenario.q), 64, device=backend.device))
        qkv = backend.place(step.qkv)
        found.append(backend.paged_attention(qkv, step.at, placed, log_sum_exp=sums[-1]).cpu())
    plain, total = (each.cpu().double() for each in sums)
    torch.testing.assert_close(total, torch.logaddexp(plain, sinks.double()), rtol=1e-5, atol=1e-5)
    share = (plain - total).exp()[:, :, None]
    expected = (found[0].double().unflatten(1, (64, 64)) * share).flatten(1)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(found[1].double(), expected, rtol=limit, atol=limit)


@dtypes
@pytest.mark.parametrize("model", LATENTS)
def test_latent_attention_agrees_and_a_row_has_the_same_bits_alone(
    backend: CudaBackend, model: str, dtype: torch.dtype
) -> None:
    latents, scale = LATENTS[model], 192**-0.5
    scenario = scene(BATCH, latents, dtype=dtype)
    together = on(backend, scenario, latents).attend(backend, scale).cpu()
    expected = on(REFERENCE, scenario, latents, wide=True).attend(REFERENCE, scale)
    limit = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
    torch.testing.assert_close(together.double(), expected, rtol=limit, atol=limit)
    first = 0
    for one in BATCH:
        step = on(backend, scene([one], latents, dtype=dtype, seed=3), latents)
        alone = step.attend(backend, scale).cpu()
        assert torch.equal(alone, together[first : first + one[1]]), one
        first += one[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 2048, 768, 8), (32, 2880, 2880, 4)], ids=str)
def test_experts_agree_and_a_row_has_the_same_bits_alone(
    backend: CudaBackend, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Sizes of Qwen3-30B-A3B and GPT-OSS 20B: experts, hidden and inner size, top_k."""
    count, hidden, inner, top_k = shape
    up, down = (
        random(*each, dtype=dtype, seed=i)
        for i, each in enumerate([(count, 2 * inner, hidden), (count, hidden, inner)])
    )
    up, down = up * hidden**-0.5, down * inner**-0.5
    mixture = backend.mixture(
        Routing(experts=count, top_k=top_k),
        [backend.linear(each) for each in up],
        [backend.linear(each, out_dtype=torch.float32) for each in down],
    )
    rows = 400
    x, routes = random(rows, hidden, dtype=dtype, seed=2), routes_of(rows, count, top_k)
    on_card = Routes(*map(backend.place, routes))
    y = mixture(backend.place(x), on_card)
    for row in (0, 17, 399):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(routes.ids[row].tolist(), routes.weights[row], strict=True):
            gate, value = (up[expert].double() @ x[row].double()).chunk(2)
            inner_row = (torch.nn.functional.silu(gate) * value).to(dtype).double()
            expected += weight.double() * (down[expert].double() @ inner_row)
        limit = 2e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(y[row].cpu().double(), expected, rtol=limit, atol=limit)
        one = slice(row, row + 1)
        alone = mixture(backend.place(x[one]), Routes(on_card.ids[one], on_card.weights[one]))
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("shape", [(32, 2880, 2880, 4)], ids=str)
def test_experts_of_four_bits_agree_and_a_row_has_the_same_bits_alone(
    backend: CudaBackend, shape: tuple[int, int, int, int]
) -> None:
    """Sizes of GPT-OSS 20B, in MXFP4 with biases."""
    count, hidden, inner, top_k = shape
    ups = [four_bits(2 * inner, hidden, 2 * i) for i in range(count)]
    downs = [four_bits(hidden, inner, 2 * i + 1) for i in range(count)]
    mixture = backend.mixture(
        Routing(experts=count, top_k=top_k),
        [backend.linear(held) for held, _ in ups],
        [backend.linear(held, out_dtype=torch.float32) for held, _ in downs],
        gate=ClampedSwiglu(gain=1.702, limit=7.0),
    )
    rows = 400
    x, routes = random(rows, hidden, dtype=torch.bfloat16, seed=2), routes_of(rows, count, top_k)
    on_card = Routes(*map(backend.place, routes))
    y = mixture(backend.place(x), on_card)
    for row in (0, 17, 399):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(routes.ids[row].tolist(), routes.weights[row], strict=True):
            gate, up = (ups[expert][1]() @ x[row].double() + 0.5).bfloat16().double().chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            active = ((up + 1) * gate * (gate * 1.702).sigmoid()).bfloat16().double()
            expected += weight.double() * (downs[expert][1]() @ active + 0.5)
        limit = 2e-2 * expected.abs().max().item()
        torch.testing.assert_close(y[row].cpu().double(), expected, rtol=2e-2, atol=limit)
        one = slice(row, row + 1)
        alone = mixture(backend.place(x[one]), Routes(on_card.ids[one], on_card.weights[one]))
        assert torch.equal(alone[0], y[row])


def four_bits(outputs: int, inputs: int, seed: int) -> tuple[PackedLinear, Callable[[], Tensor]]:
    """Make a layer in MXFP4 with a bias of 0.5, and a function that makes its weight in float64."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 256, (inputs // 32, outputs, 16), dtype=np.uint8)
    exponents = generator.integers(-10, -6, (inputs // 32, outputs))
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    table = np.array(E2M1_TWICE, np.float32)
    bias = np.full(outputs, 0.5, np.float32)
    rows = GroupedRows(
        values,
        bfloat16_bits(scales),
        None,
        None,
        bfloat16_bits(bias),
        bits=4,
        chunk=32,
        repeat=1,
        offset=0,
        rounded_activations=False,
        code="chosen",
        table=table,
    )

    def weight() -> Tensor:
        codes = np.stack((values & 15, values >> 4), axis=-1).reshape(-1, outputs, 32)
        dense = table[codes] * scales[:, :, None]
        return torch.from_numpy(dense).double().transpose(0, 1).reshape(outputs, inputs)

    return PackedLinear("bfloat16", inputs, (rows,)), weight


def bfloat16_bits(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)


@dtypes
@pytest.mark.parametrize("size", [1024, 4096, 8192])
def test_norms_and_gates_agree_and_a_row_is_the_same_in_any_batch(
    backend: CudaBackend, dtype: torch.dtype, size: int
) -> None:
    x, weight = random(257, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    gates = random(257, 2 * size, dtype=dtype, seed=2)
    # One rounding of the result; in float32 some of the sum.
    rtol = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    norm = backend.rms_norm(backend.place(x), RMSNorm(backend.place(weight), 1e-6))
    exact = REFERENCE.rms_norm(x.double(), RMSNorm(weight.double(), 1e-6))
    torch.testing.assert_close(norm.cpu().double(), exact, rtol=rtol, atol=4e-6)
    gated = backend.gated(backend.place(gates), gelu=False)
    torch.testing.assert_close(
        gated.cpu().double(), REFERENCE.gated(gates.double(), gelu=False), rtol=rtol, atol=4e-6
    )
    for row in (0, 100, 256):
        alone = backend.rms_norm(
            backend.place(x[row : row + 1]), RMSNorm(backend.place(weight), 1e-6)
        )
        assert torch.equal(alone, norm[row : row + 1])
        alone = backend.gated(backend.place(gates[row : row + 1]), gelu=False)
        assert torch.equal(alone[0], gated[row])


@dtypes
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_linear_layers_agree_with_float64(
    backend: CudaBackend, dtype: torch.dtype, rows: int
) -> None:
    """The kernels use no TF32, whose products have 10 bits."""
    x, weight = random(rows, 2048, dtype=dtype), random(3072, 2048, dtype=dtype, seed=1)
    weight *= 2048**-0.5
    exact = x.double() @ weight.double().T
    layer = backend.linear(weight, None, out_dtype=torch.float32)
    rtol = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    got = layer(backend.place(x)).cpu().double()
    torch.testing.assert_close(got, exact, rtol=rtol, atol=rtol)


@dtypes
def test_page_copies_move_every_bit(backend: CudaBackend, dtype: torch.dtype) -> None:
    """Pages move within the cache, to pinned host pages and back, one copy after the other."""
    cache = backend.allocate_kv(KVShape(one_group(4, 8, 128, dtype), 64, 16))
    host = backend.allocate_host_kv(KVShape(one_group(4, 8, 128, dtype), 40, 16))
    fill(cache, random(*by_layer(cache).shape, dtype=dtype))
    host.storage.zero_()
    before = contents(cache).cpu()
    there = [(0, page, 1, page, 16) for page in range(40)]
    back = [(1, page, 0, 63 - page, 16) for page in range(20)]
    backend.copy_pages([cache, host], np.array([*there, *back, (0, 63, 0, 40, 5)], np.int32))
    torch.cuda.synchronize(backend.device)
    assert torch.equal(contents(host), before[:, :, :40])
    after = contents(cache).cpu()
    for page in range(20):
        assert torch.equal(after[:, :, 63 - page], before[:, :, page])
    assert torch.equal(after[:, :, 40, :, :5], before[:, :, 0, :, :5])
    assert torch.equal(after[:, :, 40, :, 5:], before[:, :, 40, :, 5:])


def test_greedy_rows_take_the_largest_of_a_large_vocabulary(backend: CudaBackend) -> None:
    from aioserve.request import SamplingParams
    from aioserve.sampling.sampler import SlotTable

    logits = random(33, 151_936)
    slots = SlotTable(33)
    for slot in range(33):
        slots.start(slot, SamplingParams(temperature=0.0), slot)
    last_tokens = backend.allocate_slots(33)
    drawn = backend.draw(backend.place(logits), slots.rows(range(33), [5] * 33), last_tokens)
    assert drawn.token_ids.cpu().tolist() == logits.argmax(dim=1).tolist()
    assert drawn.row_errors == {}


def test_draws_from_a_large_vocabulary_are_those_of_the_reference(backend: CudaBackend) -> None:
    """Most rows agree: powers on the device are off by some roundings, and few draws are that
    near the edge of a token."""
    from aioserve.request import SamplingParams
    from aioserve.sampling.sampler import SlotTable

    logits = 3 * random(64, 151_936)
    drawn = []
    for each in (backend, REFERENCE):
        slots = SlotTable(64)
        for slot in range(64):
            params = SamplingParams(temperature=0.7, top_p=0.9 if slot % 2 else 1.0)
            slots.start(slot, params, slot)
        rows = slots.rows(range(64), list(range(64)))
        found = each.draw(each.place(logits.clone()), rows, each.allocate_slots(64))
        drawn.append(found.token_ids.cpu())
    assert (drawn[0] == drawn[1]).float().mean().item() > 0.9
