"""`aioserve plan` shows speed, price, transfers and heads where options ask for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aioserve.capacity.prices import read_prices
from tests.cli.command import Run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "plan-memory.md"


def test_prices_of_a_file_take_the_place_of_the_examples(
    aioserve_here: Run, tmp_path: Path
) -> None:
    mine = tmp_path / "prices.toml"
    mine.write_text('as_of = "2026-01-15"\ncurrency = "EUR"\n[per_hour]\nh100 = 25\n')
    usual = ("plan", "llama-3-8b", "--hardware", "h100", "--context", "4K")
    examples = json.loads(aioserve_here(*usual, "--json").stdout)
    own = json.loads(aioserve_here(*usual, "--json", "--prices", mine).stdout)
    assert examples["prices"]["is_example"] is True
    assert examples["prices"]["per_hour"]["h100"] == read_prices().of("h100") == 2.5
    slots = [each["serving"][0]["price_per_slot_hour"] for each in (examples, own)]
    assert slots[1] == pytest.approx(10 * slots[0])
    shown = aioserve_here(*usual, "--prices", mine).stdout
    assert "EUR a slot-hour" in shown
    assert "example" not in shown
    assert "An example price, and no offer" in aioserve_here(*usual).stdout


def test_options_without_effect_are_refused(aioserve_here: Run, tmp_path: Path) -> None:
    refused = aioserve_here("plan", "gpt-2", "--prices", tmp_path / "prices.toml")
    assert refused.returncode == 2
    assert "without hardware" in refused.stderr
    empty = tmp_path / "empty.toml"
    empty.write_text('as_of = "x"\ncurrency = "EUR"\n[per_hour]\n')
    refused = aioserve_here("plan", "gpt-2", "--hardware", "h100", "--prices", empty)
    assert refused.returncode == 2
    assert "no row for h100" in refused.stderr


def test_the_tokens_of_a_seat_are_those_of_all_over_the_seats(aioserve_here: Run) -> None:
    found = json.loads(aioserve_here("plan", "gpt-2", "--seats", 7, "--json").stdout)
    assert found["tokens_per_seat"] == pytest.approx(found["capacity_tokens"] / 7)


def test_the_worked_examples_say_what_their_commands_print(aioserve_here: Run) -> None:
    _, _, examples = PAGE.read_text(encoding="utf-8").partition("## Three worked examples")
    examples, _, _ = examples.partition("\n## ")
    told = re.findall(r"(.*?)```console\n\$ aioserve (.*?)\n```", examples, flags=re.DOTALL)
    assert len(told) == 3
    figures = (
        [
            ("53.59 GiB", "53.6 GiB"),
            ("average tokens a seat: 4,390", "4,390"),
            (" 107 ", "107"),
        ],
        [(" 40.00 GiB", "40 GiB"), ("          8\n", "hold 8"), ("64 (MHA)", "64 query heads")],
        [("85.9 ms", "85.9 ms"), ("9.5 ms", "9.5 ms"), (" 28.4 ", "28.4 ms")],
    )
    for (prose, command), pairs in zip(told, figures, strict=True):
        shown = aioserve_here(*command.split()).stdout
        for printed, written in pairs:
            assert printed in shown, command
            assert written in " ".join(prose.split()), command
    tokens = json.loads(aioserve_here(*told[0][1].split(), "--json").stdout)["capacity_tokens"]
    assert f"{tokens:,}" in told[0][0]
