"""Harmony: messages come out of it as they went in, whatever the pieces, and no head is shown."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.families import JsonCallsParser
from aioserve.text.output_parsers.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MAX_HEAD_CHARS,
    MESSAGE,
    RETURN,
    START,
    HarmonyChannels,
    HarmonyParser,
)
from aioserve.text.output_parsers.parts import Parts, joined, whole_calls
from aioserve.text.output_parsers.registry import (
    REASONING_FORMATS,
    TOOL_PARSERS,
    reasoning_format_named,
    tool_parser_named,
)
from tests.tiers import examples

HARMONY = HarmonyChannels()
TEMPLATE = "<|start|>{{ role }}<|channel|>final<|message|>{{ content }}<|end|>"
AGAIN = f"{END}{START}assistant"
ANALYSIS, COMMENTARY, FINAL = (
    f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final")
)
Told = tuple[str, str, list[tuple[str, str]]]


def told(parts: Sequence[Parts]) -> Told:
    """Reasoning, content, and name and arguments of each call."""
    whole = joined(parts)
    calls = [(call.name, call.arguments) for call in whole_calls(whole.tool_calls)]
    return whole.reasoning, whole.content, calls


def read(text: str, cuts: Sequence[int] = (), *, opened: str = "", calls: bool = True) -> Told:
    reader = CompletionReader(HarmonyParser if calls else None, HARMONY, opened=opened)
    places = itertools.pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])
    return told([*(reader.push(text[a:b]) for a, b in places), reader.finish()])


# -- messages as the model writes them

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: "<|" not in text
)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,9}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from([END, CALL]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(names, values, max_size=3).map(json.dumps)


@st.composite
def heads_of_calls(draw: st.DrawFn, name: str) -> str:
    """A head, in each place that the model has for the recipient."""
    channel = draw(st.sampled_from(["commentary", "analysis"]))
    to = f" to=functions.{name}"
    head = draw(st.sampled_from([f"{to}{CHANNEL}{channel}", f"{CHANNEL}{channel}{to}"]))
    kinds = [f" {CONSTRAIN}json", f"{CONSTRAIN}json", " json", ""]
    return head + draw(st.sampled_from(kinds)) + MESSAGE


@st.composite
def completions(draw: st.DrawFn) -> tuple[str, Told]:
    """A completion, and what it says."""
    reasoning = draw(st.lists(texts, max_size=2))
    said = draw(st.lists(texts, max_size=2))
    calls = draw(st.lists(st.tuples(names, arguments), max_size=3))
    messages = [ANALYSIS + text for text in reasoning] + [COMMENTARY + text for text in said]
    for name, value in calls:
        space = draw(st.sampled_from(["", " ", "\n"]))
        messages.append(draw(heads_of_calls(name)) + space + value + space)
    if not calls or draw(st.booleans()):
        final = draw(texts)
        messages.append(FINAL + final)
        said = [*said, final]
    last = draw(st.sampled_from([RETURN, CALL, END, ""]))
    return AGAIN.join(messages) + last, ("\n".join(reasoning), "\n".join(said), calls)


@settings(max_examples=examples(300))
@given(completions(), st.lists(st.integers(0, 400), max_size=8))
def test_messages_come_out_as_they_went_in(made: tuple[str, Told], cuts: list[int]) -> None:
    text, expected = made
    assert read(text, cuts) == expected


@settings(max_examples=examples(50))
@given(completions())
def test_no_place_of_a_cut_makes_a_difference(made: tuple[str, Told]) -> None:
    text, expected = made
    for cut in range(len(text) + 1):
        assert read(text, [cut]) == expected


PIECES = [START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN, "<|", "|>", "<|cha"]
PIECES += [
    "assistant",
    "assist",
    "analysis",
    "final",
    "commentary",
    "user",
    "to=",
    " to=functions.f",
]
PIECES += [
    "to=python",
    " ",
    "\n",
    "json",
    "{",
    '{"a": 1}',
    '"',
    "text",
    "x" * (MAX_HEAD_CHARS // 2),
]


@settings(max_examples=examples(400))
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(0, 3000), max_size=8),
    st.sampled_from(["", FINAL, ANALYSIS, f"{CHANNEL}analysis", " to=functions.g"]),
    st.booleans(),
)
def test_what_is_malformed_is_read_in_one_way(
    text: str, cuts: list[int], opened: str, calls: bool
) -> None:
    whole = read(text, opened=opened, calls=calls)
    assert read(text, cuts, opened=opened, calls=calls) == whole
    assert read(text, range(len(text)), opened=opened, calls=calls) == whole


CALLED = f'{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{{"a": 1}}{CALL}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("Hello there.", ("", "Hello there.", [])),
        ("assist", ("", "assist", [])),
        ("assistants help", ("", "assistants help", [])),
        ("to be", ("", "to be", [])),
        (f"Hello{END}{START}assistant{FINAL}there", ("", "Hello\nthere", [])),
        (f"{START}assistant{FINAL}Hi{RETURN}", ("", "Hi", [])),
        (f"{START}assistantHi{RETURN}", ("", "Hi", [])),
        (f"assistant{FINAL}Hi", ("", "Hi", [])),
        (f"{MESSAGE}Hi", ("", "Hi", [])),
        (f"{CHANNEL}remarks{MESSAGE}Hi", ("", "Hi", [])),
        (f"{CHANNEL}final Hi{RETURN}", ("", "Hi", [])),
        (f"{CHANNEL}analysis Hm{END}{START}assistant{FINAL}Hi", ("Hm", "Hi", [])),
        (f"{CHANNEL}commentary{CHANNEL}analysis{MESSAGE}Hm", ("Hm", "", [])),
        (f"{ANALYSIS}Hm{FINAL}Hi", ("Hm", "Hi", [])),
        (f"{ANALYSIS}Hm{START}assistant{FINAL}Hi", ("Hm", "Hi", [])),
        (f"{ANALYSIS}Hm{CALLED}", ("Hm", "", [("f", '{"a": 1}')])),
        (f"{FINAL}one{MESSAGE}two{CONSTRAIN}three", ("", "onetwothree", [])),
        (f"{FINAL}{RETURN}", ("", "", [])),
        (f"{CHANNEL}commentary to=all{MESSAGE}Hi", ("", "Hi", [])),
        (
            f"{CHANNEL}analysis to=python code{MESSAGE}print(1)\n{CALL}",
            ("", "", [("python", "print(1)")]),
        ),
        (f"{CHANNEL}commentary to=functions.f{MESSAGE}{CALL}", ("", "", [("f", "{}")])),
        (f"{CHANNEL}commentary to=functions.f{MESSAGE}", ("", "", [("f", "")])),
        (
            f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": tru}} x{CALL}',
            ("", "", [("f", '{"a": tru} x')]),
        ),
        (f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": 1', ("", "", [("f", '{"a": 1')])),
        (f"{CHANNEL}commentary to=functions.{MESSAGE}Hi", ("", "Hi", [])),
        (f"{CHANNEL}commentary to={'f' * 300}{MESSAGE}Hi", ("", "Hi", [])),
    ],
)
def test_a_completion_with_mistakes_still_says_what_it_says(text: str, expected: Told) -> None:
    assert read(text) == expected


WHOLE = f"{ANALYSIS}Hm{AGAIN}{CALLED}"


def test_a_completion_that_is_cut_off_says_the_start_of_it() -> None:
    tokens = re.findall(r"<\|\w+\|>|.", WHOLE)
    for count in range(len(tokens) + 1):
        reasoning, content, calls = read("".join(tokens[:count]))
        assert ("Hm".startswith(reasoning), content) == (True, "")
        for name, value in calls:
            assert (name, '{"a": 1}'.startswith(value)) == ("f", True)


def test_parts_that_aren_t_told_are_content_as_the_model_wrote_them() -> None:
    text = f"{ANALYSIS}Hm{AGAIN}{CALLED}"
    assert read(text, calls=False) == ("Hm", CALLED, [])
    parser = HarmonyParser()
    assert told([parser.push(text), parser.finish()]) == (
        "",
        f"{ANALYSIS}Hm{END}",
        [("f", '{"a": 1}')],
    )


def test_calls_of_another_style_are_read_in_the_answer() -> None:
    reader = CompletionReader(JsonCallsParser, HARMONY)
    text = f'{ANALYSIS}Hm{AGAIN}{FINAL}[{{"name": "f", "arguments": {{}}}}]{RETURN}'
    assert told([*map(reader.push, text), reader.finish()]) == ("Hm", "", [("f", "{}")])


def test_reasoning_is_inside_its_messages_alone() -> None:
    reader = HARMONY.reader("")
    inside: list[bool] = []
    for piece in (ANALYSIS, "a", END, f"{START}assistant", ANALYSIS, f"b{END}", COMMENTARY, "c"):
        reader.push(piece)
        inside.append(reader.is_inside)
    assert inside == [True, True, False, False, True, False, False, False]
    assert not reader.has_ended


@pytest.mark.parametrize(
    ("prompt_end", "begun", "opened"),
    [
        (f"{START}user{MESSAGE}Hi{END}{START}assistant", "", ""),
        (f"{START}user{MESSAGE}Hi{END}{START}assistant{FINAL}", "", FINAL),
        (f"{START}assistant{ANALYSIS}Let me", "", ANALYSIS),
        (f"{START}assistant{CHANNEL}final", "", f"{CHANNEL}final"),
        (f"{START}user{MESSAGE}Hi{END}", "", ""),
        (f"{START}user{MESSAGE}the assistant", "", ""),
        ("no marks at all", "", ""),
        ("me", "Let me", FINAL),
    ],
)
def test_the_prompt_says_what_of_the_first_message_is_there(
    prompt_end: str, begun: str, opened: str
) -> None:
    assert HARMONY.opened_by(prompt_end, begun) == opened


def test_a_message_that_the_prompt_has_begun_goes_on() -> None:
    assert read(f"Hi{RETURN}", opened=FINAL) == ("", "Hi", [])
    assert read(f"Hm{AGAIN}{FINAL}Hi", opened=ANALYSIS) == ("Hm", "Hi", [])


def test_a_template_in_harmony_names_both_parsers() -> None:
    assert tool_parser_named("auto", TEMPLATE, has_tools=True) is HarmonyParser
    assert reasoning_format_named("auto", TEMPLATE) == HARMONY
    assert TOOL_PARSERS["harmony"] is HarmonyParser
    assert REASONING_FORMATS["harmony"] == HARMONY
