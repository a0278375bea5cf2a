"""The projects that `aioserve plugins new` writes: a plugin that works, its tests, and how to go
on.

Knows nothing of what is installed.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from string import Template
from typing import NamedTuple

import aioserve
from aioserve.cli import (
    _drafter_template,
    _family_template,
    _tool_parser_template,
    _weight_format_template,
)
from aioserve.errors import ConfigError

__all__ = ["write_project"]

NAME = re.compile(r"[a-z][a-z0-9_-]*")
MAX_NAME_CHARS = 64

PYPROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "$about"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["aioserve"]

[project.optional-dependencies]
test = ["aioserve[testing]", "pytest>=8"]

# The key is the name that aioserve knows the $kind by, also while its module is broken.
[project.entry-points.aioserve]
$module = "$module"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

POLICY = '''\
"""Short prompts first, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)


class $name(SchedulingPolicy):
    """Starts prompts of up to `short_tokens` uncached tokens before longer ones.

    A request for which the engine has processed `patience_tokens` tokens since it arrived goes
    before all that came later.
    """

    def __init__(self, *, short_tokens: int = 512, patience_tokens: int = 50_000) -> None:
        for name, value in (("short_tokens", short_tokens), ("patience_tokens", patience_tokens)):
            if value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        self.short_tokens = short_tokens
        self.patience_tokens = patience_tokens

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return self.patience_tokens

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        def rank(request: RequestView) -> int:
            if view.processed_tokens - request.arrival_processed_tokens >= self.patience_tokens:
                return 0
            return 1 if request.uncached_tokens <= self.short_tokens else 2

        return sorted(waiting, key=rank)  # of equal rank, in order of arrival


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("$module", $name, "short prompts first", api=1)]
'''

TESTS = '''\
"""The policy keeps its contract, and does what it is for."""

from __future__ import annotations

import pytest
from aioserve import ConfigError, Engine
from aioserve.testing import FakeModel, check_invariants, check_policy, replay, run_simulated
from $module import $name


# Prompts of the check have up to 64 tokens, and it tries bounds of up to 20,000.
def test_it_keeps_the_contract() -> None:
    check_policy(lambda: $name(short_tokens=16, patience_tokens=1000))


@pytest.mark.parametrize("patience_tokens", [0, 100])
def test_it_keeps_the_contract_with_less_patience(patience_tokens) -> None:
    check_policy(lambda: $name(short_tokens=8, patience_tokens=patience_tokens), max_examples=50)


def test_a_negative_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="patience_tokens must not be negative, got -1"):
        $name(patience_tokens=-1)


def test_most_requests_wait_less_than_under_fcfs() -> None:
    mine = replay("heavy-tails", $name(), max_num_seqs=3)
    theirs = replay("heavy-tails", "fcfs", max_num_seqs=3)
    assert mine.ttft_seconds is not None
    assert theirs.ttft_seconds is not None
    assert mine.ttft_seconds.p50 < theirs.ttft_seconds.p50


def test_an_engine_serves_under_it_by_name() -> None:
    async def serve() -> None:
        async with Engine(FakeModel(), policy="$module:short_tokens=2") as engine:
            completion = await engine.generate([1, 2, 3])
            assert completion.token_ids
            check_invariants(engine)

    run_simulated(serve)
