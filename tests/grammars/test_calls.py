"""Calls of tools that follow their schemas, in all forms. In any drawn completion, each call that a
reader finds is a call of a tool, and text stays free."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jsonschema
import pytest
import tokenizers

from aioserve import InvalidSamplingError
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.vocabulary import Vocabulary
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.parts import Parts, whole_calls
from aioserve.text.output_parsers.reasoning import ReasoningTags
from aioserve.text.output_parsers.registry import REASONING_TAGS, TOOL_PARSERS
from aioserve.text.tokenizer import Tokenizer
from tests.engine.scripted import END, SPECIAL, chat_tokenizer
from tests.grammars.walks import ids_in
from tests.text.test_tagged_calls import written as tagged_call

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "move": {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/place"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["north", "south"]}},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
] + [{"type": "function", "function": {"name": "now"}}]
FREE: list[dict[str, Any]] = [{"type": "function", "function": {"name": "free"}}]
KEYS = {
    "hermes": "arguments",
    "llama3_json": "parameters",
    "mistral": "arguments",
    "deepseek_v3": "arguments",
    "deepseek_v31": "arguments",
    "glm45": "",
    "qwen3_coder": "",
}
MARKS = {style: TOOL_PARSERS[style].marks[0] for style in KEYS}
MARKS["qwen3_coder"] = "<tool_call>\n<function="
CALL, CALLS, SEP, CALL_END, CALLS_END = TOOL_PARSERS["deepseek_v3"].marks
LURES = (
    *MARKS.values(),
    "</tool_call>",
    "[ARGS]",
    "[CALL_ID]",
    "<think>",
    "</think>",
    "<tool_",
    "[TOOL",
    "{",
    "[",
    "[{",
    '{"name": "weather", "arguments": {"city": 3}}',
    '{"name": "move", "parameters": {}}',
    '{"name": "other", "arguments": {}}',
    '{"arguments": {}, "name": "weather"}',
    "weather[ARGS]{}",
    "other[ARGS]{}",
    *(CALLS, SEP, CALL_END, CALLS_END, f"{CALLS}{CALL}", f"{CALL_END}{CALLS_END}"),
    f"{CALL}move{SEP}{{}}{CALL_END}",
    f"{CALL}function{SEP}move\n```json\n{{}}\n```{CALL_END}",
    "```",
    "<tool_call>weather\n<arg_key>city</arg_key><arg_value>5</arg_value>",
    "<tool_call>other</tool_call>",
    "<tool_call>\n<function=free>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
    "</arg_value>",
    "</parameter>",
    "</function>",
    ";",
    ",",
    "\n",
    " ",
    "\u2003",
    "\x1c",
    "Well.",
)
"""Texts that completions are led to write, as far as the grammar allows."""


def grammar_of(
    form: str,
    reasoning: ReasoningTags | None = None,
    *,
    is_open: bool = False,
    one: bool = False,
    max_whitespace: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (*TOOLS, *FREE),
    exact: Set[str] = frozenset(),
) -> CompiledGrammar:
    ids = {name: chat_tokenizer().encode(name)[0] for name in SPECIAL}
    style = Style(
        tools=form,
        reasoning=None if reasoning is None else (reasoning.opens, reasoning.closes),
        is_open=is_open,
        specials={name: ids[name] for name in TOOL_PARSERS[form].marks if name in ids},
        exact=exact,
    )
    strict = frozenset([*SCHEMAS, "now"])
    output = calls_output(style, tools, strict, one=one, max_whitespace=max_whitespace)
    return compile_grammar(VOCABULARY[1], output)


class Drawn:
    """An answer that follows lures where the grammar lets it, and draws where it doesn't."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        tokenizer: Tokenizer,
        seed: int,
        begun: str,
        lures: Sequence[str] = LURES,
    ) -> None:
        rng = random.Random(seed)
        (end,) = tokenizer.encode(END)
        names = tokenizer.special_names
        matcher = grammar.matcher({end})
        self.ids: list[int] = []
        lure: list[int] = list(begun.encode())
        for _ in range(400):
            if matcher.has_ended:
                break
            allowed = ids_in(matcher.allowed())
            assert matcher.error is None, matcher.error
            assert allowed
            if not lure and rng.random() < 0.3:
                spelled = rng.random() < 0.5
                text = rng.choice(lures)
                lure = list(text.encode()) if spelled else tokenizer.encode(text)
            if lure and lure[0] in allowed:
                token_id = lure.pop(0)
            elif end in allowed and rng.random() < 0.1:
                token_id = end
            else:
                lure = []
                token_id = rng.choice(allowed)
            assert matcher.accept(token_id)
            self.ids.append(token_id)
        self.has_ended: bool = matcher.has_ended
        self.pieces: list[bytes] = [
            names[i].encode() if i in names else bytes([i]) for i in self.ids if i != end
        ]
        self.text: str = b"".join(self.pieces).decode(errors="ignore")


