"""Errors: the tree that the docstring draws, and the data that they carry."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioserve.errors
from aioserve.errors import (
    AioserveError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    InvalidRequestError,
    RequestFailedError,
    RequestRefusedError,
    StreamBusyError,
    WrongLoopError,
)

ROOT = Path(__file__).parent.parent
ERRORS: list[type[AioserveError]] = [
    getattr(aioserve.errors, name) for name in aioserve.errors.__all__ if name.endswith("Error")
]
KINDS = (
    EngineClosedError,
    InvalidRequestError,
    RequestFailedError,
    RequestRefusedError,
    StreamBusyError,
    WrongLoopError,
)

WHAT_RAISERS_SAY = {
    "DeadlineExceededError": {"deadline_seconds"},
    "DuplicateRequestError": {"value"},
    "EngineClosedError": {"state"},
    "InvalidRequestError": {"argument"},
    "InvalidSamplingError": {"argument"},
    "PromptTooLongError": {"value", "limit"},
    "QueueFullError": {"value", "limit", "retry_after_seconds"},
    "RequestRejectedError": {"refused_by", "reason", "retry_after_seconds"},
    "StepError": {"step"},
    "StreamStalledError": {"timeout_seconds"},
    "UnknownPolicyError": {"name", "known"},
}
"""Attributes that every maker of the error knows."""


def data_of(error: type[AioserveError]) -> list[str]:
    """Names of what the constructor takes beside the message."""
    parameters = inspect.signature(error.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def drawn_tree() -> dict[str, str]:
    """Each class of the docstring's tree, and the one above it."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for indent, name in re.findall(
        r"^    ([│├└─ ]*)(\w+Error)\b", aioserve.errors.__doc__ or "", re.M
    ):
        del above[len(indent) // 4 :]
        if above:
            parents[name] = above[-1]
        above.append(name)
    return parents


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    expected = {}
    for error in set(ERRORS) - {AioserveError}:
        (parent,) = [base for base in error.__bases__ if issubclass(base, AioserveError)]
        expected[error.__name__] = parent.__name__
    assert drawn_tree() == expected


@pytest.mark.parametrize("error", ERRORS)
def test_a_message_is_enough_for_any_error(error: type[AioserveError]) -> None:
    assert str(error("what went wrong")) == "what went wrong"


@given(st.data())
def test_copies_of_an_error_carry_what_it_carries(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(ERRORS))
    values: dict[str, Any] = {name: data.draw(st.integers()) for name in data_of(kind)}
    if "known" in values:
        values["known"] = ("a", "b")
    error = kind("what went wrong", **values)
    for twin in (error.copy(), copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is kind
        assert twin is not error
        assert str(twin) == "what went wrong"
        assert {name: getattr(twin, name) for name in values} == values
        assert vars(twin) == vars(error)


@pytest.mark.parametrize("error", ERRORS)
def test_a_copy_has_the_cause_and_no_frames(error: type[AioserveError]) -> None:
    cause = OSError("planted")
    try:
        raise error("what went wrong") from cause
    except AioserveError as raised:
        twin = raised.copy()
    assert twin.__cause__ is cause
    assert twin.__traceback__ is None


def test_a_copy_without_a_cause_still_shows_its_context() -> None:
    assert not AioserveError("what went wrong").copy().__suppress_context__


def test_a_cause_is_chained_as_raise_from_chains_it() -> None:
    cause = OSError("planted")
    error = AioserveError("what went wrong")
    assert error.with_cause(cause) is error
    assert error.__cause__ is cause
    assert error.__suppress_context__


def test_what_can_be_done_about_an_error_shows_in_one_class() -> None:
    for error in ERRORS:
        kinds = [kind for kind in KINDS if issubclass(error, kind)]
        if issubclass(error, EngineError | InvalidRequestError) and error is not EngineError:
            assert len(kinds) == 1, f"{error.__name__} is {kinds}"
    assert issubclass(EngineFailedError, EngineClosedError)


def test_every_attribute_has_a_row_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| [^|]*\| `(\w+)` \|", page.split("## What they carry")[1], re.M)
    assert set(shown) == {name for error in ERRORS for name in data_of(error)}


def places_where_errors_are_made() -> list[tuple[str, str, set[str]]]:
    """Place, class and keywords of each call of an error class."""
    found = []
    for path in sorted((ROOT / "aioserve").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                keywords = {keyword.arg or "**" for keyword in node.keywords}
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((place, node.func.id, keywords))
    return found


def test_whoever_makes_an_error_says_what_is_known() -> None:
    silent = []
    made = set()
    for place, name, said in places_where_errors_are_made():
        made.add(name)
        missing = WHAT_RAISERS_SAY.get(name, set()) - said
        if missing and "**" not in said:
            silent.append(f"{place}: {name} without {', '.join(sorted(missing))}")
    assert set(WHAT_RAISERS_SAY) <= made
    assert not silent, "\n".join(silent)
