"""GGUF files: their metadata and the places of tensors. No claim of a file is trusted."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ModelError, UnsupportedModelError, WeightsError
from aioserve.models.gguf.file import MAX_PAIRS, MAX_TENSORS, GGUFFile
from tests.models.gguf.writing import BY_NAME, Stored, Typed, gguf_bytes, stored, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Grüße",
    "a.u8": Typed("u8", 200),
    "a.i8": Typed("i8", -100),
    "a.u16": Typed("u16", 60_000),
    "a.i16": Typed("i16", -30_000),
    "a.u32": 4_000_000_000,
    "a.i32": -2_000_000_000,
    "a.u64": Typed("u64", 2**63),
    "a.i64": Typed("i64", -(2**62)),
    "a.f32": 1e-05,
    "a.f64": Typed("f64", 0.1),
    "a.true": True,
    "a.false": False,
    "a.tokens": ["", "a", "世界"],
    "a.none": Typed("i32", []),
    "a.types": Typed("i32", [1, -3, 6]),
    "a.scores": [0.5, -1.25],
    "a.bools": [True, False],
    "a.bytes": Typed("u8", [0, 255]),
}
F32 = BY_NAME["F32"].number


def tensors() -> dict[str, Stored]:
    rng = np.random.default_rng(0)
    shapes = {"F32": (5, 3), "Q4_0": (3, 64), "Q6_K": (2, 256), "BF16": (7,)}
    return {
        f"{name}.weight": stored(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    }


def opened(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Read metadata, and the format, shape and bytes of each tensor."""
    file = GGUFFile(path)
    try:
        found = {
            name: (entry.dtype, entry.shape, os.pread(entry.file, entry.num_bytes, entry.offset))
            for name, entry in file.tensors.items()
        }
        return file.metadata, found
    finally:
        file.close()


def error_of(path: Path, kind: type[ModelError] = WeightsError) -> str:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind) as caught:
        GGUFFile(path)
    assert type(caught.value) is kind
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read(tmp_path: Path, version: int) -> None:
    written = tensors()
    path = write_gguf(tmp_path / "x.gguf", METADATA, written, version=version)

    metadata, found = opened(path)

    assert metadata.keys() == METADATA.keys()
    for key, value in METADATA.items():
        expected = value.value if isinstance(value, Typed) else value
        read = metadata[key]
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == expected
    assert type(metadata["a.true"]) is bool
    assert metadata["a.types"].dtype == np.int32
    assert found == {
        name: (name.removesuffix(".weight"), entry.shape, entry.content)
        for name, entry in written.items()
    }


