"""Reading of weights: conversions, packing while reading, and files that change meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioserve import _native
from aioserve.errors import WeightsError
from aioserve.formats.weights import NATIVE, PLAIN_FLOATS, ComputedFormats
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.models.reading import WeightReading
from aioserve.ops.native_types import NativeLinear
from tests.parity.tiny_models import write

STORED = [torch.float32, torch.bfloat16, torch.float16]
WANTED = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("wanted", WANTED, ids=str)
stored_dtypes = pytest.mark.parametrize("stored", STORED, ids=str)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.cpu_info()["threads"]
    yield
    _native.set_num_threads(before)


class Files:
    """Tensors in files of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.descriptors: list[int] = []

    def path(self, number: int) -> Path:
        return self._directory / str(number)

    def source(self, tensor: Tensor, before: int = 0) -> _native.WeightSource:
        """Write a tensor to a file of its own, after `before` bytes."""
        path = self.path(len(self.descriptors))
        path.write_bytes(bytes(before) + raw(tensor))
        file = os.open(path, os.O_RDONLY)
        self.descriptors.append(file)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _native.WeightSource(file, before, tensor.shape[0], dtype, f"tensor {path.name}")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    for file in made.descriptors:
        os.close(file)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def read_plain(source: _native.WeightSource, shape: tuple[int, ...], wanted: torch.dtype) -> Tensor:
    reader = _native.WeightReader(name_of(wanted))
    array = np.full(shape, 77, np.float32 if wanted is torch.float32 else np.int16)
    reader.add_plain([source], int(np.prod(shape[1:])), array.ctypes.data)
    reader.run()
    assert reader.wait(0) == 1
    return torch.from_numpy(array).view(wanted)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_two_bytes_becomes_what_torch_makes_of_it(
    files: Files, stored: torch.dtype, wanted: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(stored)
    read = read_plain(files.source(every), (2**16,), wanted)
    expected = every.to(wanted)
    assert torch.equal(read.isnan(), every.isnan())
    assert torch.equal(bits(read)[~every.isnan()], bits(expected)[~every.isnan()])


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16], ids=str)
def test_float32_is_rounded_as_torch_does(files: Files, wanted: torch.dtype) -> None:
    # Each upper half is combined with lower halves at, below and above a tie, for both formats.
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ends = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lower = torch.tensor(ends, dtype=torch.int32)
    values = (upper[:, None] | lower).view(-1).view(torch.float32)
    read = read_plain(files.source(values), tuple(values.shape), wanted)
    assert torch.equal(read.isnan(), values.isnan())
    is_number = ~values.isnan()
    assert torch.equal(bits(read)[is_number], bits(values.to(wanted))[is_number])


def test_nothing_is_packed_in_float16(files: Files) -> None:
    source = files.source(random(4, 4, dtype=torch.float16))
    reader = _native.WeightReader("float16")
    with pytest.raises(ValueError, match="no weight is packed in float16"):
        reader.add_packed([source], 4, [])
    with pytest.raises(ValueError, match="no weight is packed in float16"):
        reader.add_transposed(source, 4, [])
    with pytest.raises(ValueError, match="dtype is not of a weight file"):
        _native.WeightReader("int8")


@stored_dtypes
@dtypes
@pytest.mark.parametrize("rows", [(1,), (32,), (33,), (20, 50, 7), (64, 64), (5, 5, 5, 5)], ids=str)
@pytest.mark.parametrize("columns", [1, 16, 31, 257])
def test_a_weight_packed_while_it_is_read_is_the_one_packed_from_a_tensor(
    files: Files, stored: torch.dtype, wanted: torch.dtype, rows: tuple[int, ...], columns: int
) -> None:
    parts = [random(count, columns, dtype=stored, seed=i) for i, count in enumerate(rows)]
    biases = [random(count, dtype=stored, seed=i) for i, count in enumerate(rows)]
    reader = _native.WeightReader(name_of(wanted))
    reader.add_packed(
        [files.source(part, before=3) for part in parts], columns, list(map(files.source, biases))
    )
    reader.run()
    layer = NativeLinear.of_packed(reader.take(0))
    expected = NativeLinear(torch.cat(parts).to(wanted), torch.cat(biases).to(wanted))

    assert (layer.out_features, layer.in_features) == (sum(rows), columns)
    assert layer.dtype is layer.out_dtype is wanted
    assert layer.num_bytes == expected.num_bytes
    every = torch.arange(sum(rows))
    assert torch.equal(layer.rows(every), torch.cat(parts).to(wanted))
    x = random(13, columns, dtype=wanted)
    assert torch.equal(layer(x), expected(x))
    assert reader.take(0) is None


@stored_dtypes
@dtypes
def test_a_transposed_weight_is_packed_the_right_way_round(
    files: Files, stored: torch.dtype, wanted: torch.dtype
) -> None:
    weight, bias = random(45, 70, dtype=stored), random(70, dtype=stored)
    reader = _native.WeightReader(name_of(wanted))
    reader.add_transposed(files.source(weight), 70, [files.source(bias)])
    reader.run()
    layer = NativeLinear.of_packed(reader.take(0), torch.float32)
    expected = NativeLinear(weight.T.to(wanted), bias.to(wanted), out_dtype=torch.float32)
    x = random(13, 45, dtype=wanted)
    assert torch.equal(layer(x), expected(x))