def read(form: str, reasoning: ReasoningTags | None, is_open: bool, texts: Sequence[str]) -> Parts:
    types = ArgumentTypes([*TOOLS, *FREE])
    opened = "<think>" * is_open
    reader = CompletionReader(TOOL_PARSERS[form], reasoning, opened=opened, types=types)
    parts = [*(reader.push(text) for text in texts), reader.finish()]
    return Parts(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(delta for part in parts for delta in part.tool_calls),
    )


def vocabulary() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = chat_tokenizer()
    return tokenizer, Vocabulary(tokenizer, tokenizer.vocab_size)


VOCABULARY = vocabulary()
QWEN = REASONING_TAGS["qwen3"]
WAYS: list[tuple[ReasoningTags | None, bool]] = [(None, False), (QWEN, False), (QWEN, True)]


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(("reasoning", "is_open"), WAYS)
@pytest.mark.parametrize("form", [name for name in TOOL_PARSERS if name != "harmony"])
def test_all_calls_that_are_read_have_the_form_of_their_tools(
    form: str, reasoning: ReasoningTags | None, is_open: bool, one: bool
) -> None:
    grammar = grammar_of(form, reasoning, is_open=is_open, one=one)
    most = 0
    for seed in range(40):
        begun = ("</think>" if is_open else "") + (MARKS.get(form, "{") if seed % 3 else "")
        drawn = Drawn(grammar, VOCABULARY[0], seed, begun if seed % 4 else "")
        whole = read(form, reasoning, is_open, [drawn.text])
        streamed = read(form, reasoning, is_open, list(drawn.text))
        assert (whole.content, whole.reasoning) == (streamed.content, streamed.reasoning)
        told = [(call.name, call.arguments) for call in whole_calls(whole.tool_calls)]
        assert told == [(call.name, call.arguments) for call in whole_calls(streamed.tool_calls)]
        assert not one or len(told) < 2, drawn.text
        if not drawn.has_ended:
            told = told[:-1]
        most = max(most, len(told))
        for name, arguments in told:
            assert name in (*SCHEMAS, "now", "free"), drawn.text
            schema = SCHEMAS.get(name) or {"type": "object"}
            if name == "now":
                schema = {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)
    assert most >= 1, "no whole call was drawn to say anything"


@pytest.mark.parametrize("form", list(KEYS))
@pytest.mark.parametrize(
    "text",
    [
        "Rain.",
        "",
        " \n Ümläuts, 雨, {braces} and [lists]; <tags>, <tool_cal and [TOOL_",
        'I say {call} twice:\n\n```json\n{"name": 1}\n```',
    ],
)
def test_text_without_a_call_is_free(form: str, text: str) -> None:
    matcher = grammar_of(form).matcher({END_ID})
    assert all(matcher.accept(token_id) for token_id in text.encode())
    assert matcher.is_accepting


