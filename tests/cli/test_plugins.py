"""`aioserve plugins`: the list, the checks, and the new project."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from aioserve.plugins import PluginRegistry
from aioserve.plugins import installed as installed_module
from tests.cli.command import Run
from tests.plugin_system.planted import entry_point

GOOD = """\
from aioserve import *

class Backwards(SchedulingPolicy):
    def __init__(self, *, broken: bool = False):
        self.broken = broken
    def order(self, waiting, view):
        return waiting + waiting if self.broken else reversed(waiting)

class Fewest:
    def key(self, use):
        return use.hits

class Fickle:
    calls = 0
    def key(self, use):
        Fickle.calls += 1
        return Fickle.calls

class Counter(Observer):
    pass

class Divider(Observer):
    def step_finished(self, step):
        1 / 0

@hookimpl
def aioserve_scheduling_policies():
    return [PolicySpec("backwards", Backwards, "last come, first served")]

@hookimpl
def aioserve_eviction_strategies():
    return [EvictionSpec("fewest", Fewest, "few hits first"), EvictionSpec("fickle", Fickle)]

@hookimpl
def aioserve_observers():
    return [ObserverSpec("counter", Counter), ObserverSpec("divider", Divider)]

class Repeating(Drafter):
    def __init__(self, *, often: int = 100):
        self.often, self.last = often, {}
    def start(self, slot, sequence):
        self.last[slot] = 0
    def extend(self, slot, token_ids):
        self.last[slot] = token_ids[-1]
    def draft(self, slot, limit):
        return [self.last[slot]] * self.often
    def end(self, slot):
        del self.last[slot]

@hookimpl
def aioserve_drafters():
    return [DrafterSpec("repeating", Repeating, "the last token again")]

@hookimpl
def aioserve_admit(request):
    return None
"""

PACK = """\
from aioserve import *

