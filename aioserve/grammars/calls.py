"""Structured output that holds calls of tools to their schemas, and leaves all else free.

    Sure. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call> Wait for it.
    free      │       one of the names, and what its schema takes         │         free

A call begins where the parser of that style (`aioserve.text.output_parsers`) begins to read one: at
a mark, or where the completion starts with a brace. What is free is therefore exactly the text that
no call begins in. Special tokens come where a mark is one, and nowhere else: in the text they would
vanish, and could hide a mark in their midst.

Knows how each style is written. Must not know how tokens spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import msgspec

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.schema import json_spacing, sound_schema
from aioserve.structured_output import MAX_CHARS, StructuredOutput
from aioserve.text.output_parsers import families
from aioserve.text.output_parsers.call_object import MAX_NAME_CHARS

__all__ = ["CallsOutput", "Style", "calls_output", "calls_source"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACE = (
    r"[\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}"
    r"\x{3000}]"
)
"""White space, as the output parsers and Python know it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


class CallsOutput(StructuredOutput, frozen=True, kw_only=True):
    """Structured output with calls. `grammar` is all but the arguments of the calls."""

    schemas: tuple[str, ...] = ()
    """Schemas of arguments, as JSON text: what `args0` stands for, and so on."""


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """Style in which a model writes completions."""

    tools: str
    """Name of the parser of tool calls."""
    reasoning: tuple[str, str] | None = None
    """Tags around reasoning."""
    is_open: bool = False
    """Completions begin within reasoning."""
    specials: Mapping[str, int] = {}
    """Marks that are special tokens, with their ids."""


def calls_output(
    style: Style, tools: Sequence[Mapping[str, Any]], strict: Set[str], *, one: bool
) -> CallsOutput:
    """Make the structured output of completions with calls of `tools`, as a chat template has them.
    Arguments of those named in `strict` are what their parameters take, of others any object.
    `one`: there is one call at most. Raises `InvalidSamplingError`."""
    functions = [tool["function"] for tool in tools]
    names = [_name(function, index) for index, function in enumerate(functions)]
    schemas = tuple(
        json.dumps(_parameters(function) if name in strict else _ANY_OBJECT)
        for function, name in zip(functions, names, strict=True)
    )
    if (chars := sum(map(len, schemas))) > MAX_CHARS:
        raise _refused(f"have parameters of at most {MAX_CHARS} characters, got {chars}")
    rules = _Rules(style, names, one=one)
    _FAMILIES[style.tools](rules)
    grammar = rules.text()
    if len(grammar) > MAX_CHARS:
        raise _refused("have shorter names, or be fewer, where one is strict")
    return CallsOutput(grammar=grammar, schemas=schemas)


def calls_source(output: CallsOutput) -> str:
    """The whole grammar, as llguidance takes it. Raises `InvalidSamplingError`."""
    lines = [output.grammar or ""]
    for index, schema in enumerate(output.schemas):
        kept = json.loads(sound_schema(schema, "tools"))
        spacing = json_spacing(output.whitespace)
        lines.append(f"args{index}: %json {json.dumps({**kept, 'x-guidance': spacing})}")
    return "\n".join(lines) + "\n"


class _Rules:
    """A grammar that is put together. Its terminals: `TEXT`, in which no call begins; `TEXT_FIRST`,
    which a completion may begin with. Its rules: `free` and `first`, such a text up to a mark,
    `call`, and what a family of models adds."""

    def __init__(self, style: Style, names: Sequence[str], *, one: bool) -> None:
        self.style = style
        self.names = names
        self.one = one
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        self._lines += lines

    def text(self) -> str:
        return "\n".join([*self._start(), *self._lines, *_TERMINALS])

    def mark(self, name: str) -> str:
        """A mark in either way in which it may be written."""
        token_id = self.style.specials.get(name)
        return _text(name) if token_id is None else f"({_text(name)} | <[{token_id}]>)"

    def texts(self, mark: str | None, name: str = "", starts: Sequence[str] = ()) -> None:
        """Add `TEXT{name}`, text without `mark` that begins with none of `starts`; and the rule
        `up_to{name}`, such a text up to the mark, and that."""
        without = [f" & ~(ANY {_text(mark)} ANY)"] if mark else []
        without += [f" & ~(/{start}/ ANY)" for start in starts]
        self.add(f"TEXT{name}: ANY" + "".join(without))
        if mark:
            self._add_up_to(f"TEXT{name}", f"up_to{name.lower()}", mark)

    def calls(self, key: str) -> None:
        """Add `call`: an object with a name, and arguments under that key."""
        both = [
            f'{_text(_quoted(name))} WS? "," WS? {_text(_quoted(key))} WS? ":" WS? args{index}'
            for index, name in enumerate(self.names)
        ]
        named = _text(_quoted("name"))
        self.add(f'call: "{{" WS? {named} WS? ":" WS? ({" | ".join(both)}) WS? "}}"')

    def first_starts(self) -> list[str]:
        """Starts that a completion which begins with text doesn't have."""
        if self.style.reasoning is None or self.style.is_open:
            return []
        return [f"{_SPACE}*{_escaped(self.style.reasoning[0])}"]

    def _start(self) -> list[str]:
        if self.style.reasoning is None:
            return ["start: first"]
        opens, closes = self.style.reasoning
        self.add(f"INNER: ANY & ~(ANY {_text(closes)} ANY)")
        self._add_up_to("INNER", "inner", closes)
        if self.style.is_open:
            return ["start: INNER | inner body"]
        self.add(f"opened: SPACE? {self.mark(opens)}")
        return ["start: first | opened INNER | opened inner body"]

    def _add_up_to(self, terminal: str, rule: str, mark: str) -> None:
        token_id = self.style.specials.get(mark)
        or_special = "" if token_id is None else f" | {terminal} <[{token_id}]>"
        self.add(f"{rule}_mark[lazy]: {terminal} {_text(mark)}", f"{rule}: {rule}_mark{or_special}")