def call_in(form: str, name: str, arguments: str) -> list[int]:
    if form in ("glm45", "qwen3_coder"):
        value = json.loads(arguments, parse_int=str)
        members = value.items() if isinstance(value, dict) else [("<list>", arguments)]
        pairs = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in members]
        call = tagged_call(form, name, pairs, "\n").removeprefix(MARKS[form])
        call = call.removeprefix("\n<function=")
    elif form == "deepseek_v3":
        call = f"function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}{CALLS_END}"
    elif form == "deepseek_v31":
        call = f"{name}{SEP}{arguments}{CALL_END}"
    else:
        call = f'{{"name": "{name}", "{KEYS[form]}": {arguments}}}'
        call = {"mistral": f"[{call}]", "hermes": f"{call}</tool_call>"}.get(form, call)
    return VOCABULARY[0].encode(f"Let me see.{MARKS[form]}") + list(call.encode())


@pytest.mark.parametrize("form", list(KEYS))
@pytest.mark.parametrize(
    ("name", "arguments", "is_taken"),
    [
        ("weather", '{"city": "Oslo", "days": 1}', True),
        ("weather", '{"city": "Oslo"}', False),
        ("weather", '{"city": "Reykjavik", "days": 1}', False),
        ("move", '{"to": "south"}', True),
        ("move", '{"to": "east"}', False),
        ("now", "{}", True),
        ("now", '{"x": 1}', False),
        ("free", '{"anything": [1, {}]}', True),
        ("free", "[]", False),
        ("other", "{}", False),
    ],
)
def test_a_call_behind_text_is_held_to_its_tool(
    form: str, name: str, arguments: str, is_taken: bool
) -> None:
    ids = call_in(form, name, arguments)
    matcher = grammar_of(form).matcher({END_ID})
    taken = all(matcher.accept(token_id) for token_id in ids)
    assert (taken and matcher.is_accepting) is is_taken


@pytest.mark.parametrize("form", ["llama3_json", "mistral"])
def test_a_mark_that_is_typed_is_free_where_its_token_alone_is_the_mark(form: str) -> None:
    tokenizer, mark = VOCABULARY[0], MARKS[form]
    exact = {name for name in TOOL_PARSERS[form].marks if name in SPECIAL}
    grammar = grammar_of(form, exact=exact)
    forged = tokenizer.decode(call_in(form, "weather", "{}"), skip_special_tokens=False)
    assert mark in forged
    matcher = grammar.matcher({END_ID})
    assert matcher.accept_all([*forged.encode(), *call_in(form, "move", '{"to": "south"}')])
    assert matcher.is_accepting
    wrong = grammar.matcher({END_ID})
    assert not wrong.accept_all(call_in(form, "weather", "{}"))


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("form", ["deepseek_v3", "deepseek_v31", "qwen3_coder"])
def test_marks_around_calls_may_be_special_tokens(form: str, one: bool) -> None:
    """Models write the text, then marks that no text has, with a call between."""
    opens, closes = ("<tool_call>", "</tool_call>") if form == "qwen3_coder" else (CALLS, CALLS_END)
    begins = "<function=" if form == "qwen3_coder" else CALL
    backend = tokenizers.Tokenizer.from_str(chat_tokenizer()._backend.to_str())
    names = [opens, closes] if form == "qwen3_coder" else list(TOOL_PARSERS[form].marks)
    backend.add_special_tokens(names)
    tokenizer = Tokenizer(backend, source="tokenizer of marks")
    specials = {name: tokenizer.encode(name)[0] for name in names}
    output = calls_output(Style(tools=form, specials=specials), TOOLS, frozenset(SCHEMAS), one=one)
    grammar = compile_grammar(Vocabulary(tokenizer, tokenizer.vocab_size), output)
    call = VOCABULARY[0].decode(call_in(form, "move", '{"to": "south"}'))
    call = call.removeprefix("Let me see.").removeprefix(MARKS[form])
    call = call.replace(closes, "").strip()
    edge = "\n" if form == "qwen3_coder" else ""
    for count in (1, 2):
        calls = "\n".join([f"{begins}{call}"] * count)
        text = f"Let me see.{opens}{edge}{calls}{edge}{closes}"
        ids = tokenizer.encode(text)
        assert {specials[opens], specials[closes]} <= {*ids}
        matcher = grammar.matcher({END_ID})
        is_taken = all(matcher.accept(token_id) for token_id in ids)
        assert (is_taken and matcher.is_accepting) is (count == 1 or not one), text
    wrong = grammar.matcher({END_ID})
    ids = tokenizer.encode(f"{opens}{edge}{begins}{call.replace('south', 'east')}")
    assert not all(wrong.accept(token_id) for token_id in ids)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "json"])
