"""Text and drawing stand out from what is behind them, on light pages and on dark ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioserve.simulation import report
from aioserve.simulation.report.plot import NUM_COLORS, look_of

STYLE = (Path(report.__file__).parent / "parts" / "report.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", block))
    for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
)
TEXTS = ("text", "quiet", "accent", "better", "worse")
DRAWN = (
    *(f"c{n}" for n in range(NUM_COLORS)),
    *("prefill", "decode", "held", "cached", "good", "late", "never", "quiet", "worse", "accent"),
)


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio as WCAG 2 defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_is_that_of_the_definition() -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_stands_out(colors: dict[str, str]) -> None:
    assert set(LIGHT) == set(DARK)
    for behind in ("page", "card", "mine"):
        for name in TEXTS:
            assert contrast(colors[name], colors[behind]) >= 4.5, (name, behind)
    for name in DRAWN:
        assert contrast(colors[name], colors["card"]) >= 3, name
    assert contrast(colors["page"], colors["text"]) >= 4.5  # the readout is the other way round


def test_policies_of_one_colour_differ_in_shape() -> None:
    looks = [look_of(n) for n in range(2 * NUM_COLORS)]
    assert len(set(looks)) == len(looks)
    assert len({(look.css, look.dashes) for look in looks[: len(looks)]}) == len(looks)
