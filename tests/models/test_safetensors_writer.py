"""Files that are written in any pieces and order are read back correctly."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from aioserve.errors import WeightsError
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.safetensors_writer import SafetensorsWriter, TensorSpec

SIZES = {"I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1}


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(sorted(SIZES)), st.lists(st.integers(1, 9), max_size=3).map(tuple)
        ),
        min_size=1,
        max_size=8,
    ),
    shard_bytes=st.sampled_from([1, 100, 1 << 20]),
    chance=st.randoms(use_true_random=False),
)
def test_what_is_written_in_pieces_is_read_back(
    shapes: list[tuple[str, tuple[int, ...]]], shard_bytes: int, chance: random.Random
):
    specs = [TensorSpec.of(f"tensor.{i}", *one) for i, one in enumerate(shapes)]
    writer = SafetensorsWriter(specs, shard_bytes)
    bits = {one.name: np.frombuffer(chance.randbytes(one.num_bytes), np.uint8) for one in specs}
    pieces = []
    for name, whole in bits.items():
        cut = chance.randint(0, len(whole))
        pieces += [(name, 0, whole[:cut]), (name, cut, whole[cut:])]
    chance.shuffle(pieces)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with writer.open(directory):
            for name, at, piece in pieces:
                writer.write(name, piece, at)
        files = sorted(directory.glob("*.safetensors"))
        assert len(files) == writer.num_files
        assert sum(file.stat().st_size for file in files) == writer.num_bytes
        placed = {}
        for path in files:
            with safe_open(path, "pt") as theirs:  # that library finds the file sound
                assert theirs.metadata() == {"format": "pt"}
                placed |= dict.fromkeys(theirs.keys(), path.name)
            file = SafetensorsFile(path)
            for name, stored in file.tensors.items():
                assert (stored.dtype, stored.shape) == shapes[int(name.removeprefix("tensor."))]
                assert stored.offset % SIZES[stored.dtype] == 0
                assert np.array_equal(stored.read_bytes(0, stored.num_bytes), bits[name])
            file.close()
        assert placed.keys() == bits.keys()
        index = directory / "model.safetensors.index.json"
        assert index.exists() == (len(files) > 1) == (files[0].name != "model.safetensors")
        if index.exists():
            said = json.loads(index.read_text())
            assert said["weight_map"] == placed
            assert said["metadata"]["total_size"] == sum(map(len, bits.values()))


def test_a_shard_has_a_bounded_number_of_tensors():
    specs = [TensorSpec.of(f"a.rather.long.name.of.a.tensor.{i}", "I8", (1,)) for i in range(9000)]
    assert SafetensorsWriter(specs).num_files == 3


def test_what_does_not_fit_a_tensor_is_not_written(tmp_path: Path):
    writer = SafetensorsWriter([TensorSpec.of("a", "I8", (4,)), TensorSpec.of("b", "I8", (4,))])
    with writer.open(tmp_path):
        for at, count in ((0, 5), (3, 2), (-1, 2)):
            with pytest.raises(ValueError, match=f"a has 4 bytes, got {count} at {at}"):
                writer.write("a", np.ones(count, np.int8), at)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    writer = SafetensorsWriter([TensorSpec.of("a", "I8", (4,))])
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be written: File exists"):
        writer.open(tmp_path).__enter__()
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
