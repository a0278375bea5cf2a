"""The tutorial is right about the project that `aioserve plugins new` writes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from aioserve import SchedulingPolicy
from aioserve.cli._plugin_project import write_project
from tests.docs.pages import ROOT, blocks

TUTORIAL = ROOT / "docs" / "tutorial" / "write-a-policy.md"


def namespace_of(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "told"}
    exec(compile(source, "told", "exec", dont_inherit=True), namespace)
    return namespace


def printed_of(policy: SchedulingPolicy, capsys: pytest.CaptureFixture[str]) -> str:
    """The tutorial's `try_out` of a policy, as it prints it."""
    (trial,) = (one.text for one in blocks(TUTORIAL) if "def try_out" in one.text)
    functions = trial[: trial.index("theirs =")]
    capsys.readouterr()
    namespace_of(functions)["try_out"](policy)
    return capsys.readouterr().out.strip()


def test_a_new_project_has_the_policy_that_the_tutorial_ends_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = blocks(TUTORIAL)
    (told,) = (one for one in shown if "class ExpressLane" in one.text and "__init__" in one.text)
    definition = (
        "from aioserve import SchedulingPolicy\n\n" + told.text[: told.text.index("aged =")]
    )
    theirs = namespace_of(definition)["ExpressLane"]
    project, _ = write_project("express_lane", tmp_path, ())
    source = (project / "src" / "express_lane" / "__init__.py").read_text(encoding="utf-8")
    mine = namespace_of(source)["ExpressLanePolicy"]

    def defaults(policy: type[SchedulingPolicy]) -> dict[str, Any]:
        parameters = inspect.signature(policy).parameters.values()
        return {one.name: one.default for one in parameters}

    assert defaults(mine) == defaults(theirs)
    (printed,) = (one.text for one in shown if one.tag == "printed" and one.line > told.line)
    assert printed_of(mine(), capsys) == printed
    read_me = (project / "README.md").read_text(encoding="utf-8")
    for name, value in defaults(mine).items():
        assert f"| `{name}` | {value} |" in read_me
