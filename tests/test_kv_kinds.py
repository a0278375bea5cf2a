"""Kinds of KV and storages of pages are named in few places: all else goes by groups and tiers.

A new kind of group, or a new tier, is then one more file and one more entry. Names in source text
count, and strings that are a name; docstrings and comments don't.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping

import pytest

from tests.house import PACKAGE, ROOT

KINDS = re.compile(r"(^|_)(full_?groups?|window_?groups?|windows?|windowed)(_|$)", re.IGNORECASE)
KIND_PLACES = (
    "engine",
    "execution",
    "kv",
    "paging",
    "plugins",
    "scheduling",
    "simulation",
    "steps",
    "testing",
)
KINDS_NAMED = {
    "kv/groups/": "the kinds themselves",
    "paging/layout.py": "which layers have which kind",
    "paging/pages.py": "page arithmetic of a layout's window groups",
    "engine/lifecycle.py": "limits of a model, which are public",
    "engine/step_work.py": "what layers of a model read",
    "execution/runner.py": "limits of a model, which are public",
    "execution/loading/place.py": "pages of a layout, from the arithmetic",
    "execution/gpu/attention_choice.py": "what an attention kernel is told of a layer",
    "simulation/cost.py": "facts of a cost table, a public format",
    "simulation/machine.py": "facts of a model and of a cost table",
    "simulation/options.py": "options of `simulate`, which are public",
    "simulation/simulator.py": "the same options",
    "simulation/roofline.py": "what layers of a model read",
    "simulation/report/": "windows of time",
    "testing/fake_device.py": "a stand-in for a backend",
    "testing/fake_model.py": "options of the stand-in, which are public",
    "testing/trial.py": "options of `simulate`",
}
"""Files and folders of the package that name a kind, each with the reason."""

TIERS = re.compile(r"(^|_)hosts?(_|$)|^((on|from|to)_)?device$", re.IGNORECASE)
TIER_PLACES = ("kv", "plugins", "scheduling", "steps")
TIERS_NAMED = {
    "kv/tiers/tier.py": "the names themselves",
    "kv/usage.py": "counters that are public",
    "scheduling/report.py": "keys of the dump, which are public",
}
"""Files of the package that name a tier. Places that aren't looked at have names of options, and
run on a device or have memory of the host for something else."""


OLD_NAMES = re.compile(r"(^|_)(companions?|hollow)(_|$)", re.IGNORECASE)
"""Names that pages of groups beyond group 0 had."""
NATIVE = ROOT / "native"
NATIVE_PLACES = ("pool", "tree")
"""Folders of native code that count tiers and groups, and name neither."""


def names(source: str) -> Iterator[str]:
    """Every identifier in `source`, and every string that could be one."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING and re.fullmatch(r"""(['"])\w+\1""", token.string):
            yield token.string[1:-1]


def native_names(source: str) -> Iterator[str]:
    """Every word of C++ outside of comments, `kHost` as `k_Host`."""
    for word in re.findall(r"\w+", re.sub(r"//.*", "", source)):
        yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word)


def files_that_name(pattern: re.Pattern[str], places: tuple[str, ...]) -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.split("/")[0] in places and any(
            pattern.search(name) for name in names(path.read_text(encoding="utf-8"))
        ):
            yield file


@pytest.mark.parametrize(
    ("pattern", "places", "reasons"),
    [(KINDS, KIND_PLACES, KINDS_NAMED), (TIERS, TIER_PLACES, TIERS_NAMED)],
    ids=["kinds", "tiers"],
)
def test_kinds_and_tiers_are_named_where_there_is_a_reason_alone(
    pattern: re.Pattern[str], places: tuple[str, ...], reasons: Mapping[str, str]
) -> None:
    found = list(files_that_name(pattern, places))
    unexpected = [file for file in found if not file.startswith(tuple(reasons))]
    assert not unexpected, "a group or a tier of a list does, or it is named here with the reason"
    unused = [place for place in reasons if not any(file.startswith(place) for file in found)]
    assert not unused, "no longer needed"


@pytest.mark.parametrize("pattern", [KINDS, TIERS, OLD_NAMES], ids=["kinds", "tiers", "old names"])
def test_native_pools_and_trees_name_no_kind_and_no_tier(pattern: re.Pattern[str]) -> None:
    files = [path for place in NATIVE_PLACES for path in sorted((NATIVE / place).iterdir())]
    assert files
    assert not [
        (path.name, name)
        for path in files
        for name in native_names(path.read_text(encoding="utf-8"))
        if pattern.search(name)
    ]


def test_pages_of_groups_have_one_name() -> None:
    places = tuple({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})
    assert not list(files_that_name(OLD_NAMES, places))


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("tier == kHost ? host_pages : num_device", TIERS),
        ("give_windows(pages)", KINDS),
        ("num_companions_", OLD_NAMES),
    ],
)
def test_a_native_name_of_a_kind_or_a_tier_is_found(source: str, pattern: re.Pattern[str]) -> None:
    assert any(pattern.search(name) for name in native_names(source + "  // a pool"))
    assert not any(pattern.search(name) for name in native_names(f"pool;  // {source}"))


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("lease.windows", KINDS),
        ("def f(num_window_groups): ...", KINDS),
        ("group.kind == 'window'", KINDS),
        ("WindowGroup(tiers, spec)", KINDS),
        ("memory.host_pool", TIERS),
        ("node.on_host", TIERS),
        ("tier.name == 'device'", TIERS),
        ("pool.companions(page_ids)", OLD_NAMES),
    ],
)
def test_a_name_of_a_kind_or_a_tier_is_found(source: str, pattern: re.Pattern[str]) -> None:
    assert any(pattern.search(name) for name in names(source))


def test_what_only_reads_alike_is_no_name() -> None:
    source = '"""Pages of a window, on the host."""\nwindowless = "a window"  # the host'
    assert not [name for name in names(source) if KINDS.search(name) or TIERS.search(name)]
