"""The soak finds what is planted under it, and says how to repeat it."""

from __future__ import annotations

import pytest

from aioserve import Token
from aioserve.engine.mailbox import Mailbox
from tests.doubles.soak import main as soak


def test_a_short_soak_finds_nothing(capsys):
    assert soak(["--batch", "0", "--requests", "300", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert "300 requests" in printed
    assert "0 leaked pages, 0 lost or doubled terminal events, 0 requests with wrong" in printed


def test_a_soak_of_no_time_ends_at_once(capsys):
    assert soak(["--max-seconds", "0"]) == 0
    assert "0 requests, 0 steps" in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", range(3))
def test_what_is_planted_under_a_soak_is_found_and_can_be_repeated(batch, monkeypatch, capsys):
    put = Mailbox.put

    def losing(it: Mailbox, token: Token) -> None:
        if token.id % 8 or token.index:
            put(it, token)

    monkeypatch.setattr(Mailbox, "put", losing)
    arguments = ["--batch", str(batch), "--requests", "600", "--seed", "1"]
    assert soak(arguments) == 1
    printed = capsys.readouterr().out
    repeat = f"python -m tests.doubles.soak --seed 1 --batch {batch} --requests 600"
    assert repeat in printed
    assert soak(arguments) == 1
    strip = [line for line in printed.splitlines() if "requests/s" not in line]
    assert strip == [
        line for line in capsys.readouterr().out.splitlines() if "requests/s" not in line
    ]