_TERMINALS = (
    "ANY: /(?s:.*)/",
    rf"SPACE: /{_SPACE}+/",
    r"WS: /[ \t\n\r]/",
)


def _marked(rules: _Rules, mark: str, *, starts: Sequence[str] = (), after: str = "") -> None:
    """`first` and `body`, completions in which `held` stands behind marks. With `starts` one may
    be `bare`, and none begins with these otherwise. `after` names the text behind a call."""
    rest = f"(up_to{after.lower()} held)* TEXT{after}"
    rules.add(f"rest: {f'TEXT{after}' if rules.one else rest}")
    rules.texts(mark)
    for rule, name, more in (("first", "_FIRST", rules.first_starts()), ("body", "_BODY", [])):
        rules.texts(mark, name, [*more, *starts])
        bare = "bare rest | " if starts else ""
        rules.add(f"{rule}: {bare}TEXT{name} | up_to{name.lower()} held rest")


def _hermes(rules: _Rules) -> None:
    rules.calls("arguments")
    rules.add(f"held: WS? call WS? {rules.mark(families.HERMES_CLOSES)}")
    _marked(rules, families.HERMES_OPENS)


def _llama3(rules: _Rules) -> None:
    rules.calls("parameters")
    rules.add("held: WS? calls", "bare: WS? calls")
    rules.add("calls: call" if rules.one else "calls: call (BETWEEN call)*")
    rules.add(r"BETWEEN: /[ \t\n\r]?[;,]?[ \t\n\r]?/")
    rules.texts(families.LLAMA3_TAG, "_AFTER", [rf"{_SPACE}*[;,]?{_SPACE}*\{{"])
    _marked(rules, families.LLAMA3_TAG, starts=[rf"{_SPACE}*\{{"], after="_AFTER")


def _mistral(rules: _Rules) -> None:
    rules.calls("arguments")
    rules.add(_list_of(rules))
    begin = f"({rules.mark(families.MISTRAL_CALL_ID)} ID)? {rules.mark(families.MISTRAL_ARGS)} WS?"
    named = [f"{_text(name)} {begin} args{index}" for index, name in _words(rules)]
    rules.add("held: WS? (" + " | ".join(["list", *named]) + ")", "ID: /[A-Za-z0-9]{9}/")
    _marked(rules, families.MISTRAL_CALLS)


def _words(rules: _Rules) -> list[tuple[int, str]]:
    """Names that are read without quotes, each with its index."""
    return [
        (index, name)
        for index, name in enumerate(rules.names)
        if len(name) <= families.MAX_WORD_CHARS and _WORD.fullmatch(name)
    ]


def _deepseek_v31(rules: _Rules) -> None:
    sep = rules.mark(families.DEEPSEEK_SEP)
    _deepseek(rules, [f"{_text(name)} {sep} WS? args{index}" for index, name in _words(rules)])


def _deepseek_v3(rules: _Rules) -> None:
    sep, fence = rules.mark(families.DEEPSEEK_SEP), families.DEEPSEEK_FENCE
    begin, end = f"WS? {_text(f'{fence}json')} WS?", f"WS? {_text(fence)}"
    words = _words(rules)
    named = [f"{_text(name)} {begin} args{index} {end}" for index, name in words]
    _deepseek(rules, [f'"function" {sep} {one}' for one in named])


def _deepseek(rules: _Rules, named: Sequence[str]) -> None:
    if len(named) < len(rules.names):
        raise _refused(
            f"have names of letters, digits, '_', '-' and '.', at most {families.MAX_WORD_CHARS}, "
            "where one is strict and the model is of DeepSeek's"
        )
    rules.add(f"held: ({' | '.join(named)}) WS? {rules.mark(families.DEEPSEEK_CALL_END)}")
    _marked(rules, families.DEEPSEEK_CALL)


def _json(rules: _Rules) -> None:
    rules.calls("arguments")
    rules.add(_list_of(rules), "bare: WS? (list | call) ANY")
    start = rf"{_SPACE}*(\[{_SPACE}*)?\{{"
    for rule, name, more in (("first", "_FIRST", rules.first_starts()), ("body", "_BODY", [])):
        rules.texts(None, name, [*more, start])
        rules.add(f"{rule}: bare | TEXT{name}")


def _list_of(rules: _Rules) -> str:
    more = "" if rules.one else ' (WS? "," WS? call)*'
    return f'list: "[" WS? call{more} WS? "]"'


_FAMILIES: Mapping[str, Callable[[_Rules], None]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "json": _json,
}


def _name(function: Mapping[str, Any], index: int) -> str:
    name = function["name"]
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidSamplingError(
            f"tools[{index}]['function']['name'] must be a str of 1 to {MAX_NAME_CHARS} characters "
            f"that can be printed where a tool is strict, got {name!r:.300}",
            argument="tools",
            value=name,
        )
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of the parameters of a function, an object."""
    schema = function.get("parameters")
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _refused(f"have parameters of type object, as {function['name']!r:.99}")
    return {"type": "object", **schema}


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _text(text: str) -> str:
    """A text of Lark."""
    return json.dumps(text)


def _escaped(text: str) -> str:
    """Escape a text for an expression of Lark, which a slash would end."""
    return "".join([f"\\x{{{ord(char):x}}}" for char in text])


def _refused(must: str) -> InvalidSamplingError:
    return InvalidSamplingError(f"tools must {must}", argument="tools")
