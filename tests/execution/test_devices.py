"""The device that an engine takes, and its errors for one that it can't take."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.cuda_driver import Card, Driver, DriverError
from aioserve.execution.devices import chosen_device, missing_packages

H200 = Card("NVIDIA H200", 141 << 30, (9, 0))
T4 = Card("Tesla T4", 15 << 30, (7, 5))

Find = Callable[[], Driver | None]


def found(*cards: Card, cuda: tuple[int, int] = (13, 0)) -> Find:
    return lambda: Driver(cuda, cards)


def broken() -> Driver | None:
    raise DriverError("cuInit of libcuda.so.1 failed with CUDA error 999")


def nothing() -> list[str]:
    return []


def never() -> Driver | None:
    raise AssertionError("nobody asked for a GPU")


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOSERVE_OPS", raising=False)


def choose(find: Find, missing: Callable[[], list[str]] = nothing, **options: Any) -> str:
    return chosen_device(EngineConfig(**options), find, missing)


@pytest.mark.parametrize(
    ("options", "cards", "device"),
    [
        ({}, [], "cpu"),
        ({}, [H200], "cuda:0"),
        ({}, [T4, H200], "cuda:1"),
        ({"graph_sizes": (1, 2)}, [H200], "cuda:0"),
        ({"device": "cuda"}, [H200], "cuda:0"),
        ({"device": "cuda:1"}, [T4, H200], "cuda:1"),
    ],
)
def test_the_first_card_that_can_be_used_is_taken(
    options: dict[str, Any], cards: list[Card], device: str
) -> None:
    assert choose(found(*cards), **options) == device


def test_without_a_driver_it_is_the_cpu() -> None:
    assert choose(lambda: None) == "cpu"


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"backend": "native"}])
def test_who_asks_for_a_cpu_gets_it_and_no_driver_is_asked(options: dict[str, Any]) -> None:
    assert choose(never, **options) == "cpu"


@pytest.mark.parametrize("name", ["native", "reference"])
def test_who_names_a_backend_in_the_environment_gets_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AIOSERVE_OPS", name)
    assert choose(never) == "cpu"


def test_auto_in_the_environment_names_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSERVE_OPS", "auto")
    assert choose(found(H200)) == "cuda:0"


@pytest.mark.parametrize(
    ("find", "absent", "reason"),
    [
        (found(T4), [], r"Tesla T4 has compute capability 7\.5, and 8\.0 is needed"),
        (found(H200), ["cupy"], r"cupy must be installed: pip install 'aioserve\[cuda13\]'"),
        (
            found(H200, cuda=(12, 8)),
            ["cupy", "triton"],
            r"cupy, triton must be installed: pip install 'aioserve\[cuda12\]'",
        ),
        (broken, [], "cuInit of libcuda.so.1 failed with CUDA error 999"),
    ],
    ids=["old card", "no CuPy", "neither", "broken driver"],
)
def test_a_card_that_cannot_be_used_is_named_with_what_to_do(
    find: Find, absent: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=rf"^device='cuda' can't be used: {reason}$"):
        choose(find, lambda: absent, device="cuda")
    with caplog.at_level(logging.WARNING):
        assert choose(find, lambda: absent) == "cpu"
    assert "running on the CPU" in caplog.text


def test_what_is_missing_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cupy", "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')\n")
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for cuda, missing in (("None", ["torch built for CUDA"]), ("'13.0'", [])):
        (folder / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\n")
        assert missing_packages() == missing
    (tmp_path / "triton.py").unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert missing_packages() == ["triton"]


@pytest.mark.parametrize(
    ("find", "reason"),
    [
        (lambda: None, r"there is no driver of NVIDIA's \(libcuda.so.1\) on this machine"),
        (found(), "the driver shows 0 GPUs, numbered from 0"),
        (found(H200, H200), "the driver shows 2 GPUs, numbered from 0"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(find: Find, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^device='cuda:2' can't be used: {reason}$"):
        choose(find, device="cuda:2")


@pytest.mark.parametrize(
    "options", [{"graph_sizes": (4,)}, {"capture_graphs": False}, {"attention": "triton"}]
)
def test_options_of_a_gpu_are_refused_where_the_cpu_is_used(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect on the CPU"):
        choose(found(), **options)
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect with a model on the CPU"):
        EngineConfig(device="cpu", **options)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:100", "cuda:1\n", "cuda:٣", 0])
def test_a_name_of_no_device_is_refused(device: Any) -> None:
    known = "'auto', 'cpu', 'cuda', or 'cuda:N' with N from 0 to 99"
    with pytest.raises(ConfigError) as refused:
        EngineConfig(device=device)
    assert str(refused.value) == f"device must be one of {known}, got {device!r}"


def test_each_device_that_an_error_names_can_be_chosen() -> None:
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:99"):
        assert EngineConfig(device=device).device == device


def test_graphs_have_sizes_that_steps_may_have() -> None:
    assert EngineConfig(graph_sizes=[4, 2]).graph_sizes == (4, 2)
    with pytest.raises(ConfigError, match="at most max_num_seqs=8, got 9"):
        EngineConfig(graph_sizes=(1, 9), max_num_seqs=8)
    with pytest.raises(ConfigError, match="graph_sizes"):
        EngineConfig(graph_sizes=(0,))
    with pytest.raises(ConfigError, match="there is nothing to capture"):
        EngineConfig(graph_sizes=(), capture_graphs=False)
    with pytest.raises(ConfigError, match="it names what computes on a CPU"):
        EngineConfig(device="cuda", backend="native")
