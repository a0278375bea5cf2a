"""Linear layers of small numbers at the sizes of real models.

The interpreter can't show what real instructions do: the order of their sums, and bits of a row
that depend on its batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from aioserve.formats.weights import PackedLinear
from aioserve.models.quantization.packing import E4M3
from aioserve.models.stored import Floats
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import Scales, WeightIntegers
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.grouped_linear import multiplies_e4m3
from tests.gpu.place import Place
from tests.ops.gpu.held import NF4, exact, held, random_codes, random_integers
from tests.ops.grouped_integers import parameters, random_rows


class Form(NamedTuple):
    bits: int
    group: int
    kind: str = "plain"
    rounded: bool = False
    table: Floats | None = None
    """Values that the codes choose from; None for a weight of integers."""
    scales: Scales = "float32"
    permuted: bool = False

    def weight(self, outputs: int) -> WeightIntegers | WeightCodes:
        if self.table is not None:
            return random_codes(outputs, 2048, self.group, self.table)
        weight = random_integers(outputs, 2048, self.group, self.bits, self.kind)
        if self.scales == "multiples":
            random, groups = np.random.default_rng(0), 2048 // self.group
            parts = (parameters(random, outputs, groups, self.group, "multiples") for _ in range(2))
            weight = replace(weight, scales=next(parts), minimums=-next(parts))
        if self.permuted:
            order = np.random.default_rng(0).permutation(2048).astype(np.int32)
            weight = replace(weight, order=order)
        return weight

    def held(self, outputs: int, dtype: torch.dtype) -> PackedLinear:
        weights, rounded = [self.weight(outputs)], self.rounded
        return held(weights, dtype, rounded_activations=rounded, scales=self.scales)


LAYERS = {
    "int4/32": Form(4, 32),
    "int4/128+zeros": Form(4, 128, "zeros"),
    "int4/32+minimums": Form(4, 32, "minimums"),
    "int4/32+minimums of multiples": Form(4, 32, "minimums", scales="multiples"),
    "int4/128 permuted": Form(4, 128, "zeros", permuted=True),
    "int8/128": Form(8, 128),
    "int8/16": Form(8, 16),
    "int8, int8 rows": Form(8, 2048, rounded=True),
    "int4/128, int8 rows": Form(4, 128, rounded=True),
    "e4m3/128": Form(8, 128, table=E4M3),
    "e4m3": Form(8, 2048, table=E4M3),
    "e4m3/128, e4m3 rows": Form(8, 128, rounded=True, table=E4M3),
    "e4m3, e4m3 rows": Form(8, 2048, rounded=True, table=E4M3),
    "nf4/64": Form(4, 64, table=NF4),
}
ROWS = (1, 7, 16, 17, 32, 33, 64, 65, 257, 600)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def backend(place: Place) -> CudaBackend:
    if not place.is_card:
        pytest.skip("this takes a card, and can't be rehearsed")
    return CudaBackend(place.device)


@pytest.mark.parametrize("outputs", [96, 3072], ids=["many parts", "few parts"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_number_and_the_right_ones(
    backend: CudaBackend, dtype: torch.dtype, name: str, outputs: int
) -> None:
    form = LAYERS[name]
    if "e4m3 rows" in name and not multiplies_e4m3(backend.device):
        pytest.skip("the card's tensor cores multiply no E4M3")
    layer = backend.linear(form.held(outputs, dtype), out_dtype=torch.float32)
    x = backend.place(random_rows(max(ROWS), 2048, dtype))
    together = layer(x)
    for rows in ROWS:
        for first in (0, max(ROWS) - rows):
            assert torch.equal(layer(x[first : first + rows]), together[first : first + rows]), rows
    dense = form.weight(outputs).dequantized()
    if name == "nf4/64":  # its weights are rounded
        dense = torch.from_numpy(dense).to(dtype).float().numpy()
    expected, size = exact(x, dense)
    error = (together.cpu().double() - expected).abs()
    sizes = torch.from_numpy(dense).double().abs()
    rows = x.cpu().double().abs()
    # Bounds of errors. Int8 activations are off by half a step, with 127 steps up to the largest of
    # 128 inputs. Those in e4m3 are off by half a step of 8 in each, and their sums may have fewer
    # bits within a chunk. All others only differ by sums in float32.
    if "int8 rows" in name:
        steps = rows.view(len(x), -1, 128).amax(2) / 254
        in_chunks = sizes.view(outputs, -1, 128).sum(2)
        assert (error <= 1.001 * steps @ in_chunks.T + 1e-5 * size).all()
    elif "e4m3 rows" in name:
        steps = rows / 16 + rows.max() / 448 * 2.0**-10
        assert (error <= steps @ sizes.T + 1e-3 * size).all()
    else:
        assert (error <= 1e-5 * size).all()


def test_layers_replay_in_a_graph(backend: CudaBackend) -> None:
    names = "int4/128+zeros", "int4/32+minimums", "int4/128 permuted", "e4m3/128", "nf4/64"
    names = *names, "int8, int8 rows", "e4m3, e4m3 rows"
    layers = [backend.linear(LAYERS[name].held(512, torch.bfloat16)) for name in names]
    x = backend.place(random_rows(8, 2048, torch.bfloat16))
    expected = [layer(x) for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer(x) for layer in layers]
    x.copy_(backend.place(random_rows(8, 2048, torch.bfloat16, seed=1)))
    graph.replay()
    again = [layer(x) for layer in layers]
    for one, other, before in zip(found, again, expected, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)
