"""Help answers quickly. Its imports are checked in tests/test_cli_help.py."""

from __future__ import annotations

import resource

from tests.cli.command import Run


def test_help_lists_every_verb(aioserve: Run) -> None:
    shown = aioserve("--help").stdout
    for verb in (
        "run",
        "chat",
        "serve",
        "bench",
        "doctor",
        "plan",
        "simulate",
        "calibrate",
        "evaluate",
        "quantize",
        "plugins",
    ):
        assert verb in shown


def test_help_takes_less_than_two_seconds_of_processor_time(aioserve_anew: Run) -> None:
    # Processor time, as the machine may be busy with something else.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    aioserve_anew("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_version_is_shown(aioserve: Run) -> None:
    assert aioserve("--version").stdout.startswith("aioserve ")


def test_an_unknown_option_is_a_usage_error(aioserve: Run) -> None:
    done = aioserve("run", "pyhelp", "hello", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "Traceback" not in done.stderr
