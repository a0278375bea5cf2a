"""Repositories of the hub with models in GGUF: one file is downloaded, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.cli.hub import Hub, Repository
from tests.cli.test_hub import cache, snapshot
from tests.models.gguf.conversion import convert, with_bytes_vocabulary

pytest.importorskip("huggingface_hub")

__all__ = ["cache"]

NAME = "made-up/tiny-GGUF"
MORE = ("x", "--max-tokens", 4, "--temperature", 0)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> bytes:
    """A model in GGUF."""
    directory = with_bytes_vocabulary(tiny_model, tmp_path / "directory")
    return convert(directory, tmp_path / "tiny.gguf").read_bytes()


@pytest.fixture
def repository(model: bytes) -> Repository:
    files = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "F16/tiny[1].gguf")
    others = {"README.md": b"# a model", "config.json": b"{}", "mmproj-F16.gguf": b"GGUF"}
    return Repository(dict.fromkeys(files, model) | others)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        (NAME, "tiny-Q4_K_M.gguf"),
        (f"{NAME}:q8_0", "tiny-Q8_0.gguf"),
        (f"{NAME}:F16", "F16/tiny[1].gguf"),
        (f"{NAME}/F16/tiny[1].gguf", "F16/tiny[1].gguf"),
    ],
)
def test_the_file_that_is_meant_is_downloaded_once_and_alone(
    aioserve: Run, cache: Path, repository: Repository, name: str, file: str
) -> None:
    with Hub({NAME: repository}) as hub:
        first = aioserve("run", name, *MORE, HF_ENDPOINT=hub.url)
        assert first.returncode == 0, first.stderr
        assert first.stderr.startswith(f"downloading {NAME}/{file} (")
        assert snapshot(cache, NAME) == {file}
        hub.asked.clear()
        again = aioserve("run", name, *MORE, HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert (again.returncode, again.stdout) == (0, first.stdout)


@pytest.mark.more
def test_one_model_in_the_cache_is_not_taken_for_another(
    aioserve: Run, cache: Path, repository: Repository
) -> None:
    with Hub({NAME: repository}) as hub:
        assert aioserve("run", f"{NAME}:Q8_0", *MORE, HF_ENDPOINT=hub.url).returncode == 0
        assert aioserve("run", f"{NAME}:Q4_K_M", *MORE, HF_ENDPOINT=hub.url).returncode == 0
        assert snapshot(cache, NAME) == {"tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"}
        hub.asked.clear()
        for name in (NAME, f"{NAME}:Q8_0"):
            assert aioserve("run", name, *MORE, HF_ENDPOINT=hub.url).returncode == 0
        assert hub.asked == []
        done = aioserve("plan", f"{NAME}:F16", HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert done.returncode == 2
    assert "not in the local Hugging Face cache: no GGUF model is F16; name one of" in done.stderr


@pytest.mark.more
def test_parts_belong_together_and_a_missing_one_is_downloaded(aioserve: Run, cache: Path) -> None:
    parts = [f"tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    repository = Repository(dict.fromkeys(parts, b"GGUF"))
    with Hub({NAME: repository}) as hub:
        done = aioserve("run", NAME, *MORE, HF_ENDPOINT=hub.url)
        assert done.stderr.startswith(f"downloading {NAME}/{parts[0]} (8 bytes)")
        assert snapshot(cache, NAME) == set(parts)
        (folder,) = (cache / "models--made-up--tiny-GGUF" / "snapshots").iterdir()
        (folder / parts[1]).unlink()
        done = aioserve("plan", NAME, HF_ENDPOINT=hub.url)
        assert f"the local Hugging Face cache lacks {parts[1]}" in done.stderr
        aioserve("run", NAME, *MORE, HF_ENDPOINT=hub.url)
    assert snapshot(cache, NAME) == set(parts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        (
            NAME,
            ["a-Q5_0.gguf", "a-Q8_0.gguf"],
            "no GGUF model is Q4_K_M; name one of a-Q5_0.gguf, ",
        ),
        (f"{NAME}:Q3_K_S", ["a-Q5_0.gguf"], "no GGUF model is Q3_K_S; name one of a-Q5_0.gguf"),
        (f"{NAME}/b.gguf", ["a.gguf"], "it has no b.gguf; there are a.gguf"),
        (
            NAME,
            ["mmproj-a.gguf"],
            "it has no language model in GGUF, only what goes with one: mmproj",
        ),
        (NAME, ["a-00001-of-00002.gguf"], "it lacks a-00002-of-00002.gguf, a part of the model"),
    ],
)
def test_what_tells_no_model_is_one_line_that_lists_the_files(
    aioserve: Run, cache: Path, name: str, files: list[str], says: str
) -> None:
    with Hub({NAME: Repository(dict.fromkeys(files, b"GGUF"))}) as hub:
        done = aioserve("run", name, *MORE, HF_ENDPOINT=hub.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"aioserve: {NAME} can't be used: {says}")
    assert done.stderr.count("\n") == 1


@pytest.mark.more
def test_a_path_that_is_not_there_is_said_before_the_hub_is(aioserve: Run, cache: Path) -> None:
    with Hub({}) as hub:
        done = aioserve("run", "models/llama/tiny.gguf", *MORE, HF_ENDPOINT=hub.url)
        assert done.returncode == 2
        assert "models/llama is no directory here" in done.stderr
