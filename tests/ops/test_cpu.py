"""Choice of the instruction set and thread count, and the life of the pool in a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aioserve import _native

USE_THREADS = """
import torch
from aioserve import _native
from aioserve.ops import backend_named
from aioserve.ops.checks import RMSNorm
_native.set_num_threads(3)
native = backend_named("native")
x, weight = torch.randn(2000, 512), torch.ones(512)
def work():  # without an op of torch, whose own threads do not survive a fork
    return native.rms_norm(x, RMSNorm(weight, 1e-6)).numpy().tobytes()
expected = work()
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


INFO = "from aioserve import _native; i = _native.cpu_info(); print(i['isa'], i['threads'])"


def test_cpu_info_names_what_is_used_and_granted() -> None:
    info = _native.cpu_info()
    assert info["isa"] in info["isas_supported"]
    assert info["isas_supported"][0] == "portable"
    assert info["threads"] >= 1
    assert 1 <= info["affinity_cpus"] <= len(os.sched_getaffinity(0))
    assert info["cgroup_cpus"] is None or info["cgroup_cpus"] > 0


def test_the_environment_chooses_instruction_set_and_threads() -> None:
    done = run(INFO, AIOSERVE_ISA="portable", AIOSERVE_NUM_THREADS="5")
    assert done.stdout.split() == ["portable", "5"], done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AIOSERVE_ISA", "sse9", "ValueError: AIOSERVE_ISA must be one of portable"),
        ("AIOSERVE_NUM_THREADS", "two", "ValueError: AIOSERVE_NUM_THREADS must be a number"),
        ("AIOSERVE_NUM_THREADS", "0", "ValueError: AIOSERVE_NUM_THREADS must be a number"),
    ],
)
def test_a_wrong_setting_is_a_clear_error(name: str, value: str, message: str) -> None:
    done = run(INFO, **{name: value})
    assert done.returncode == 1
    assert message in done.stderr


def test_an_unknown_instruction_set_changes_nothing() -> None:
    before = _native.cpu_info()["isa"]
    with pytest.raises(ValueError, match="isa must be one of portable"):
        _native.set_isa("sse9")
    assert _native.cpu_info()["isa"] == before


def test_a_process_that_used_threads_exits_cleanly() -> None:
    done = run(USE_THREADS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.more
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = USE_THREADS + (
        "import os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    _native.set_num_threads(3)\n"
        "    os._exit(0 if work() == expected else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert work() == expected\n"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_kernels_leave_signals_to_the_host_program() -> None:
    code = USE_THREADS + (
        "import pathlib\n"
        "named = [t for t in pathlib.Path('/proc/self/task').iterdir()\n"
        "         if (t / 'comm').read_text() == 'aioserve-ops\\n']\n"
        "assert len(named) == 2, named\n"
        "for task in named:\n"
        "    line = next(x for x in (task / 'status').read_text().splitlines()\n"
        "                if x.startswith('SigBlk'))\n"
        "    assert int(line.split()[1], 16) & (1 << 1), line\n"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
