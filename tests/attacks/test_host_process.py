"""Effects of an engine on the process that it is part of, seen by Python's audit hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, gc, json, logging, multiprocessing, os, signal, sys, threading

audited = []

def note(event, args):
    if event.partition(".")[0] in NOTED or event in NOTED:
        audited.append(f"{event} {args!r}")

NOTED = {
    "subprocess", "pty", "socket", "signal.pthread_kill", "os.chdir", "os.system", "os.fork",
    "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg",
    "sys.settrace", "sys.setprofile", "sys.unraisablehook", "sys.excepthook", "gc",
}

def watched(name, call):
    def calls(*args):
        note("gc." + name, args)
        return call(*args)
    setattr(gc, name, calls)

for name in ("collect", "freeze", "unfreeze", "set_threshold", "set_debug"):
    watched(name, getattr(gc, name))

def state(loop):
    return {
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(),
                      len(gc.callbacks)],
        "signals": [id(signal.getsignal(number)) for number in signal.valid_signals()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "directory": os.getcwd(),
        "limits": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "hooks": [repr(sys.excepthook), repr(sys.unraisablehook), repr(threading.excepthook)],
        "log": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "loop": [repr(loop.get_exception_handler()), loop.get_debug(), len(asyncio.all_tasks())],
        "output": [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
    }

def own_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("aioserve")]

async def main():
    loop = asyncio.get_running_loop()
    before = state(loop)
    import torch  # its CUDA build asks `ldconfig`, once, where the libraries of CUDA are
    sys.addaudithook(note)
    from aioserve import Engine, SamplingParams
    if PLANTED:
        await (await asyncio.create_subprocess_exec("true")).wait()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        gc.freeze()
    async with Engine("pyhelp", num_pages=64) as engine:
        await engine.generate("import os\\n" * 100, SamplingParams(max_tokens=4))
        during = own_threads()
    after = state(loop)
    return {
        "audited": audited, "during": during, "left": own_threads(),
        "changed": {name: [before[name], after[name]] for name in before
                    if before[name] != after[name]},
    }

print(json.dumps(asyncio.run(main())))
"""


def found_by(*, planted: bool) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("PLANTED", repr(planted))],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.mark.more
def test_an_engine_starts_no_process_opens_no_socket_and_leaves_the_process_as_it_was() -> None:
    assert found_by(planted=False) == {
        "audited": [],
        "during": ["aioserve-pyhelp", "aioserve-encode-pyhelp"],
        "left": [],
        "changed": {},
    }


@pytest.mark.more
def test_what_is_started_and_changed_is_seen() -> None:
    found = found_by(planted=True)
    assert "subprocess.Popen" in str(found["audited"])
    assert "gc.freeze" in str(found["audited"])
    assert "signals" in str(found["changed"])
    assert "collector" in str(found["changed"])


THREADS = """
import asyncio
from pathlib import Path
from aioserve import Engine, SamplingParams

def threads_of_the_kernels():
    files = Path("/proc/self/task").glob("*/comm")
    return sorted(file.parent.name for file in files if file.read_text() == "aioserve-ops\\n")

async def main():
    seen = [threads_of_the_kernels()]
    for _ in range(3):
        async with Engine("pyhelp", num_pages=64) as engine:
            await engine.generate("import os", SamplingParams(max_tokens=4))
        seen.append(threads_of_the_kernels())
    print([len(threads) for threads in seen], all(threads == seen[1] for threads in seen[1:]))

asyncio.run(main())
"""


@pytest.mark.more
def test_the_threads_of_the_kernels_are_those_of_the_first_engine_ever_after() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        env=os.environ | {"AIOSERVE_NUM_THREADS": "3"},
    )
    assert done.stdout.strip() == "[0, 2, 2, 2] True"
