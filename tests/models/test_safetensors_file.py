"""Safetensors files: their headers, and the places of tensors."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioserve.errors import WeightsError
from aioserve.models.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def written(path: Path, header: Any, data: bytes = bytes(24)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def error_of(path: Path) -> str:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_tensors_lie_where_the_library_that_wrote_them_says(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.ones(4, 1, 2, dtype=torch.bfloat16),
        "d": torch.tensor(3.0),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})

    file = SafetensorsFile(tmp_path / "x.safetensors")
    try:
        assert file.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            stored = file.tensors[name]
            assert stored.shape == tuple(tensor.shape)
            assert os.pread(stored.file, stored.num_bytes, stored.offset) == bytes(
                tensor.contiguous().view(-1).view(torch.uint8).tolist()
            )
        assert [file.tensors[name].dtype for name in "abcd"] == ["F32", "I64", "BF16", "F32"]
        assert file.tensors["a"].label == f"{tmp_path / 'x.safetensors'}: a"
    finally:
        file.close()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": 3}',
        b'{"\\ud800": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}',
        b"\xff",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        {"a": {**ENTRY, "dtype": 4}},
        {"a": {**ENTRY, "shape": [-2, 3]}},
        {"a": {**ENTRY, "shape": [2.5, 3]}},
        {"a": {**ENTRY, "shape": [2**63, 3]}},
        {"a": {**ENTRY, "shape": [1] * 17}},
        {"a": {**ENTRY, "shape": [2, 4]}},
        {"a": {**ENTRY, "data_offsets": [0]}},
        {"a": {**ENTRY, "data_offsets": [24, 0]}},
        {"a": {**ENTRY, "data_offsets": [-24, 0]}},
        {"a": {**ENTRY, "data_offsets": [4, 28]}},
        {"a": {**ENTRY, "data_offsets": [0, 20]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": {**ENTRY, "dtype": "BF16"}},
        {"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 2**62]}},
        {"a": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 24]}},
        {"a": {"dtype": "F8_E4M3", "shape": [8, 2], "data_offsets": [0, 24]}},
        {"a": {"dtype": "I64", "shape": [0], "data_offsets": [0, 24]}},
        {},
    ],
    ids=[str(number) for number in range(25)],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, header: Any) -> None:
    assert "not a complete safetensors file: " in error_of(written(tmp_path / "x", header))


def test_a_dtype_that_nobody_can_load_may_lie_beside_others(tmp_path: Path) -> None:
    odd = {"dtype": "F4", "shape": [8], "data_offsets": [24, 28]}
    file = SafetensorsFile(written(tmp_path / "x", {"a": ENTRY, "b": odd}, bytes(28)))
    assert file.tensors["b"].dtype == "F4"
    file.close()


@pytest.mark.parametrize("keep_bytes", [0, 7, 8, 30, -1])
def test_a_file_that_was_cut_off_says_how_much_there_is(tmp_path: Path, keep_bytes: int) -> None:
    path = written(tmp_path / "x", {"a": ENTRY})
    path.write_bytes(path.read_bytes()[:keep_bytes])
    assert "not a complete safetensors file: it" in error_of(path)


def test_data_that_the_header_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    message = error_of(written(tmp_path / "x", {"a": ENTRY}, bytes(25)))
    assert "its header tells of" in message


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(100))
    assert f"claims {MAX_HEADER_BYTES + 1} bytes, at most {MAX_HEADER_BYTES}" in error_of(path)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    assert "not a complete safetensors file: Is a directory" in error_of(tmp_path)
