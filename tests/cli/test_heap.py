"""Objects from before a server or a measurement begins are left out of garbage collection."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import httpx
import pytest

from aioserve.cli import calibrate
from aioserve.cli._engine import frozen_heap
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess

NOTING = """
import gc, json, sys
from pathlib import Path

from aioserve import SchedulingPolicy

FROZEN = gc.get_freeze_count()  # which the interpreter begins with


class Noting(SchedulingPolicy):
    def order(self, waiting, view):
        torch = sys.modules["torch"].__dict__
        sees_torch = any(one is torch for one in gc.get_objects())
        with Path("noted").open("a") as file:
            file.write(json.dumps([gc.get_freeze_count() > FROZEN, sees_torch]) + "\\n")
        return list(waiting)
"""
LEFT_ALONE = [True, False]


@pytest.fixture
def noting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Policy that notes two facts at each call: if anything is frozen, and if the collector sees
    torch. Torch is imported once an engine has started."""
    (tmp_path / "noting.py").write_text(NOTING)
    monkeypatch.chdir(tmp_path)
    return "noting.py:Noting"


def noted() -> list[list[bool]]:
    return [json.loads(line) for line in Path("noted").read_text().splitlines()]


def test_a_server_has_its_start_out_of_the_collectors_sight(forking: Forks, noting: str) -> None:
    with ServerProcess("--policy", noting, forks=forking) as server:
        body = {"model": "pyhelp", "prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=160).status_code == 200
    assert noted()
    assert set(map(tuple, noted())) == {tuple(LEFT_ALONE)}


@pytest.mark.more
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_a_measurement_begins_as_a_server_does(
    kind: str, aioserve: Run, tiny_model: Path, noting: str
) -> None:
    sizes = ("--num-prompts", 2, "--input-len", 9, "--output-len", 4)
    done = aioserve("bench", kind, tiny_model, *sizes, "--policy", noting)
    assert done.returncode == 0, done.stderr
    warms_up, *_, measured = noted()
    assert warms_up == [False, True]
    assert measured == LEFT_ALONE


def test_calibration_measures_as_a_server_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gc.get_freeze_count()

    class SeenError(Exception):
        pass

    async def measured(*_: object) -> None:
        assert gc.get_freeze_count() > before
        raise SeenError

    monkeypatch.setattr(calibrate, "measure_grid", measured)
    with pytest.raises(SeenError):
        calibrate.calibrate(str(tiny_model), output=tmp_path / "table.json")


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.more
def test_garbage_goes_before_and_what_is_there_is_looked_at_again_behind_it() -> None:
    gone, stays = weakref.ref(Cycle()), Cycle()
    held = weakref.ref(stays)
    try:
        with frozen_heap():
            assert gone() is None
            del stays
            gc.collect()
            assert held() is not None
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        gc.collect()
    assert held() is None