'''

README = """\
# $distribution

A scheduling policy for aioserve: short prompts first, and
nobody waits for ever.

    pip install --editable '.[test]'
    aioserve plugins                    # it is listed
    aioserve plugins check $module:patience_tokens=1000
    pytest

Compare it with others on a made-up workload or a recorded trace:

    aioserve simulate --synthetic heavy-tails --rate 12 --max-num-seqs 8 \\
        --policy fcfs --policy $module:short_tokens=128

Serve with it:

    async with Engine("path/to/model", policy="$module:short_tokens=128") as engine:
        ...

| option | default | |
| --- | --- | --- |
| `short_tokens` | 512 | prompts with at most this many uncached tokens are short |
| `patience_tokens` | 50000 | what the engine processes before a request goes first |
"""

GITIGNORE = """\
__pycache__/
*.egg-info/
build/
dist/
.venv/
"""


class Kind(NamedTuple):
    """Kind of plugin that a project holds."""

    name: str
    about: str
    """Description of the project."""
    source: str
    """Texts of files with placeholders for names, like the next two."""
    tests: str
    readme: str
    steps: tuple[str, ...]
    """Commands to run with it, beside installing it and running its tests."""


KINDS = {
    "policy": Kind(
        "policy",
        "A scheduling policy for aioserve: short prompts first",
        POLICY,
        TESTS,
        README,
        (
            "aioserve plugins check $module:patience_tokens=1000",
            "aioserve simulate --synthetic heavy-tails --rate 12 --max-num-seqs 8"
            " --policy fcfs --policy $module",
        ),
    ),
    "drafter": Kind(
        "drafter",
        "A drafter for aioserve: what followed the last tokens before",
        _drafter_template.DRAFTER,
        _drafter_template.TESTS,
        _drafter_template.README,
        (
            "aioserve plugins check $module",
            "aioserve bench latency pyhelp --speculation $module",
        ),
    ),
    "tool-parser": Kind(
        "tool parser",
        "A format of tool calls for aioserve: JSON behind a mark",
        _tool_parser_template.PARSER,
        _tool_parser_template.TESTS,
        _tool_parser_template.README,
        ("aioserve plugins check $module",),
    ),
    "model-family": Kind(
        "model family",
        "A family of models for aioserve: Llama's decoder with norms of heads",
        _family_template.FAMILY,
        _family_template.TESTS,
        _family_template.README,
        ("aioserve plugins check $module",),
    ),
    "weight-format": Kind(
        "weight format",
        "A format of weights for aioserve: 8-bit integers",
        _weight_format_template.FORMAT,
        _weight_format_template.TESTS,
        _weight_format_template.README,
        ("aioserve plugins check $module",),
    ),
}


def write_project(
    name: str, parent: Path, taken: Collection[str], kind: str = "policy"
) -> tuple[Path, list[str]]:
    """Write the project of a plugin `name` below `parent`. Return its directory, and
    what to do with it next: commands.

    Returns its directory, and the commands to run with it next.

    Raises `ConfigError` for a name that can't be a module's, or whose class would have a name of
    aioserve's. Also if a plugin or another module has the name, and if the directory exists or
    can't be made.
    """
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"name must be 1 to {MAX_NAME_CHARS} lower-case letters, digits, '_' and '-', a letter "
            f"first, got {name!r}"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        raise ConfigError(f"name: {module!r} is a keyword of Python; choose another name")
    wanted = KINDS[kind]
    stem = "".join(part.capitalize() for part in module.split("_"))
    class_name = stem + "".join(part.capitalize() for part in kind.split("-"))
    if class_name in aioserve.__all__:
        raise ConfigError(f"name: aioserve has a class {class_name} itself; choose another name")
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"name: there is a Python module {module!r} already; choose another name")
    if module in taken:
        raise ConfigError(f"name: a plugin offers {module!r} already; choose another name")
    project = parent / module
    values = {
        "distribution": module.replace("_", "-").rstrip("-"),
        "module": module,
        "name": class_name,
        "stem": stem,
        "kind": wanted.name,
        "about": wanted.about,
    }
    files = {
        "pyproject.toml": PYPROJECT,
        f"src/{module}/__init__.py": wanted.source,
        f"tests/test_{module}.py": wanted.tests,
        "README.md": wanted.readme,
        ".gitignore": GITIGNORE,
    }
    try:
        project.mkdir(parents=True)
        for path, text in files.items():
            file = project / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(values), encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"dir: {project} exists already") from None
    except OSError as error:
        raise ConfigError(f"dir: {project} can't be written: {error}") from error
    return project, [
        f"pip install --editable {shlex.quote(f'{project}[test]')}",
        *[Template(step).substitute(values) for step in wanted.steps],
        f"pytest {shlex.quote(str(project))}",
    ]