@hookimpl
def aioserve_scheduling_policies():
    return [PolicySpec("only_in_pack", SchedulingPolicy), PolicySpec("fcfs", SchedulingPolicy)]
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Function that installs a module as a distribution with one plugin, and returns PYTHONPATH."""

    def install(name: str, source: str, version: str = "3.4") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}_dist-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[aioserve]\n{name} = {name}\n")
        return str(tmp_path)

    return install


@pytest.mark.more
def test_everything_that_plugins_offer_is_listed(aioserve_anew: Run, install: Install) -> None:
    install("bad", "raise RuntimeError('planted')")
    path = install("all_kinds", GOOD)
    done = aioserve_anew("plugins", "--all", "--json", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)}
    assert rows["policy", "backwards"] == {
        "kind": "policy",
        "name": "backwards",
        "description": "last come, first served",
        "distribution": "all_kinds-dist",
        "version": "3.4",
        "api": 1,
        "state": "ready",
        "cause": None,
    }
    assert {("policy", "fcfs"), ("eviction", "lru"), ("eviction", "fewest")} <= rows.keys()
    assert {("drafter", "ngram"), ("drafter", "suffix"), ("drafter", "repeating")} <= rows.keys()
    assert rows["observer", "counter"]["state"] == "active"
    assert rows["admission", "all_kinds"]["state"] == "active"
    broken = rows["plugin", "bad"]
    assert (broken["state"], broken["cause"]) == ("broken", "RuntimeError('planted')")

    table = aioserve_anew("plugins", PYTHONPATH=path).stdout
    assert "backwards" in table
    assert "planted" not in table
    assert "1 more can't be used; --all shows it" in table
    table = aioserve_anew("plugins", "--all", PYTHONPATH=path, AIOSERVE_PLUGINS="off").stdout
    assert "off: AIOSERVE_PLUGINS" in table
    assert "backwards" not in table
    assert "fcfs" in table


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("backwards", 0, "policy backwards (all_kinds-dist 3.4) keeps its contract: 20 random"),
        ("backwards:broken=true", 1, "policy backwards:broken=true (all_kinds-dist 3.4) fails"),
        ("fewest", 0, "eviction strategy fewest (all_kinds-dist 3.4) keeps its contract"),
        ("fickle", 1, "eviction strategy fickle (all_kinds-dist 3.4) fails: key("),
        ("counter", 0, "observer counter (all_kinds-dist 3.4) keeps its contract"),
        ("divider", 1, "divider (all_kinds-dist 3.4) fails: ZeroDivisionError"),
        ("all_kinds", 1, "admission all_kinds (all_kinds-dist 3.4) keeps its contract"),
        ("bad", 1, "bad (bad-dist 3.4) is broken: RuntimeError('planted')"),
        (
            "backwards:broke=1",
            2,
            "has no option 'broke'; did you mean broken? There are: broken (true or",
        ),
        (
            "model:path=small",
            2,
            "drafter 'model:path=small' drafts by a model that an engine",
        ),
        ("bad:size=1", 1, "bad (bad-dist 3.4) is broken: RuntimeError('planted')"),
        ("pack", 1, "pack (pack-dist 3.4) is broken: PluginError("),
        ("only_in_pack", 1, "pack (pack-dist 3.4) is broken: PluginError("),
        (
            "counter:foo=1",
            2,
            "only policies, eviction strategies, logits processors and drafters have options",
        ),
        (
            "all_kinds:foo=1",
            2,
            "only policies, eviction strategies, logits processors and drafters have options",
        ),
        ("repeating", 1, "drafter repeating (all_kinds-dist 3.4) fails: the last of these calls"),
        ("repeating:often=1", 0, "behind a prompt of 32,768 tokens a step takes"),
        ("repeating:often=x", 2, "option 'often' of drafter 'repeating' must be a whole number"),
        ("lru", 2, "eviction strategy 'lru' is built in: there is no plugin to check"),
        ("slru:foo=1", 2, "eviction strategy 'slru' is built in"),
        ("sideways", 2, "no plugin offers 'sideways'; there are: all_kinds, backwards, bad"),
    ],
)
def test_a_check_says_who_keeps_the_contract(
    aioserve_here: Run,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    said: str,
) -> None:
    install("bad", "raise RuntimeError('planted')")
    install("pack", PACK)
    monkeypatch.syspath_prepend(install("all_kinds", GOOD))
    for module in ("all_kinds", "pack"):
        sys.modules.pop(module, None)
    done = aioserve_here("plugins", "check", name, "--examples", 20)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_a_check_of_what_the_environment_leaves_out_says_so(
    aioserve_here: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("all_kinds", GOOD))
    monkeypatch.setenv("AIOSERVE_PLUGINS", "off")
    done = aioserve_here("plugins", "check", "all_kinds")
    assert done.returncode == 2
    assert "AIOSERVE_PLUGINS leaves out plugin 'all_kinds' (all_kinds-dist 3.4)" in done.stderr


@pytest.mark.more
def test_a_strategy_of_a_plugin_is_simulated_by_name(
    aioserve_here: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("all_kinds", GOOD))
    sys.modules.pop("all_kinds", None)
    workload = ("--synthetic", "conversations", "--num-pages", 600, "--json")
    shares = set()
    for eviction in ("fewest", "lru"):
        done = aioserve_here("simulate", *workload, "--eviction", eviction)
        assert done.returncode == 0, done.stderr
        metrics = json.loads(done.stdout)["policies"]["fcfs"]
        assert metrics["finished"] == 500
        shares.add(metrics["token_hit_share"])
    assert len(shares) == 2


def test_no_examples_are_no_check(aioserve_here: Run) -> None:
    for examples in (0, 10**19):
        done = aioserve_here("plugins", "check", "fcfs", "--examples", examples)
        assert done.returncode == 2
        assert f"examples must be in [1, 1000000], got {examples}" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name must be 1 to 64 lower-case letters"),
        ("Mine", "name must be 1 to 64 lower-case letters"),
        ("2nd", "name must be 1 to 64 lower-case letters"),
        ("a/b", "name must be 1 to 64 lower-case letters"),
        ("a" * 65, "name must be 1 to 64 lower-case letters"),
        ("class", "'class' is a keyword of Python"),
        ("match", "'match' is a keyword of Python"),
        ("scheduling", "aioserve has a class SchedulingPolicy itself"),
        ("json", "there is a Python module 'json' already"),
        ("round-robin", "a plugin offers 'round_robin' already"),
        ("there", "there exists already"),
    ],
)
def test_a_project_is_not_written_over_anything(
    aioserve_here: Run, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "there").mkdir()
    done = aioserve_here("plugins", "new", name, "--dir", tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["none", "true", "policy-spec", "engine", "config-error"])
def test_whatever_it_is_called_a_new_project_works(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    parent = tmp_path / "a b"
    done = aioserve_here("plugins", "new", name, "--dir", parent)
    assert done.returncode == 0, done.stderr
    module = name.replace("-", "_")
    project = parent / module
    assert f"pytest '{project}'" in done.stdout
    assert f"--editable '{project}[test]'" in done.stdout
    monkeypatch.syspath_prepend(project / "src")
    plugin = importlib.import_module(module)
    tests = runpy.run_path(str(project / "tests" / f"test_{module}.py"))
    try:
        policy = PluginRegistry([plugin]).policy(module)
        assert type(policy).__module__ == module
        assert type(policy) in tests.values()
        tests["test_a_negative_option_is_refused"]()
        tests["test_most_requests_wait_less_than_under_fcfs"]()
    finally:
        sys.modules.pop(module)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["none", "drafting-again", "drafter-spec"])
def test_a_new_project_of_a_drafter_works(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    done = aioserve_here("plugins", "new", name, "--kind", "drafter", "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    module = name.replace("-", "_")
    assert f"--speculation {module}" in done.stdout
    project = tmp_path / module
    monkeypatch.syspath_prepend(project / "src")
    plugin = importlib.import_module(module)
    found = [*entry_points(group="aioserve"), entry_point(module, lambda: plugin)]
    monkeypatch.setattr(installed_module, "entry_points", lambda group: found)
    tests = runpy.run_path(str(project / "tests" / f"test_{module}.py"))
    try:
        assert type(PluginRegistry().drafter(module)) in tests.values()
        for name, test in tests.items():
            if name.startswith("test_") and "other_options" not in name:
                test()
    finally:
        sys.modules.pop(module)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["granite-calls", "json_calls"])
def test_a_new_project_of_a_tool_parser_works(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    done = aioserve_here("plugins", "new", name, "--kind", "tool-parser", "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    module = name.replace("-", "_")
    project = tmp_path / module
    monkeypatch.syspath_prepend(project / "src")
    plugin = importlib.import_module(module)
    found = [*entry_points(group="aioserve"), entry_point(module, lambda: plugin)]
    monkeypatch.setattr(installed_module, "entry_points", lambda group: found)
    tests = runpy.run_path(str(project / "tests" / f"test_{module}.py"))
    try:
        assert PluginRegistry().tool_parsers[module].spec.value is plugin.FORMAT
        for name, test in tests.items():
            if name.startswith("test_") and name != "test_it_reads_a_call":
                test()
        tests["test_it_reads_a_call"]("Oslo")
    finally:
        sys.modules.pop(module)


@pytest.mark.parametrize(
    ("kind", "spec"), [("model-family", "FAMILY"), ("weight-format", "FORMAT")]
)
def test_a_new_project_of_a_kind_of_model_works(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, spec: str
) -> None:
    done = aioserve_here("plugins", "new", "normed", "--kind", kind, "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    project = tmp_path / "normed"
    monkeypatch.syspath_prepend(project / "src")
    plugin = importlib.import_module("normed")
    tests = runpy.run_path(str(project / "tests" / "test_normed.py"))
    try:
        registry = PluginRegistry([plugin])
        (offer,) = [*registry.model_families.values(), *registry.weight_formats.values()]
        assert offer.spec.value is getattr(plugin, spec)
        for name, test in tests.items():
            if name.startswith("test_"):
                test()
    finally:
        sys.modules.pop("normed")


@pytest.mark.more
def test_a_new_project_is_installed_listed_checked_simulated_and_served(tmp_path: Path) -> None:
    """Runs in new processes, in a directory where only installed packages are found."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "160"}

    def python(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
            cwd=elsewhere,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def aioserve(*arguments: object) -> str:
        return python("-m", "aioserve", *arguments)

    told = aioserve("plugins", "new", "two-classes", "--dir", tmp_path)
    project = tmp_path / "two_classes"
    assert f"{project} is ready" in told
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    python("-m", "pip", "install", *offline, "--target", site, project)

    (row,) = [
        row for row in json.loads(aioserve("plugins", "--json")) if row["name"] == "two_classes"
    ]
    assert (row["distribution"], row["version"]) == ("two-classes", "0.1.0")
    assert (row["kind"], row["api"], row["state"]) == ("policy", 1, "ready")

    checked = aioserve("plugins", "check", "two_classes:patience_tokens=64", "--examples", 30)
    assert "keeps its contract" in checked

    (command,) = (line.split()[1:] for line in told.splitlines() if "simulate" in line)
    policies = json.loads(aioserve(*command, "--json"))["policies"]
    theirs, mine = policies["fcfs"], policies["two_classes"]
    assert mine["finished"] == 500
    assert mine["ttft_seconds"]["p50"] < 0.9 * theirs["ttft_seconds"]["p50"]

    name = "two_classes:short_tokens=64"
    load = ("--num-prompts", 3, "--input-len", 12, "--output-len", 4, "--json", "-")
    served = aioserve("bench", "throughput", "pyhelp", "--policy", name, *load)
    assert json.loads(served)["options"]["policy"] == name

    assert "passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", project)