@dtypes
def test_any_number_of_threads_reads_the_same(
    files: Files, threads: None, wanted: torch.dtype
) -> None:
    weight = random(1000, 700, dtype=torch.float32)
    source = files.source(weight)
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        reader = _native.WeightReader(name_of(wanted))
        reader.add_packed([source], 700, [])
        reader.run()
        every = torch.arange(1000)
        packed = NativeLinear.of_packed(reader.take(0)).rows(every)
        assert torch.equal(packed, weight.to(wanted))
        assert torch.equal(read_plain(source, (1000, 700), wanted), weight.to(wanted))


@pytest.mark.parametrize("kind", ["packed", "transposed", "plain", "bias"])
def test_a_file_that_ends_early_is_named_and_ends_the_reading(files: Files, kind: str) -> None:
    whole, cut = random(100, 64, dtype=torch.float32), random(100, 64, dtype=torch.float32)
    sources = [files.source(whole), files.source(cut)]
    reader = _native.WeightReader("float32")
    array = np.zeros((100, 64), np.float32)
    reader.add_packed([sources[0]], 64, [])
    if kind == "packed":
        reader.add_packed([sources[1]], 64, [])
        keep = cut.nbytes - 1
    elif kind == "transposed":
        reader.add_transposed(sources[1], 64, [])
        keep = cut.nbytes - 1
    elif kind == "plain":
        reader.add_plain([sources[1]], 64, array.ctypes.data)
        keep = 0
    else:
        reader.add_packed([sources[0]], 64, [sources[1]])
        keep = 99 * 4
    reader.add_packed([sources[0]], 64, [])
    os.truncate(files.path(1), keep)

    reader.run()

    assert reader.wait(0) == 1
    for done in (1, 2):
        with pytest.raises(RuntimeError, match=r"^tensor 1 can't be read: the file ends early$"):
            reader.wait(done)
    with pytest.raises(IndexError):
        reader.wait(3)
    with pytest.raises(RuntimeError, match="the file ends early"):
        reader.take(1)


def test_a_descriptor_that_cannot_be_read_says_why(files: Files, tmp_path: Path) -> None:
    files.descriptors.append(os.open(tmp_path, os.O_RDONLY))
    source = _native.WeightSource(files.descriptors[-1], 0, 4, "float32", "folder")
    reader = _native.WeightReader("float32")
    reader.add_packed([source], 4, [])
    reader.run()
    with pytest.raises(RuntimeError, match=r"^folder can't be read: Is a directory$"):
        reader.wait(0)


def test_a_reading_that_was_stopped_tells_who_waits(files: Files) -> None:
    reader = _native.WeightReader("float32")
    reader.add_packed([files.source(random(4, 4, dtype=torch.float32))], 4, [])
    reader.stop()
    thread = threading.Thread(target=reader.run)
    thread.start()
    with pytest.raises(RuntimeError, match="stopped"):
        reader.wait(0)
    thread.join()


def test_the_same_bytes_are_found_the_same_and_one_that_differs_is_seen(files: Files) -> None:
    tensor = random(700, 300, dtype=torch.float32)
    other = tensor.clone()
    other[-1, -1] += 1
    one, same, different = (
        files.source(t, before=at) for t, at in ((tensor, 0), (tensor, 5), (other, 0))
    )
    assert _native.same_bytes(one, same, tensor.nbytes)
    assert not _native.same_bytes(one, different, tensor.nbytes)
    with pytest.raises(RuntimeError, match="tensor 0 can't be read: the file ends early"):
        _native.same_bytes(one, same, tensor.nbytes + 1)


# -- of a model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write("qwen3", tmp_path / "model")


def test_weights_cut_off_before_they_are_read_are_an_error_that_names_file_and_tensor(
    model: Path,
) -> None:
    with WeightReading(model_files(model), formats=NATIVE) as reading:
        os.truncate(model / "model.safetensors", 20_000)
        with pytest.raises(WeightsError, match=r"model\.safetensors: \S+ can't be read: the file"):
            reading.read()


def test_a_progress_that_raises_ends_the_reading_and_closes_the_files(model: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyError(done)

    open_files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with pytest.raises(KeyError):
        load_model(model, progress=progress)
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert threading.active_count() == threads


@pytest.mark.parametrize("formats", [NATIVE, PLAIN_FLOATS], ids=["packed", "plain"])
def test_progress_reaches_the_total_where_a_head_is_stored_for_nothing(
    model: Path, formats: ComputedFormats
) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    calls: list[tuple[int, int]] = []
    with WeightReading(model_files(model), formats=formats) as reading:
        reading.read(lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {call[1] for call in calls} == {total}
    assert calls == sorted(set(calls))
    assert calls[-1][0] == total


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import aioserve.execution.loading, aioserve.models.reading\n"
        "from aioserve.assets import model_path\n"
        "from aioserve.formats.weights import NATIVE\n"
        "from aioserve.models.files import model_files\n"
        "from aioserve.models.reading import WeightReading\n"
        "with WeightReading(model_files(model_path('pyhelp')), formats=NATIVE) as reading:\n"
        "    assert reading.read().linears\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
