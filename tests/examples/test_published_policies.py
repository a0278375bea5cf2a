"""The published policies of examples/policies. Each keeps the contract and its paper's claim, needs
few lines, is installed as its own project, and changes no token."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from aioserve import Engine, EngineStats, SamplingParams, SchedulingPolicy
from aioserve.testing import FakeModel, check_policy, run_simulated
from tests.tiers import examples

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "policies"
PAGE = (ROOT / "docs" / "reference" / "published-policies.md").read_text(encoding="utf-8")


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    # It adds the project, whose plugins others would find there if it was ever built.
    with mock.patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(module)
    return module


published = loaded(ROOT / "benchmarks" / "published.py")
MODULES = {module.__name__.partition(".")[2]: module for module in published.POLICIES}
SPECS = {
    spec.name: spec
    for module in published.POLICIES
    for spec in module.aioserve_scheduling_policies()
}
SMALL: dict[str, dict[str, Any]] = {
    "andes": {"reading_seconds": 0.05, "buffer_seconds": 0.1},
    "fastserve": {"quantum_tokens": 2, "prompt_tokens": 8, "patience_tokens": 2000},
    "past_future": {"window": 8, "least_answers": 2},
    "sarathi": {"tbt_seconds": 0.02, "least_tokens": 4},
    "dfs_weight": {"block_tokens": 4},
}
"""Options with which small workloads come to where a policy decides something."""


LONG = [
    study
    for study in published.STUDIES
    if study.policy in ("andes", "orca", "past_future", "srpt", "vtc")
]
"""Studies that take seconds."""


def make(name: str) -> Any:
    return SPECS[name].factory(**SMALL.get(name, {}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_each_keeps_the_contract(name):
    check_policy(lambda: make(name), max_examples=examples(12))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("study", LONG, ids=lambda study: study.policy)
def test_each_keeps_the_claim_of_its_paper_with_half_as_many_requests(study):
    smaller = msgspec.structs.replace(study, num_requests=study.num_requests // 2)
    finding = published.found(smaller, seed=0)
    assert finding.holds, published.table([finding])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "study",
    [pytest.param(s, marks=[pytest.mark.slow] if s in LONG else []) for s in published.STUDIES],
    ids=lambda study: study.policy,
)
def test_each_keeps_the_claim_of_its_paper_with_the_figures_of_the_page(study):
    finding = published.found(study, seed=0)
    assert finding.holds, published.table([finding])
    assert set(published.table([finding]).splitlines()) <= set(PAGE.splitlines())


BUNDLED = ("priority", "deadline")
QUESTIONS = {
    *("order", "admit", "chunk", "victim", "precedence", "displaces", "preempt"),
    *("begin_step", "order_prefills", "decode", "reserve", "drop", "pin", "unpin"),
}


def test_every_policy_has_a_study_and_a_row_in_the_docs():
    assert sorted(study.policy for study in published.STUDIES) == sorted([*SPECS, *BUNDLED])
    for name in SPECS:
        assert f"| `{name}` |" in PAGE
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]["aioserve"]) == set(MODULES)


@pytest.mark.parametrize("study", published.STUDIES, ids=lambda study: study.policy)
def test_the_page_says_which_questions_a_policy_answers(study):
    policy = study.sides[0].make()
    answered = {q for q in QUESTIONS if getattr(type(policy), q) is not vars(SchedulingPolicy)[q]}
    assert answered == QUESTIONS & set(study.hooks.split(", "))


@pytest.mark.parametrize(("name", "most"), [("fastserve", 60), ("andes", 60)])
def test_a_policy_that_preempts_takes_few_lines(name, most):
    """Statements of the class, without docstrings."""
    tree = ast.parse(inspect.getsource(MODULES[name]))
    (policy,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    lines = {
        line
        for node in ast.walk(policy)
        if isinstance(node, ast.stmt) and not _is_docstring(node)
        for line in range(node.lineno, _end_of_head(node) + 1)
    }
    assert len(lines) < most


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _end_of_head(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return body[0].lineno - 1 if body else node.end_lineno or node.lineno


def test_every_request_has_the_tokens_that_it_has_under_fcfs():
    def answers(policy: Any) -> list[tuple[int, ...]]:
        async def serve() -> list[tuple[int, ...]]:
            model = FakeModel(num_pages=24, max_model_len=128)
            async with Engine(model, policy=policy, max_num_seqs=4, num_host_pages=16) as engine:

                async def one(number: int) -> tuple[int, ...]:
                    await asyncio.sleep(0.01 * number)
                    prompt = [*range(number % 3 * 8), number]
                    max_tokens = 8 + 5 * (number % 7)
                    answer = await engine.generate(
                        prompt,
                        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=number),
                        tenant=f"t{number % 3}",
                        predicted_output_tokens=max_tokens - number % 3,
                    )
                    return tuple(answer.token_ids)

                return await asyncio.gather(*(one(number) for number in range(24)))

        return run_simulated(serve)

    expected = answers("fcfs")
    for name in SPECS:
        assert answers(make(name)) == expected, name


def served(policy: Any) -> tuple[list[tuple[int, ...]], EngineStats]:
    """Return completions of the embedded model and the engine's statistics, on this machine's
    clock. The callers have targets, and are too many for the seats and pages."""

    async def one(engine: Engine, number: int) -> tuple[int, ...]:
        await asyncio.sleep(0.002 * number)
        answer = await engine.generate(
            "Once upon a time, " * (1 + number % 3) + "abcdefghijkl"[number],
            SamplingParams(
                max_tokens=6 + 5 * (number % 4), min_tokens=6, temperature=number % 2, seed=number
            ),
            tenant=f"t{number % 3}",
            predicted_output_tokens=6 + number,
            ttft_target_seconds=0.001 if number % 3 else None,
            tpot_target_seconds=0.5 if number % 4 else None,
        )
        return tuple(answer.token_ids)

    async def serve() -> tuple[list[tuple[int, ...]], EngineStats]:
        async with Engine(
            policy=policy, num_pages=40, num_host_pages=16, page_size=4, max_num_seqs=2
        ) as engine:
            answers = await asyncio.gather(*(one(engine, number) for number in range(12)))
            return answers, engine.stats()

    return asyncio.run(serve())


@pytest.fixture(scope="module")
def under_fcfs() -> list[tuple[int, ...]]:
    return served("fcfs")[0]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", SPECS)
def test_each_serves_a_real_model_with_the_tokens_that_it_has_under_fcfs(name, under_fcfs):
    answers, stats = served(make(name))
    assert answers == under_fcfs
    assert stats.policy_faults_total == 0
    if name in ("andes", "fastserve"):
        assert stats.preemptions_total > 0


@pytest.mark.more
def test_the_package_is_installed_like_anyone_s(tmp_path):
    project, installed = tmp_path / "project", tmp_path / "installed"
    shutil.copytree(PROJECT, project)  # building leaves files beside the sources
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--target", str(installed), str(project)),
        ],
        check=True,
        timeout=200,
    )
    listed = subprocess.run(
        [sys.executable, "-m", "aioserve", "plugins"],
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
        env={"PYTHONPATH": str(installed), "PATH": "", "COLUMNS": "200"},
    )
    for name in SPECS:
        assert name in listed.stdout
