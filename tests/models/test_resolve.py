"""Model names: directories, embedded models, the local Hugging Face cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aioserve import assets
from aioserve.errors import ModelNotFoundError
from aioserve.models.resolve import resolve


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """Create an empty Hugging Face cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub: Path, repository: str, *files: str) -> Path:
    """Put a repository into the cache as huggingface_hub does."""
    root = hub / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_directory_with_a_config_is_taken_as_it_is(tmp_path):
    directory = make_model(tmp_path / "my model")

    assert resolve(str(directory)) == directory
    assert resolve(directory) == directory


def test_the_home_directory_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    directory = make_model(tmp_path / "model")

    assert resolve("~/model") == directory


def test_an_embedded_model_is_found_by_name(tmp_path, monkeypatch, hub):
    embedded = make_model(tmp_path / "inside")
    monkeypatch.setattr(assets, "model_path", {"pyhelp": embedded}.get)

    assert resolve("pyhelp") == embedded


def test_a_directory_without_a_config_doesnt_hide_an_embedded_model(tmp_path, monkeypatch, hub):
    embedded = make_model(tmp_path / "inside")
    monkeypatch.setattr(assets, "model_path", {"pyhelp": embedded}.get)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyhelp").mkdir()

    assert resolve("pyhelp") == embedded


@pytest.mark.parametrize("repository", ["some-org/model-1.5b", "gpt2"])
def test_a_cached_hub_id_is_found(hub, repository):
    snapshot = cached(hub, repository, "config.json")

    assert resolve(repository) == snapshot


def test_a_cached_snapshot_without_a_config_is_no_model(hub):
    cached(hub, "org/model", "README.md")

    with pytest.raises(ModelNotFoundError, match=r"abc123 has no config\.json"):
        resolve("org/model")


def test_the_error_names_everything_that_was_tried(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/absent")

    message = str(caught.value)
    assert "'org/absent'" in message
    assert "no directory org/absent" in message
    assert "there is pyhelp" in message
    assert "hf download org/absent" in message


@pytest.mark.parametrize("name", ["/absent", "a/b/c", "a b", "", "a\0b"])
def test_what_cant_be_a_hub_id_isnt_looked_up(name, tmp_path, monkeypatch):
    monkeypatch.chdir(make_model(tmp_path))

    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)

    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize("name", ["pyhlep", "PyHelp", "pyhelp2"])
def test_a_slip_of_an_embedded_models_name_is_told(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelNotFoundError, match=r"did you mean pyhelp\?"):
        resolve(name)


@pytest.mark.parametrize("name", ["a.gguf", "below", "./below/B.GGUF"])
def test_a_gguf_file_and_a_directory_of_them_are_found(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for file in ("a.gguf", "below/B.GGUF"):
        (tmp_path / file).write_bytes(b"GGUF")

    assert resolve(name) == Path(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.gguf", "there is no file a.gguf"),
        ("./a.gguf", "there is no file a.gguf"),
        ("no/a.gguf", "there is no file no/a.gguf, and no directory no"),
        ("./below/x/a.gguf", "there is no file below/x/a.gguf, and no directory below/x"),
        ("below/mmproj-b.gguf", "there is no file below/mmproj-b.gguf"),
        (
            "below/two/tiny-q4-k-m.gguf",
            "there is no file below/two/tiny-q4-k-m.gguf; near it in name: tiny-Q4_K_M.gguf, "
            "tiny-Q8_0.gguf",
        ),
    ],
)
def test_a_gguf_file_that_is_not_there_is_said_with_those_like_it(
    hub, tmp_path, monkeypatch, name, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below" / "two").mkdir(parents=True)
    for file in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny.json", "other.gguf"):
        (tmp_path / "below" / "two" / file).write_bytes(b"GGUF")
    for given in (name, Path(name)):
        with pytest.raises(ModelNotFoundError) as caught:
            resolve(given)
        assert str(caught.value).endswith(f"not found: {says}")


def test_a_file_of_the_hub_is_looked_for_there_where_no_such_directory_is(
    hub, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="hf download org/model"):
        resolve("org/model/a.gguf")
    (tmp_path / "org" / "model").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match=r"there is no file org/model/a\.gguf$"):
        resolve("org/model/a.gguf")


def test_a_model_beside_a_gguf_file_is_found(tmp_path):
    directory = make_model(tmp_path / "model")
    (directory / "a.gguf").write_bytes(b"GGUF")

    assert resolve(directory) == directory


def test_an_id_that_the_hub_library_refuses_is_not_found(hub):
    with pytest.raises(ModelNotFoundError):
        resolve("a--b..c")


def test_a_missing_hub_library_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(
        ModelNotFoundError,
        match=r"huggingface_hub is not installed.*pip install 'aioserve\[hub\]'",
    ):
        resolve("org/absent")


def test_an_adapter_alone_is_told_what_to_do_with(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"an adapter \(LoRA\) alone .* merge it into"):
        resolve(tmp_path)
