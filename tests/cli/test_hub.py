"""Commands with a model of the Hugging Face hub, from a stand-in on 127.0.0.1."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.hub import Hub, Repository
from tests.cli.terminal import CTRL_C, Terminal

pytest.importorskip("huggingface_hub")

CARD = {"README.md": b"# a model\n", "onnx/model.json": b"{}", "model.gguf": b"GGUF"}


@pytest.fixture
def files(tiny_model: Path) -> dict[str, bytes]:
    """Repository with a model, and with files that no engine reads."""
    own = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    return own | CARD | {"consolidated.safetensors": b"another copy"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache, for commands in their own processes, with the stand-in as their only hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def snapshot(cache: Path, hub_id: str) -> set[str]:
    """Names of the files in the cache."""
    (folder,) = (cache / f"models--{hub_id.replace('/', '--')}" / "snapshots").iterdir()
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.more
def test_templates_in_their_folder_are_downloaded_too(
    aioserve: Run, cache: Path, files: dict[str, bytes], tiny_model: Path
) -> None:
    templates = {
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    others = {"assets/model.json": b"{}", "adapters/model.json": b"{}"}
    with Hub({"made-up/tiny": Repository(files | templates | others)}) as hub:
        done = aioserve("run", "made-up/tiny", "x", "--max-tokens", 2, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    names = {file.name for file in tiny_model.iterdir()}
    assert snapshot(cache, "made-up/tiny") == names | {*templates}


@pytest.mark.more
def test_an_id_is_downloaded_once_and_without_what_no_engine_reads(
    aioserve: Run, cache: Path, files: dict[str, bytes], tiny_model: Path
) -> None:
    words = ("run", "made-up/tiny", "x", "--max-tokens", 4, "--temperature", 0, "--raw")
    with Hub({"made-up/tiny": Repository(files)}) as hub:
        first = aioserve(*words, HF_ENDPOINT=hub.url)
        assert first.returncode == 0, first.stderr
        line, counts = first.stderr.splitlines()
        assert line.startswith("downloading made-up/tiny (")
        assert line.endswith(f" from {hub.url}")
        assert "output token" in counts
        assert snapshot(cache, "made-up/tiny") == {file.name for file in tiny_model.iterdir()}
        hub.asked.clear()
        again = aioserve(*words, HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "downloading" not in again.stderr
    assert aioserve("run", tiny_model, *words[2:]).stdout == first.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "verb",
    [("bench", "latency"), ("serve",), ("chat",), ("calibrate",), ("evaluate",), ("quantize",)],
    ids=" ".join,
)
def test_every_verb_that_computes_with_a_model_downloads_it(
    aioserve: Run, cache: Path, verb: tuple[str, ...]
) -> None:
    more = {
        "calibrate": ("-o", "table.json"),
        "evaluate": ("--text", __file__),
        "quantize": ("copy", "--method", "int8"),
        "serve": ("--port", 0),
        "bench": ("--device", "cpu"),
    }
    done = aioserve(*verb, "made-up/absent", *more.get(verb[0], ()))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "aioserve: made-up/absent is not in the local Hugging Face cache, and http://127.0.0.1:9 "
        "can't be reached: "
    )


@pytest.mark.more
@pytest.mark.parametrize("verb", ["plan", "doctor"])
def test_verbs_that_only_look_at_a_model_download_nothing(
    aioserve: Run, cache: Path, verb: str
) -> None:
    with Hub({}) as hub:
        done = aioserve(verb, "made-up/absent", HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert done.returncode == 2
    assert "`hf download made-up/absent` puts it there" in done.stderr


REFUSALS = {
    "there is none": (None, 2, "has no such model, or a private one"),
    "gated": (
        Repository({}, status=403, error_code="GatedRepo"),
        2,
        "made-up/tiny is gated: ask for access at {hub}/made-up/tiny, then log in",
    ),
    "the hub is down": (
        Repository({}, status=503),
        1,
        "made-up/tiny can't be downloaded: {hub} answered 503",
    ),
    "no model": (
        Repository({"README.md": b"x", "data.safetensors": b"x"}),
        2,
        "made-up/tiny can't be used: it has no config.json",
    ),
    "pickles alone": (
        Repository({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        2,
        "made-up/tiny can't be used: it has no .safetensors files",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("repository", "code", "told"), REFUSALS.values(), ids=REFUSALS)
def test_what_the_hub_refuses_is_one_line(
    aioserve: Run, cache: Path, repository: Repository | None, code: int, told: str
) -> None:
    with Hub({} if repository is None else {"made-up/tiny": repository}) as hub:
        done = aioserve("run", "made-up/tiny", "x", HF_ENDPOINT=hub.url)
        told = told.format(hub=hub.url)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("aioserve: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.more
def test_a_repository_whose_files_alone_are_gated_is_told_as_such(
    aioserve: Run, cache: Path, files: dict[str, bytes]
) -> None:
    gated = Repository(files, status=403, error_code="GatedRepo", files_alone=True)
    with Hub({"made-up/tiny": gated}) as hub:
        done = aioserve("run", "made-up/tiny", "x", HF_ENDPOINT=hub.url)
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first.startswith("downloading made-up/tiny")
    assert last.startswith("aioserve: made-up/tiny is gated: ")


@pytest.mark.more
def test_no_download_is_begun_where_the_hub_must_not_be_asked(aioserve: Run, cache: Path) -> None:
    done = aioserve("run", "made-up/tiny", "x", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr == (
        "aioserve: made-up/tiny is not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids "
        "to download it\n"
    )


def test_without_the_library_the_error_says_what_to_install(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = aioserve_here("run", "made-up/tiny", "x")
    assert done.returncode == 2
    assert "pip install 'aioserve[hub]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "./made-up/tiny", "/made-up/tiny", "../tiny", "a/b/c"])
def test_what_has_no_owner_is_never_asked_for(aioserve: Run, cache: Path, name: str) -> None:
    with Hub({}) as hub:
        done = aioserve("run", name, "x", HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert done.returncode == 2
    assert "not found" in done.stderr


@pytest.mark.more
def test_a_directory_that_looks_like_an_id_is_not_asked_for(
    aioserve: Run, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "made-up" / "tiny").mkdir(parents=True)
    with Hub({}) as hub:
        done = aioserve("run", "made-up/tiny", "x", HF_ENDPOINT=hub.url)
        assert hub.asked == []
    assert done.returncode == 2
    assert "the directory made-up/tiny has no config.json" in done.stderr


def watched(hub: Hub, forks: Forks) -> Terminal:
    os.environ["HF_ENDPOINT"] = hub.url  # reset by the fixture `cache`
    return Terminal("run", "made-up/tiny", "x", "--max-tokens", "2", forks=forks, term="xterm")


@pytest.mark.more
def test_a_bar_shows_how_far_a_download_is(
    forking: Forks, cache: Path, files: dict[str, bytes]
) -> None:
    hold = threading.Event()
    with (
        Hub({"made-up/tiny": Repository(files, hold=hold)}) as hub,
        watched(hub, forking) as terminal,
    ):
        terminal.expect(r"downloading made-up/tiny")
        terminal.expect(r"[1-9][\d.]*/[\d.]+ kB")  # a part is here, without the weights
        hold.set()
        terminal.expect("output token")
        assert terminal.exit_code() == 0


@pytest.mark.more
def test_an_interrupted_download_is_no_model_and_goes_on_the_next_time(
    aioserve: Run, forking: Forks, cache: Path, files: dict[str, bytes], tiny_model: Path
) -> None:
    with Hub({"made-up/tiny": Repository(files, hold=threading.Event())}) as hub:
        with watched(hub, forking) as terminal:
            terminal.expect(r"[1-9][\d.]*/[\d.]+ kB")
            terminal.send(CTRL_C)
            assert terminal.exit_code() == 130
            assert "Traceback" not in terminal.seen
        hub.repositories["made-up/tiny"].hold = None
        done = aioserve("run", "made-up/tiny", "x", "--max-tokens", 2, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert snapshot(cache, "made-up/tiny") == {file.name for file in tiny_model.iterdir()}


@pytest.mark.more
def test_a_hub_that_hangs_up_is_one_line(aioserve: Run, cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        done = aioserve("run", "made-up/tiny", "x", HF_ENDPOINT=f"http://127.0.0.1:{port}")
        server.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 1
    assert "can't be reached" in done.stderr
    assert done.stderr.count("\n") == 1
