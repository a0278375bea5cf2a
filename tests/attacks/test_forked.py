"""A forked process has the engine and its loop, and none of the threads that do the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.attacks.test_from_where import documented

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

PROGRAM = """\
import asyncio, gc, json, os, sys, warnings
from aioserve import AioserveError, Engine
from tests.attacks.engines import LONG, SHORT, a_model, awaited
from tests.attacks.test_from_where import CALLS

def outcomes(at_home, engine, stream):
    found = {}
    for name, call in CALLS.items():
        try:
            at_home(call)
            found[name] = "works"
        except AioserveError as error:
            found[name] = type(error).__name__
            here = f"process {os.getppid()}, and this is process {os.getpid()}"
            assert name == "Engine.__aenter__" or here in str(error), error
    return found

def in_child(tell):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            tell()
        except BaseException as error:
            print("raised", repr(error))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

AT_REST = """
loop = asyncio.new_event_loop()

def at_home(call):
    return loop.run_until_complete(awaited(lambda: call(engine, stream)))

async def begin():
    engine = await Engine(a_model()).__aenter__()
    stream = engine.stream([1], LONG)
    await stream.started()
    return engine, stream

engine, stream = loop.run_until_complete(begin())
in_child(lambda: print(json.dumps(outcomes(at_home, engine, stream))))
stream.close()
print(len(at_home(lambda e, s: e.generate([1], SHORT)).token_ids))
at_home(lambda e, s: e.__aexit__(None, None, None))
loop.close()
"""

FROM_A_COROUTINE = """
def by_hand(call):
    result = call(engine, stream)
    if asyncio.iscoroutine(result):
        try:
            result.send(None)
        except StopIteration:
            return
        finally:
            result.close()
        raise AssertionError("it waits")

async def main():
    global engine, stream
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], LONG)
        await stream.started()
        in_child(lambda: print(json.dumps(outcomes(by_hand, engine, stream))))
        stream.close()
        print(len((await engine.generate([1], SHORT)).token_ids))

asyncio.run(main())
"""

DROPPED = """
loop = asyncio.new_event_loop()
engine = loop.run_until_complete(Engine(a_model()).__aenter__())

def drop():
    global engine
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    print([str(one.message) for one in told if one.category is ResourceWarning])

in_child(drop)
print(len(loop.run_until_complete(engine.generate([1], SHORT)).token_ids))
loop.run_until_complete(engine.__aexit__(None, None, None))
loop.close()
"""

OF_ITS_OWN = """
engine = Engine(a_model())

async def main():
    async with engine:
        print(len((await engine.generate([1], SHORT)).token_ids))

in_child(lambda: asyncio.run(main()))
asyncio.run(main())
"""


def printed(program: str) -> list[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.more
@pytest.mark.parametrize("program", [AT_REST, FROM_A_COROUTINE], ids=["at rest", "in a coroutine"])
def test_in_a_forked_process_each_call_works_or_names_both_processes(program: str) -> None:
    told, in_parent = printed(program)
    outcomes = json.loads(told)
    expected = {name: where.strip("`") for name, (where, _) in documented().items()}
    assert outcomes == {name: {"yes": "works"}.get(o, o) for name, o in expected.items()}
    assert in_parent == "4"  # and there, all goes on


def test_an_engine_that_a_forked_process_drops_goes_on_in_the_other() -> None:
    assert printed(DROPPED) == ["[]", "4"]


@pytest.mark.more
def test_a_forked_process_enters_an_engine_that_was_made_before() -> None:
    assert printed(OF_ITS_OWN) == ["4", "4"]
