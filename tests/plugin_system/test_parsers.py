"""Tool parsers and reasoning parsers of plugins: found, chosen, read as bundled ones are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    CallFormat,
    ConfigError,
    CustomCalls,
    Engine,
    InvalidRequestError,
    JsonCalls,
    PluginError,
    ReasoningMarks,
    ReasoningParserSpec,
    RequestFailedError,
    SamplingParams,
    SchedulingPolicy,
    StructuredOutput,
    ToolCallDelta,
    ToolParserSpec,
    hookimpl,
)
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output, calls_source
from aioserve.plugins import PluginRegistry
from aioserve.testing import (
    FakeModel,
    check_invariants,
    check_reasoning_parser,
    check_tool_parser,
    read_calls,
)
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.declared import parser_of
from aioserve.text.output_parsers.parts import joined, whole_calls
from aioserve.text.output_parsers.registry import TOOL_PARSERS, tool_parser_named
from aioserve.text.output_parsers.tool_parser import ToolParser
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel
from tests.plugin_system.planted import broken, entry_point
from tests.text.test_output_parsers import confusing, numbers, well_formed
from tests.tiers import examples

HERMES = JsonCalls(opens="<tool_call>", closes="</tool_call>", typed_marks=True)
IN_LIST = JsonCalls(opens="<calls>", closes="</calls>", in_list=True)
BARE = JsonCalls(opens="functools", arguments="parameters")
ASK = [{"role": "user", "content": "What's the weather in Oslo?"}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 4}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}"
)
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


class Plugin:
    def __init__(self, **formats: CallFormat | ReasoningMarks) -> None:
        self.formats = formats

    @hookimpl
    def aioserve_tool_parsers(self):
        given = self.formats.items()
        return [ToolParserSpec(name, one) for name, one in given if isinstance(one, CallFormat)]

    @hookimpl
    def aioserve_reasoning_parsers(self):
        given = self.formats.items()
        return [
            ReasoningParserSpec(name, one) for name, one in given if isinstance(one, ReasoningMarks)
        ]


class PythonicReader:
    """Reads lines `!name key=value`, where a line is one call."""

    def __init__(self) -> None:
        self.line = ""
        self.count = 0

    def push(self, text: str) -> Iterable[str | ToolCallDelta]:
        *lines, self.line = (self.line + text).split("\n")
        return [part for line in lines for part in self.read(line, "\n")]

    def finish(self) -> Iterable[str | ToolCallDelta]:
        return list(self.read(self.line, ""))

    def read(self, line: str, end: str) -> Iterable[str | ToolCallDelta]:
        name, *given = line[1:].split(" ")
        if not line.startswith("!") or not name.isidentifier() or not all("=" in g for g in given):
            yield line + end
            return
        values = dict(pair.split("=", 1) for pair in given)
        yield ToolCallDelta(self.count, name=name, arguments=json.dumps(values))
        self.count += 1


EXAMPLE = "Let me see.\n!weather city=Oslo\nDone."
PYTHONIC = CustomCalls(reader=lambda tools: PythonicReader(), examples=(EXAMPLE,))


def read(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str, str]]]:
    parts = joined([*[parser.push(piece) for piece in pieces], parser.finish()])
    calls = whole_calls(parts.tool_calls)
    return parts.content, [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    "texts", [confusing("hermes"), well_formed("hermes").map(lambda made: made[0])]
)
def test_hermes_declared_anew_reads_the_same_at_all_split_points(
    texts: st.SearchStrategy[str],
) -> None:
    declared = parser_of("my_hermes", HERMES, "my_hermes")

    @settings(max_examples=examples(20))
    @given(texts)
    def check(text: str) -> None:
        bundled = read(TOOL_PARSERS["hermes"](numbers()), [text])
        for at in range(len(text) + 1):
            assert read(declared(numbers()), [text[:at], text[at:]]) == bundled
        assert read(declared(numbers()), list(text)) == bundled

    check()


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("required", [False, True])
def test_hermes_declared_anew_holds_calls_by_the_same_grammar(one: bool, required: bool) -> None:
    def grammar(style: Style) -> str:
        names = {"weather"}
        held = frozenset(names if required else ())
        return calls_source(calls_output(style, TOOLS, names, one=one, required=held))

    declared = parser_of("my_hermes", HERMES, "my_hermes")
    assert grammar(Style(tools="my_hermes", declared=declared)) == grammar(Style(tools="hermes"))


@pytest.mark.parametrize("written", [HERMES, IN_LIST, BARE, PYTHONIC])
def test_formats_keep_their_contract(written: CallFormat) -> None:
    check_tool_parser(written, max_examples=examples(100))


def test_a_list_of_calls_is_read_behind_its_mark() -> None:
    text = f"Let me see. <calls>[{CALL}, {CALL}]</calls> done"
    content, calls = read_calls(IN_LIST, text)
    assert content == "Let me see. done"
    assert [(call.id, call.name) for call in calls] == [
        ("call_0", "weather"),
        ("call_1", "weather"),
    ]


def test_calls_without_a_mark_behind_them_are_read() -> None:
    bare = CALL.replace("arguments", "parameters")
    content, calls = read_calls(BARE, f"functools{bare}functools{bare}")
    assert (content, len(calls)) == ("", 2)


# -- what an engine makes of them


@pytest.mark.asyncio
@pytest.mark.parametrize("parser", ["auto", "mine"])
async def test_an_engine_reads_calls_as_a_plugin_says(parser: str) -> None:
    mine = msgspec.structs.replace(IN_LIST, template_has=("<calls>",))
    model = ScriptedModel(TEMPLATE + "{# <calls> #}", f"So: <calls>[{CALL}]</calls>")
    async with Engine(model, plugins=[Plugin(mine=mine)]) as engine:
        assert engine.reads_tool_calls
        answer = await engine.chat(ASK, tools=TOOLS, tool_parser=parser).completion()
        assert answer.content == "So:"
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [
            ("weather", '{"city": "Oslo"}')
        ]


@pytest.mark.asyncio
@pytest.mark.parametrize(("city", "is_taken"), [("Oslo", True), ("Reykjavik", False)])
@pytest.mark.parametrize("held", ["strict_tools", "required_tools"])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        (IN_LIST, '<calls>[{{"name": "weather", "arguments": {}}}]</calls>'),
        (BARE, 'functools{{"name": "weather", "parameters": {}}}'),
    ],
)
async def test_a_grammar_holds_calls_of_a_plugins_format(
    written: CallFormat, text: str, held: str, city: str, is_taken: bool
) -> None:
    arguments = json.dumps({"city": city})
    model = ScriptedModel(TEMPLATE, text.format(arguments))
    plugins = [Plugin(mine=written)]
    async with Engine(model, plugins=plugins, tool_parser="mine", jump_forward=False) as engine:
        options: Any = {held: ["weather"]}
        stream = engine.chat(ASK, SamplingParams(seed=0), tools=TOOLS, **options)
        if is_taken:
            answer = await stream.completion()
            assert [call.arguments for call in answer.tool_calls] == [arguments]
        else:
            with pytest.raises(RequestFailedError):
                await stream.completion()


@pytest.mark.asyncio
async def test_code_of_a_plugin_reads_calls() -> None:
    model = ScriptedModel(TEMPLATE, EXAMPLE)
    async with Engine(model, plugins=[Plugin(mine=PYTHONIC)], tool_parser="mine") as engine:
        answer = await engine.chat(ASK, tools=TOOLS).completion()
        assert answer.content == "Let me see.\nDone."
        (call,) = answer.tool_calls
        assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
        assert call.id.startswith("call_")


@pytest.mark.asyncio
@pytest.mark.parametrize("held", ["strict_tools", "required_tools", "structured_output"])
async def test_code_of_a_plugin_has_no_grammar(held: str) -> None:
    async with Engine(
        ScriptedModel(TEMPLATE, "x"), plugins=[Plugin(mine=PYTHONIC)], tool_parser="mine"
    ) as engine:
        params, options = None, {held: ["weather"]}
        if held == "structured_output":
            params, options = (
                SamplingParams(structured_output=StructuredOutput(json_object=True)),
                {},
            )
        given: Any = options
        with pytest.raises(InvalidRequestError, match=f"{held} must be left out beside tools"):
            engine.chat(ASK, params, tools=TOOLS, **given)


class Failing(PythonicReader):
    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self.answer = answer

    def push(self, text: str) -> Iterable[str | ToolCallDelta]:
        return self.answer()


def raising() -> Any:
    raise SystemExit("planted")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (raising, "raised SystemExit"),
        (lambda: "text", "which is no list"),
        (lambda: [1], "which is neither a str"),
        (lambda: [ToolCallDelta(0)], "which begins a call and has no name"),
        (lambda: [ToolCallDelta(1, name="f")], "neither begins the next call"),
    ],
)
async def test_a_reader_that_fails_ends_its_request_alone(
    answer: Callable[[], Any], what: str
) -> None:
    failing = CustomCalls(reader=lambda tools: Failing(answer))
    plugins = [Plugin(failing=failing, mine=PYTHONIC)]
    async with Engine(ScriptedModel(TEMPLATE, "Hello."), plugins=plugins) as engine:
        good = engine.chat(ASK, tools=TOOLS, tool_parser="mine")
        bad = engine.chat(ASK, tools=TOOLS, tool_parser="failing")
        with pytest.raises(RequestFailedError, match="the answer can't be read") as caught:
            await bad.completion()
        assert what in str(caught.value)
        assert "tool parser failing (given to the engine)" in str(caught.value)
        assert (await good.completion()).content == "Hello."
        check_invariants(engine)
        await all_given_back(engine)


@pytest.mark.asyncio
async def test_reasoning_is_told_by_the_tags_of_a_plugin() -> None:
    tags = ReasoningMarks("<|so|>", "<|thus|>", is_open=False)
    check_reasoning_parser(tags, max_examples=examples(60))
    model = ScriptedModel(TEMPLATE, "<|so|>it rains<|thus|>Rain.")
    async with Engine(model, plugins=[Plugin(mine=tags)], reasoning_parser="mine") as engine:
        assert engine.reasons
        answer = await engine.chat(ASK).completion()
        assert (answer.reasoning, answer.content) == ("it rains", "Rain.")


# -- names, and what is broken


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_no_plugin_takes_the_name_of_a_bundled_parser(installed, caplog, kind: str) -> None:
    name, one = (
        ("hermes", IN_LIST) if kind == "tool" else ("qwen3", ReasoningMarks("a", "b", False))
    )
    installed.append(entry_point("shadowing", lambda: Plugin(**{name: one})))
    registry = PluginRegistry()
    assert [plugin.name for plugin in registry.broken] == ["shadowing"]
    told = f"{kind} parser '{name}' is built in; plugin shadowing (some-dist 1.2) must give"
    assert told in caplog.text
    assert registry.output_parsers().tools["hermes"] is TOOL_PARSERS["hermes"]
    with pytest.raises(PluginError, match=f"{kind} parser '{name}' is built in"):
        PluginRegistry([Plugin(**{name: one})])


@pytest.mark.parametrize("name", ["auto", "none"])
def test_no_plugin_takes_a_word_of_the_option(name: str) -> None:
    with pytest.raises(PluginError, match=f"'{name}' is built in"):
        PluginRegistry([Plugin(**{name: IN_LIST})])


def test_two_plugins_cannot_offer_one_parser(installed, caplog) -> None:
    installed.append(entry_point("first", lambda: Plugin(mine=IN_LIST)))
    installed.append(entry_point("second", lambda: Plugin(mine=BARE)))
    registry = PluginRegistry()
    assert registry.tool_parsers["mine"].spec.value == IN_LIST
    assert "'mine' is offered by plugin first (some-dist 1.2) too" in caplog.text


def test_bundled_parsers_are_asked_first_of_a_template() -> None:
    greedy = msgspec.structs.replace(IN_LIST, template_has=("<tool_call>",))
    other = msgspec.structs.replace(BARE, template_has=("<x>",), template_lacks=("<y>",))
    parsers = PluginRegistry([Plugin(greedy=greedy, other=other)]).output_parsers()
    auto: Mapping[str, str] = {"<tool_call>": "hermes", "<x>": "other"}
    for source, name in auto.items():
        found = tool_parser_named("auto", source, has_tools=True, parsers=parsers)
        assert found is not None
        assert found.name == name
    named = tool_parser_named("auto", "{# tool_parser: greedy #}", has_tools=True, parsers=parsers)
    assert named is parsers.tools["greedy"]
    with pytest.raises(InvalidRequestError, match="greedy"):
        tool_parser_named("auto", "<x><y>", has_tools=True, parsers=parsers)


@pytest.mark.asyncio
@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
async def test_a_name_that_nothing_offers_is_an_error_of_the_engine(installed, option: str) -> None:
    kind = option.replace("_", " ")
    given: Any = {option: "hermess"}
    with pytest.raises(ConfigError, match=f"{option}: no {kind} 'hermess'"):
        Engine(FakeModel(), **given)
    plugins = [Plugin(mine=IN_LIST)]
    engine = Engine(FakeModel(), policy=SchedulingPolicy(), plugins=plugins, **given)
    with pytest.raises(ConfigError, match=f"{option}: no {kind} 'hermess'"):
        await engine.__aenter__()


def test_a_parser_of_a_broken_plugin_is_told_with_its_cause(installed) -> None:
    installed.append(entry_point("mine", broken))
    with pytest.raises(PluginError, match=r"tool parser 'mine' can't be loaded: mine \(some-dist"):
        PluginRegistry().output_parsers("mine", "auto")


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("hermes", "must be a JsonCalls or a CustomCalls"),
        (JsonCalls(opens=""), "opens must be a str of 1 to 256"),
        (JsonCalls(opens=" x"), "opens must be a str of 1 to 256"),
        (JsonCalls(opens="<a>", closes="<a>b"), "must not hold each other"),
        (JsonCalls(opens="<a>", arguments="args"), "arguments must be"),  # pyright: ignore
        (JsonCalls(opens="<a>", template_has="x"), "template_has must be a tuple"),  # pyright: ignore
        (JsonCalls(opens="<a>", in_list=1), "in_list must be True or False"),  # pyright: ignore
        (CustomCalls(reader=5), "reader must be callable"),  # pyright: ignore
    ],
)
def test_a_format_that_cannot_be_used_is_refused(written: Any, why: str) -> None:
    class Giving:
        @hookimpl
        def aioserve_tool_parsers(self):
            return [ToolParserSpec("mine", written)]

    with pytest.raises(PluginError, match=why):
        PluginRegistry([Giving()])
    with pytest.raises(AssertionError, match=why):
        check_tool_parser(written)


class Forgetful(PythonicReader):
    """Reads each piece as if it were a line."""

    def push(self, text: str) -> Iterable[str | ToolCallDelta]:
        return list(self.read(text, ""))


class Greedy(PythonicReader):
    def push(self, text: str) -> Iterable[str | ToolCallDelta]:
        return [text.strip()]


@pytest.mark.parametrize(
    ("reader", "why"),
    [(Forgetful, "in one piece"), (Greedy, "has no call"), (lambda: None, "push")],
)
def test_the_check_finds_readers_that_break_their_contract(
    reader: Callable[[], Any], why: str
) -> None:
    written = CustomCalls(reader=lambda tools: reader(), examples=("!weather city=Oslo",))
    with pytest.raises(AssertionError, match=why):
        check_tool_parser(written, max_examples=100)


def test_a_reader_is_told_the_tools_of_its_request() -> None:
    told: list[Any] = []

    def reader(tools: Sequence[Mapping[str, Any]]) -> PythonicReader:
        told.append(tools)
        return PythonicReader()

    parser_of("mine", CustomCalls(reader=reader), "mine")(None, ArgumentTypes(TOOLS))
    assert told == [TOOLS]