def test_what_the_gguf_package_writes_is_read_as_it_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e6)
    writer.add_token_list(["<s>", "▁a", "b"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    weight = np.random.default_rng(0).normal(size=(4, 96)).astype(np.float32)
    writer.add_tensor("output.weight", weight)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata, found = opened(path)

    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            read = metadata[key]
            assert (read.tolist() if isinstance(read, np.ndarray) else read) == field.contents()
    assert found == {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
            tensor.data.tobytes(),
        )
        for tensor in reader.tensors
    }


def test_another_alignment_is_heeded(tmp_path: Path) -> None:
    written = tensors()
    pairs = {"general.alignment": 256, **METADATA}
    path = write_gguf(tmp_path / "x.gguf", pairs, written, alignment=256)
    _, found = opened(path)
    assert {name: entry[2] for name, entry in found.items()} == {
        name: entry.content for name, entry in written.items()
    }


def test_padding_behind_the_tensors_and_between_them_is_no_matter(tmp_path: Path) -> None:
    spread = {"a": Stored((8,), F32, bytes(32)), "b": Stored((8,), F32, b"", offset=96)}
    content = gguf_bytes({}, spread)
    (tmp_path / "x.gguf").write_bytes(content + bytes(64) + b"b" * 32 + bytes(7))
    _, found = opened(tmp_path / "x.gguf")
    assert found["b"][2] == b"b" * 32


def entry(shape: tuple[int, ...] = (8,), number: int = F32, **other: Any) -> Stored:
    return Stored(shape, number, bytes(32), **other)


def raw(kind: int, content: bytes) -> bytes:
    """Make a file with one metadata pair of any type and content."""
    key = struct.pack("<Q", 3) + b"a.b"
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", kind) + content


WRONG = [
    (b"", "it begins with b'', not with b'GGUF'"),
    (b"GG", "it begins with b'', not with b'GGUF'"),
    (b"PK\3\4" + bytes(40), r"it begins with b'PK\x03\x04', not with b'GGUF'"),
    (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    (b"GGUF\3\0\0\0", "the number of tensors ends at byte 16, and the file has 8"),
    (gguf_bytes({}, num_tensors=1)[:24], "the name of a tensor ends at byte 32"),
    (gguf_bytes({}, num_tensors=2**63), f"must have at most {MAX_TENSORS}"),
    (gguf_bytes({}, num_pairs=2**64 - 1), f"must have at most {MAX_PAIRS}"),
    (gguf_bytes({}, num_pairs=9)[:24], "the key of metadata 0 ends at byte 32"),
    (gguf_bytes([("a", 1), ("a", 2)]), "the key a is there twice"),
    (gguf_bytes([("x" * 5000, 1)]), "the key of metadata 0 claims 5000 bytes, at most 256"),
    (gguf_bytes([("", 1)]), "the key of metadata 0 must be printable text, got ''"),
    (gguf_bytes([(b"\xff", 1)]), "the key of metadata 0 is not UTF-8"),  # type: ignore
    (gguf_bytes({"a": b"\xc3"}), "a is not UTF-8: unexpected end of data at its byte 0"),
    (gguf_bytes({"a": ["b", b"\xff"]}), "string 1 of a is not UTF-8"),
    (raw(8, struct.pack("<Q", 2**40)), "a.b claims 1099511627776 bytes, at most 67108864"),
    (raw(8, struct.pack("<Q", 100)), "a.b ends at byte 147, and the file has 47"),
    (raw(13, bytes(8)), "a.b has type 13, types are 0 to 12"),
    (raw(7, b"\2"), "a.b must be 0 or 1, which bools are"),
    (raw(9, struct.pack("<IQ", 5, 2**61)), "a.b ends at byte"),
    (raw(9, struct.pack("<IQ", 8, 2**62)), "strings, at most 2097152 are read of a file"),
    (raw(9, struct.pack("<IQ", 8, 2**20)), "claims 1048576 strings, and ends at byte 51"),
    (raw(9, struct.pack("<IQQ", 8, 1, 2**63)), "a.b ends at byte"),
    (raw(9, struct.pack("<IQ", 99, 1)), "a.b has type 99"),
    (gguf_bytes({}, [("t", entry()), ("t", entry())]), "the tensor t is there twice"),
    (gguf_bytes({}, {"t": entry(offset=8)}), "offset 8, no multiple of the alignment 32"),
    (gguf_bytes({}, {"t": entry(offset=2**60)}), "and the file has"),
    (gguf_bytes({}, {"t": entry((9,))}), "t of 36 bytes ends at byte"),
    (gguf_bytes({}, {"t": entry((2**40, 2**40, 2**40))}), "and the file has"),
    (gguf_bytes({}, {"t": entry((0,))}), "t has shape [0]"),
    (gguf_bytes({}, {"t": entry((2, 0, 2))}), "t has shape [2, 0, 2]"),
    (gguf_bytes({}, {"t": entry((33,), 2)}), "rows of Q4_0 have a multiple of 32 values"),
    (gguf_bytes({}, {"t": entry((1,) * 5)}), "t must have 1 to 4 axes, got 5"),
    (gguf_bytes({}, {"t": entry(())}), "t must have 1 to 4 axes, got 0"),
    (gguf_bytes({}, {"": entry()}), "the name of a tensor must be printable text, got ''"),
    (gguf_bytes({}, {"a\n": entry()}), "must be printable text"),
    (gguf_bytes({}, {"n" * 999: entry()}), "claims 999 bytes, at most 256 are read"),
    (
        gguf_bytes({}, [("s", entry((16,))), ("t", entry(offset=32))]) + bytes(64),
        "t lies at offset 32, where s reaches to 64",
    ),
    *(
        (gguf_bytes({"general.alignment": value}), "general.alignment must be a power of two")
        for value in (0, 4, 24, 2**20, 32.0, True, "32", [32])
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    assert says in error_of(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gguf_bytes({}, version=1), "version 1 of GGUF is not supported, only 2 and 3"),
        (gguf_bytes({}, version=4), "version 4 of GGUF is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (raw(9, struct.pack("<IQ", 9, 1)), "a.b is an array of arrays"),
        (gguf_bytes({}, {"t": entry(number=16)}), "t has format IQ2_XXS, which is not supported"),
        (gguf_bytes({}, {"t": entry(number=99)}), "t has format number 99"),
    ],
)
def test_a_file_that_cant_be_read_yet_is_refused_by_name(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    assert says in error_of(tmp_path / "x.gguf", UnsupportedModelError)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "none.gguf")
    assert "directory" in error_of(tmp_path).lower()
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in error_of(tmp_path / "pipe")


def test_a_header_that_no_model_has_is_read_no_further(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw(9, struct.pack("<IQ", 4, 2**27)))
    os.truncate(path, 2**40)  # without taking the place
    assert "ends behind byte 67108864" in error_of(path)


# -- arbitrary bytes

VALID = gguf_bytes(METADATA, tensors())
HEADER_BYTES = VALID.index(b"BF16.weight") + 60


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw a valid file with changed bytes or fields, or a truncated one."""
    content = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, HEADER_BYTES))
        new = draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value)),
                st.sampled_from([2**63, 2**32, 2**31 - 1, 2**16]).map(
                    lambda value: struct.pack("<Q", value)
                ),
            )
        )
        content[at : at + len(new)] = new
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


@given(content=mutated())
def test_only_the_houses_errors_come_and_little_memory_is_taken(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content)
    said, found = None, {}
    tracemalloc.start()
    try:
        _, found = opened(path)
    except (WeightsError, UnsupportedModelError) as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
    assert said is None or (str(path) in said and len(said) < 1000 and said.isprintable())
    for name, shape, read in found.values():
        assert len(read) == BY_NAME[name].bytes_per_row(shape[-1]) * math.prod(shape[:-1])


def test_files_that_are_cut_off_anywhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for size in {*range(0, len(VALID), 37), *range(HEADER_BYTES - 20, HEADER_BYTES + 20)}:
        path.write_bytes(VALID[:size])
        error_of(path)
