"""Structural tags: what is taken is what a reader would take, who goes from trigger to trigger."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.vocabulary import Vocabulary
from aioserve.text.tokenizer import Tokenizer
from tests.grammars.walks import single_bytes

END = 299
VALUES: list[Any] = ["", "a", "<a", 7, [], {"a": 7}]
MARKS = st.text("a<7>", min_size=1, max_size=3)


def takes(tag: dict[str, Any], text: str, num_found: int = 0) -> bool:
    """Return true if a reader accepts `text` after `num_found` structures."""
    starts = [match for one in tag["triggers"] for match in re.finditer(re.escape(one), text)]
    first = min(starts, key=lambda match: match.end(), default=None)
    if first is None:
        return num_found > 0 or not tag.get("at_least_one")
    rest = text[first.start() :]
    for one in tag["structures"]:
        for value in one["schema"]["enum"]:
            whole = f"{one['begin']}{json.dumps(value)}{one['end']}"
            if one["begin"].startswith(first[0]) and rest.startswith(whole):
                return takes(tag, rest.removeprefix(whole), num_found + 1)
    return False


def follows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher({END})
    taken = all(matcher.accept(byte) for byte in text.encode())
    assert matcher.error is None
    return taken and matcher.is_accepting


@st.composite
def tags(draw: st.DrawFn) -> dict[str, Any]:
    """Draw tags with ends that continue no value, so that there is one way to read them."""
    triggers = draw(st.lists(MARKS, min_size=1, max_size=3))
    structure = st.fixed_dictionaries(
        {
            "begin": st.tuples(st.sampled_from(triggers), st.text("a<7>", max_size=2)).map("".join),
            "schema": st.lists(st.sampled_from(VALUES), min_size=1).map(lambda v: {"enum": v}),
            "end": st.tuples(st.sampled_from("<>"), st.text("a<7>", max_size=2)).map("".join),
        }
    )
    tag: dict[str, Any] = {"triggers": triggers}
    tag["structures"] = draw(st.lists(structure, min_size=1, max_size=3))
    if draw(st.booleans()):
        tag["at_least_one"] = draw(st.booleans())
    return tag


@st.composite
def texts(draw: st.DrawFn, tag: dict[str, Any]) -> str:
    """Draw texts of whole structures, of their parts, and of other text."""
    parts = [*tag["triggers"], "a", "<", ">", "é"]
    for one in tag["structures"]:
        values = list(map(json.dumps, one["schema"]["enum"]))
        parts += [one["begin"], one["end"], *values]
        parts += [f"{one['begin']}{value}{one['end']}" for value in values]
    return "".join(draw(st.lists(st.sampled_from(parts), max_size=5)))


def test_exactly_what_a_reader_takes_is_allowed(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    found = {True: 0, False: 0}

    @given(tags(), st.data())
    def check(tag: dict[str, Any], data: st.DataObject) -> None:
        try:
            output = StructuredOutput(structural_tag=tag)
        except InvalidSamplingError:
            assume(False)
        grammar = compile_grammar(vocabulary, output)
        for text in data.draw(st.lists(texts(tag), min_size=1, max_size=5)):
            taken = takes(tag, text)
            assert follows(grammar, text) == taken, text
            found[taken] += 1

    check()
    assert all(found.values())


def test_another_trigger_within_one_that_nothing_follows_is_not_allowed(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    structures = [{"begin": "77", "schema": {"enum": [""]}, "end": "<"}]
    tag = {"triggers": ["<7", "77"], "structures": structures}
    grammar = compile_grammar(vocabulary, StructuredOutput(structural_tag=tag))
    assert follows(grammar, 'a77""<')
    assert not follows(grammar, '<77""<')


TAG: dict[str, Any] = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "[", "end": "]!"},
    ],
    "triggers": ["<f=", "["],
}


def grammar_of(directory: Path, tag: dict[str, Any], **more: Any) -> CompiledGrammar:
    pair: tuple[Tokenizer, Vocabulary] = single_bytes(directory)
    return compile_grammar(pair[1], StructuredOutput(structural_tag=tag, **more))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", True),
        ("So: <f=a>{}</f>.", True),
        ("<f=b>12</f><f=b>-3</f>", True),
        ("<f <f=b>1</f> <f", True),
        ('[{"a": [1, null]}]! [""]!', True),
        ("<f=", False),
        ("<f=c>1</f>", False),
        ("<f=a>1</f>", False),
        ("[1]", False),
    ],
)
def test_forms_are_held_behind_triggers_alone(tmp_path: Path, text: str, taken: bool) -> None:
    assert follows(grammar_of(tmp_path, TAG), text) == taken
    at_least_one = grammar_of(tmp_path, TAG | {"at_least_one": True})
    assert follows(at_least_one, text) == (taken and text != "")


def test_white_space_is_as_the_settings_say(tmp_path: Path) -> None:
    spaced, bare = '[{"a": 1}]!', '[{"a":1}]!'
    usual, none = (grammar_of(tmp_path, TAG, max_whitespace=most) for most in (None, 0))
    assert (follows(usual, spaced), follows(usual, bare)) == (True, True)
    assert (follows(none, spaced), follows(none, bare)) == (False, True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "schema is false"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {}}, "x-guidance"),
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(tmp_path: Path, schema: Any, message: str) -> None:
    tag = TAG | {"structures": [{"begin": "[", "schema": schema, "end": "]"}]}
    with pytest.raises(InvalidSamplingError, match=f"structural_tag must be one.*{message}"):
        grammar_of(tmp_path, tag)