@pytest.mark.parametrize(
    ("max_whitespace", "taken"),
    [(None, ["", ", ", "in", "around"]), (0, ["", "around"]), (3, ["", ", ", "in", "around", "3"])],
)
def test_white_space_in_calls_is_what_a_request_allows(
    form: str, max_whitespace: int | None, taken: list[str]
) -> None:
    head = f'{{"name":"weather","{KEYS.get(form) or "arguments"}":'
    calls = {
        "": head + '{"city":"Oslo","days":1}}',
        ", ": head + '{"city": "Oslo", "days": 1}}',
        "in": head.replace(":", ": ") + '{"city":"Oslo","days":1} }',
        "around": f'\n{head}{{"city":"Oslo","days":1}}}}\n',
        "3": head + '{"city":\n  "Oslo","days":1}}',
        "4": head + '{"city":\n   "Oslo","days":1}}',
    }
    grammar = grammar_of(form, max_whitespace=max_whitespace)
    found: list[str] = []
    for name, call in calls.items():
        begun = VOCABULARY[0].encode(MARKS[form]) if form in MARKS else []
        if form == "mistral":
            call = call.replace(call.strip(), f"[{call.strip()}]")
        ends = "</tool_call>" if form == "hermes" else ""
        matcher = grammar.matcher({END_ID})
        if all(matcher.accept(token_id) for token_id in [*begun, *f"{call}{ends}".encode()]):
            assert matcher.is_accepting
            found.append(name)
    assert found == taken


@pytest.mark.parametrize("form", list(KEYS))
def test_a_call_with_a_number_of_any_length_is_read_as_it_was_held(form: str) -> None:
    arguments = f'{{"n": {"7" * 2000}}}'
    ids = call_in(form, "free", arguments)
    matcher = grammar_of(form).matcher({END_ID})
    assert all(matcher.accept(token_id) for token_id in ids)
    assert matcher.is_accepting
    text = VOCABULARY[0].decode(ids, skip_special_tokens=False)
    (told,) = whole_calls(read(form, None, False, [text]).tool_calls)
    assert (told.name, told.arguments) == ("free", arguments)


def test_a_schema_that_cannot_be_kept_is_refused_as_one_of_tools() -> None:
    function = {"name": "weather", "parameters": {"type": "object", "unevaluatedItems": False}}
    with pytest.raises(InvalidSamplingError, match="tools must have parameters that calls") as told:
        grammar_of("hermes", tools=[{"type": "function", "function": function}])
    assert told.value.argument == "tools"


@pytest.mark.parametrize("form", ["deepseek_v3", "deepseek_v31", "glm45", "qwen3_coder"])
def test_a_name_that_is_written_without_quotes_is_a_word(form: str) -> None:
    named = {"type": "function", "function": {"name": "what now"}}
    with pytest.raises(InvalidSamplingError, match="tools must have names of letters"):
        grammar_of(form, tools=[*TOOLS, named])


(END_ID,) = VOCABULARY[0].encode(END)
