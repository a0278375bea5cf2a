"""How hypothesis runs here: without deadlines, and in CI with the same examples every time, and
without explanations of failures, which trace every line and run into the test's time limit. `make
test` draws fewer examples, where a test doesn't say how many it needs.

Whether planted bugs are found (`make mutants`) is asked with these examples too. The smallest one
that fails is of no interest there.

And Triton's interpreter, where there is no GPU: Triton must know before the first package, here
transformers, imports it.

And where engines compute that are made without a `device`: on the CPU, in programs that tests start
too, whatever cards and drivers this machine has. A test that wants a card names it.

And how the threads that torch and numpy compute with wait for each other: OpenMP's asleep, and
OpenBLAS has one alone. By default they spin, and where two processes of tests share the cores, each
spins on what the other needs.

And signals reach what tests start where they were ignored when the tests began, in the background
of a shell say.

And engines choose the number of guesses by what is known of these alone: how long a step takes on
this machine decides no test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # when numpy is

from tests.clocks import distort

if WRONG_CLOCK := os.environ.get("AIOSERVE_CLOCK"):
    distort(WRONG_CLOCK)  # before anyone takes hold of a clock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.heard_signals import heard_signals

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("AIOSERVE_OPS", "native")

# `python -O` drops what pytest hasn't rewritten, and by itself it rewrites files named `test_*`.
FOLDERS = [path.name for path in Path(__file__).parent.iterdir() if path.is_dir()]
pytest.register_assert_rewrite(*(f"tests.{folder}" for folder in FOLDERS))

settings.register_profile("developer", deadline=None)
settings.register_profile(
    "same-every-time",
    deadline=None,
    derandomize=True,
    print_blob=True,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile(
    "planted-bugs", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
# Four times the examples, a seed for each round, and nothing kept from round to round.
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=400,
    database=None,
    print_blob=True,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
USUAL = "same-every-time" if os.environ.get("CI") else "developer"
if WRONG_CLOCK:  # by which hypothesis measures how long a draw takes
    unhurried = settings(settings.get_profile(USUAL), suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(USUAL, unhurried)
settings.register_profile("quick", settings.get_profile(USUAL), max_examples=40)
settings.load_profile("fuzz" if os.environ.get("AIOSERVE_FUZZ") else USUAL)


@pytest.fixture(scope="session", autouse=True)
def signals_are_heard() -> Iterator[None]:
    with heard_signals():
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_are_unmeasured() -> Iterator[None]:
    """Before any engine of a module or a session is made."""
    from tests.doubles.unmeasured import UnmeasuredScheduler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aioserve.engine.lifecycle.Scheduler", UnmeasuredScheduler)
        yield
