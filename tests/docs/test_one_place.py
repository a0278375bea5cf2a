"""Facts that several pages tell stand in one place, and the other pages say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.unsupported import NOT_THERE, not_there

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "README.md"


def test_one_page_shows_the_list_of_what_is_not_there() -> None:
    text = (ROOT / "docs" / "reference" / "supported.md").read_text(encoding="utf-8")
    table = text[text.index("| | there | not there |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert {row[0]: tuple(row[-1].split(", ")) for row in rows} == NOT_THERE


def test_what_is_refused_as_not_there_is_in_the_list() -> None:
    assert not_there("LoRA adapters") == "LoRA adapters aren't supported"
    with pytest.raises(ValueError, match="isn't in NOT_THERE"):
        not_there("speculation")


def test_one_page_says_what_no_card_has_run() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            if page == RESULTS or "no card has run" not in paragraph.casefold():
                continue
            assert "#what-no-card-has-run" in paragraph, f"{page}: {paragraph}"


def test_the_readme_names_only_what_is_on_that_list() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"## Not there yet\n\n(.+?)\. ", text, flags=re.DOTALL)
    assert named is not None
    features = re.split(r",\s+|\s+and\s+(?=macOS)", named[1].replace("\n", " "))
    known = {feature.casefold() for some in NOT_THERE.values() for feature in some}
    assert {feature.casefold() for feature in features} <= known


def test_one_page_lists_the_extras_of_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    table = text[text.index("| extra | for |") :].split("\n\n")[0]
    listed = [
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(listed) == sorted(project["optional-dependencies"].keys() - {"docs", "test"})


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/how-to/install.md", "examples/deploy/Dockerfile", "tools/torch_index"],
)
def test_installs_without_a_card_name_the_index_of_cpu_builds(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "https://download.pytorch.org/whl/cpu" in text


@pytest.mark.parametrize("device", ["mps", "vulkan", "webgpu", "tpu", "rocm", "xpu"])
def test_hardware_that_a_page_calls_refused_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device must be one of .* got '{device}'"):
        EngineConfig(device=device)
