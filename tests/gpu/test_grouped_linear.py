"""Linear layers of integers at the sizes of real models, where the interpreter says nothing of what
instructions do: the order of their sums, and whether a row has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from aioserve.ops.gpu.backend import CudaBackend
from tests.gpu.place import Place
from tests.ops.gpu.held import exact, held, random_integers
from tests.ops.grouped_integers import random_rows

LAYERS = {
    "int4/32": (4, 32, "plain", False),
    "int4/128+zeros": (4, 128, "zeros", False),
    "int4/32+minimums": (4, 32, "minimums", False),
    "int8/128": (8, 128, "plain", False),
    "int8/16": (8, 16, "plain", False),
    "int8, int8 rows": (8, 2048, "plain", True),
    "int4/128, int8 rows": (4, 128, "plain", True),
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
    bits, group_size, kind, integers = LAYERS[name]
    weight = random_integers(outputs, 2048, group_size, bits, kind)
    layer = backend.linear(
        held([weight], dtype, rounded_activations=integers), out_dtype=torch.float32
    )
    x = backend.place(random_rows(max(ROWS), 2048, dtype))
    together = layer(x)
    for rows in ROWS:
        for first in (0, max(ROWS) - rows):
            assert torch.equal(layer(x[first : first + rows]), together[first : first + rows]), rows
    expected, size = exact(x, weight.dequantized())
    error = (together.cpu().double() - expected).abs()
    # Sums in float32; or half a step of each activation, of 127 in the largest of 128 inputs.
    if integers:
        steps = x.cpu().double().abs().view(len(x), -1, 128).amax(2) / 254
        sizes = torch.from_numpy(weight.dequantized()).double().abs().view(outputs, -1, 128).sum(2)
        assert (error <= 1.001 * steps @ sizes.T + 1e-5 * size).all()
    else:
        assert (error <= 1e-5 * size).all()


def test_layers_replay_in_a_graph(backend: CudaBackend) -> None:
    layers = [
        backend.linear(
            held([random_integers(512, 2048, 128, 4, kind)], torch.bfloat16, rounded_activations=on)
        )
        for kind, on in (("zeros", False), ("minimums", False), ("plain", True))
    ]
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
