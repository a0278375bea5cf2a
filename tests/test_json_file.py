"""Files of a model directory are bounded before they are read, and hold nobody up."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ModelError
from aioserve.json_file import MAX_VALUES, read_json_object
from tests.attacks.held_loop import assert_loop_is_free

MIB = 1 << 20


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path, max_bytes: int = MIB) -> str:
    with pytest.raises(ModelError) as caught:
        read_json_object(path, max_bytes)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(value=st.dictionaries(st.text(), json_values, max_size=5), ascii_only=st.booleans())
def test_an_object_is_read_as_pythons_json_reads_it(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, object], ascii_only: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1)
    assert read_json_object(written(path, text), MIB) == value


def test_a_file_of_just_the_limit_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", '{"a": 1}')
    assert read_json_object(path, 8) == {"a": 1}
    assert refusal(path, 7) == f"{path}: has 8 bytes, must have at most 7"


def test_a_file_of_a_terabyte_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    read: list[int] = []
    monkeypatch.setattr(os, "read", lambda file, count: read.append(count) or b"")
    assert f"has {1 << 40} bytes" in refusal(path)
    assert not read


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = written(tmp_path / "config.json", "{}"), os.read

    def grown(file: int, count: int) -> bytes:
        with path.open("ab") as more:
            more.write(b" " * 10)
        return read(file, count)

    monkeypatch.setattr(os, "read", grown)
    assert "must have at most 50" in refusal(path, 50)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(written(tmp_path / "file", "{}"))
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        assert "not a regular file" in refusal(path)
    for path in (tmp_path / "loop", tmp_path / "absent", tmp_path / ("x" * 300)):
        assert "can't be read" in refusal(path)
    assert "not a path" in refusal(tmp_path / "a\x00b")
    assert "not a path" in refusal(tmp_path / "a\ud800b")
    assert read_json_object(tmp_path / "link", MIB) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", "{}")
    path.chmod(0)
    assert "can't be read" in refusal(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "got list"),
        ("5", "got int"),
        ('"' + "1" * 5000, "digits"),
        (b"\xff{}", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"a": 1', "not valid JSON"),
        ('{"a": ["\\ud800"]}', "surrogates not allowed"),
        ('{"a": {"\\udc00\\ud800": 1}}', "surrogates not allowed"),
        ('{"a": 1}{}', "Extra data"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
        ('{"a": -0.' + "1" * 5000 + "}", "digits"),
        ('{"a": 1' + "[" * 250_000, "about 250001 values"),
        ('{"a": ' + "[" * 240_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_named(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = written(tmp_path / "config.json", content)
    assert says in refusal(path)
    assert str(path) in refusal(path)


def test_numbers_that_real_files_hold_are_read(tmp_path: Path) -> None:
    text = f'{{"a": {10**30}, "b": {10**400}, "c": [0.0, Infinity], "d": 1e400, "e": 1, "e": 2}}'
    found = read_json_object(written(tmp_path / "config.json", text), MIB)
    assert found == {"a": 10**30, "b": 10**400, "c": [0.0, float("inf")], "d": float("inf"), "e": 2}


HALF = MAX_VALUES // 2 - 2
HOSTILE = {
    "arrays": '{"a": [' + "[]," * HALF + "[]]}",
    "objects": '{"a": [' + "{}," * HALF + "{}]}",
    "integers": '{"a": [' + "1," * (2 * HALF) + "1]}",
    "keys": "{" + ",".join(f'"{key}": ""' for key in range(MAX_VALUES)) + "}",
    "long keys": "{" + ",".join(f'"{key:050}": {key}' for key in range(MAX_VALUES)) + "}",
    "too many": "{" + ",".join(f'"{key}":1' for key in range(1_400_000)) + "}",
    "digits": '{"a": ' + "1" * 16_000_000 + "}",
    "string": '{"a": "' + "\\n" * (8 * MIB - 8) + '"}',
    "spaces": '{"a": ' + " " * 16_000_000 + "1}",
}


@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_file_of_16_mib_holds_the_loop(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / "index.json", HOSTILE[kind])

    def read() -> None:
        try:
            read_json_object(path, 16 * MIB)
        except ModelError:
            assert kind in ("digits", "too many")

    asyncio.run(assert_loop_is_free(lambda: asyncio.to_thread(read)))


@pytest.mark.clock
def test_the_largest_index_in_use_is_read_beside_a_running_loop(tmp_path: Path) -> None:
    """DeepSeek-V3's: 91,991 tensors in 163 files, 8.9 MB."""
    weight_map = {
        f"model.layers.{i % 61}.mlp.experts.{i}.down_proj.weight_scale_inv": (
            f"model-{i % 163:05}-of-000163.safetensors"
        )
        for i in range(91_991)
    }
    path = written(tmp_path / "index.json", json.dumps({"weight_map": weight_map}, indent=2))
    assert path.stat().st_size > 8_900_000
    found: list[dict[str, object]] = []

    async def read() -> None:
        found.append(await asyncio.to_thread(read_json_object, path, 16 * MIB))

    asyncio.run(assert_loop_is_free(read))
    assert found[0] == {"weight_map": weight_map}
