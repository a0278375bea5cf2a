"""Settings of all tests.

Hypothesis runs without deadlines, and with the same examples on every machine. It explains no
failures: that traces every line and runs into the test's time limit. `make test` draws a quarter of
the examples of `make test-more`; `make explore` draws new ones. `make mutants` asks with the usual
examples too, and doesn't look for the smallest one that fails.

Triton's interpreter stands in for a missing GPU. Triton must know before the first package, here
transformers, imports it.

Engines without a `device` compute on the CPU, in programs that tests start too, whatever cards and
drivers this machine has. A test that wants a card names it.

Threads of torch and numpy sleep while they wait: OpenMP's are told so, and OpenBLAS has one alone.
By default they spin, and two processes of tests that share the cores slow each other down.

Signals reach the programs that tests start, where tests began with them ignored: in the background
of a shell, say.

Engines choose the number of draft tokens by what is known of these alone. The time that a step
takes on this machine decides no test.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # when numpy is

from tests.clocks import distort

if WRONG_CLOCK := os.environ.get("AIOSERVE_CLOCK"):
    distort(WRONG_CLOCK)  # before anyone takes hold of a clock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.heard_signals import heard_signals
from tests.same_examples import draw_no_constants
from tests.tiers import FULL_EXAMPLES, TIERS, FileSeconds, mark_properties, mark_tiers, run_item

if TYPE_CHECKING:
    from tests.cli.forked import Forks

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("AIOSERVE_OPS", "native")

# `python -O` drops what pytest hasn't rewritten, and by itself it rewrites files named `test_*`.
FOLDERS = [path.name for path in Path(__file__).parent.iterdir() if path.is_dir()]
pytest.register_assert_rewrite(*(f"tests.{folder}" for folder in FOLDERS))

unexplained = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile(
    "usual", deadline=None, derandomize=True, print_blob=True, phases=unexplained
)
if WRONG_CLOCK:  # by which hypothesis measures how long a draw takes
    unhurried = settings(
        settings.get_profile("usual"), suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("usual", unhurried)
settings.register_profile("quick", settings.get_profile("usual"), max_examples=FULL_EXAMPLES)
settings.register_profile("few", settings.get_profile("usual"), max_examples=10)
settings.register_profile(
    "planted-bugs", settings.get_profile("usual"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile(
    "explore", deadline=None, database=None, print_blob=True, phases=unexplained
)
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of one tier: see tests/tiers.py")
    parser.addoption(
        "--file-seconds", type=float, metavar="N", help="name files whose tests took more than N s"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (tier := config.getoption("--tier")) is not None:
        if config.option.markexpr and not hasattr(config, "workerinput"):
            raise pytest.UsageError("--tier chooses by marks itself: it goes without -m")
        config.option.markexpr, profile = TIERS[tier]
        settings.load_profile(profile)
    if (most := config.getoption("--file-seconds")) is not None:
        config.pluginmanager.register(FileSeconds(most))
    if config.getoption("--hypothesis-profile") != "explore":
        draw_no_constants()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_properties(items)
    mark_tiers(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with run_item(item):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def programs_know_of_no_clock() -> None:
    """Programs that tests start refuse a variable that they don't know. Processes of xdist have
    read it by now."""
    os.environ.pop("AIOSERVE_CLOCK", None)


@pytest.fixture(scope="session", autouse=True)
def signals_are_heard() -> Iterator[None]:
    with heard_signals():
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_are_unmeasured() -> Iterator[None]:
    """Replace the engine's scheduler before any module or session makes an engine."""
    from tests.doubles.unmeasured import UnmeasuredScheduler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aioserve.engine.lifecycle.Scheduler", UnmeasuredScheduler)
        yield


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs commands and scripts in processes of their own that have torch already."""
    from tests.cli.forked import forks

    with forks(tmp_path_factory.mktemp("forks")) as forking:
        yield forking
