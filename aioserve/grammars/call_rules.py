"""Puts together a grammar of completions with calls.

Knows where calls may begin: at a mark, or at the start. Must not know how a family writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from aioserve.errors import InvalidSamplingError
from aioserve.text.output_parsers.registry import TOOL_PARSERS
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS, ToolParser

__all__ = [
    "SPACE",
    "Rules",
    "Style",
    "bare_or_form",
    "escaped",
    "marked",
    "quoted",
    "refused",
    "text_of",
    "words",
]

SPACE = (
    r"[\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}"
    r"\x{3000}]"
)
"""White space, as the output parsers and Python define it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """Style in which a model writes completions."""

    tools: str
    """Name of the parser of tool calls."""
    declared: type[ToolParser] | None = None
    """The parser, where a plugin has declared it; None: the bundled one of that name."""
    reasoning: tuple[str, str] | None = None
    """Tags around reasoning."""
    is_open: bool = False
    """True if completions begin within reasoning."""
    opened: str = ""
    """Text that the prompt has written of the first message, in a style of channels."""
    specials: Mapping[str, int] = {}
    """Marks that are special tokens, with their ids."""
    exact: Set[str] = frozenset()
    """Marks among `specials` that are text where other tokens spell them."""

    @property
    def parser(self) -> type[ToolParser]:
        """The parser of tool calls."""
        return TOOL_PARSERS[self.tools] if self.declared is None else self.declared


class Rules:
    """Grammar that is put together.

    Its terminals are `TEXT`, in which no call begins, and `TEXT_FIRST`, which a completion may
    begin with. Its rules are `free` and `first`, texts up to a mark, `call`, and the rules that a
    family of models adds.
    """

    def __init__(
        self,
        style: Style,
        names: Sequence[str],
        parameters: Sequence[Mapping[str, Any]],
        *,
        one: bool,
        max_whitespace: int | None,
        alone: bool = False,
        or_form: bool = False,
    ) -> None:
        self.style = style
        self.names = names
        self.parameters = parameters
        """Schemas of the arguments of each function."""
        self.one = one
        self.alone: bool = alone or or_form
        """True if no text stands beside calls: only calls follow the reasoning."""
        self.or_form = or_form
        """True if `form`, a rule that the caller adds, may take the place of calls."""
        self.schemas: list[str] = []
        """Schemas of the JSON in the grammar."""
        self._lines: list[str] = []
        self.is_spaced: bool = max_whitespace is None
        """True if one space may stand after a comma and a colon of JSON, and none elsewhere."""
        self.gap: str = "" if max_whitespace == 0 else "WS?"
        """White space within the JSON of a call. Around it a model writes some anyway."""
        self.space: str = rf"[ \t\n\r]{{1,{max_whitespace or 1}}}"
        """Expression of white space."""

    def add(self, *lines: str) -> None:
        self._lines += lines

    def args(self, index: int) -> str:
        """Return the rule of the arguments of a function, an object."""
        return self.json(self.parameters[index])

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of the JSON that a schema takes."""
        written = json.dumps(schema)
        if written not in self.schemas:
            self.schemas.append(written)
        return f"args{self.schemas.index(written)}"

    def text(self) -> str:
        return "\n".join([*self._start(), *self._lines, *_TERMINALS, f"WS: /{self.space}/"])

    def mark(self, name: str) -> str:
        """Return a mark in each way in which it may be written."""
        token_id = self.style.specials.get(name)
        if name in self.style.exact:
            return f"<[{token_id}]>"
        return text_of(name) if token_id is None else f"({text_of(name)} | <[{token_id}]>)"

    def without(self, *marks: str) -> str:
        """Return the restriction of a terminal to text that has none of the marks."""
        typed = [escaped(mark) for mark in marks if mark not in self.style.exact]
        return f" & ~(ANY /({'|'.join(typed)})/ ANY)" if typed else ""

    def texts(self, mark: str | None, name: str = "", starts: Sequence[str] = ()) -> None:
        """Add `TEXT{name}`, text without `mark` that begins with none of `starts`.

        Also adds the rule `up_to{name}`: that text up to the mark, and the mark.
        """
        without = self.without(mark) if mark else ""
        without += "".join([f" & ~(/{start}/ ANY)" for start in starts])
        self.add(f"TEXT{name}: ANY{without}")
        if mark:
            self._add_up_to(f"TEXT{name}", f"up_to{name.lower()}", mark)

    def calls(self, key: str) -> None:
        """Add `call`: an object with a name, and arguments under that key."""
        gap = self.gap
        comma, colon = f'{gap} "," {gap}', f'{gap} ":" {gap}'
        if self.or_form and self.is_spaced:
            # Like those of the form, which may come at the same place: the lexer can't tell them
            # apart.
            self.add("COMMA: /, ?/", "COLON: /: ?/")
            gap, comma, colon = "", "COMMA", "COLON"
        behind = f"{comma} {text_of(quoted(key))} {colon}"
        both = [
            f"{text_of(quoted(name))} {behind} {self.args(index)}"
            for index, name in enumerate(self.names)
        ]
        named = text_of(quoted("name"))
        self.add(f'call: "{{" {gap} {named} {colon} ({" | ".join(both)}) {gap} "}}"')

    def first_starts(self) -> list[str]:
        """Return starts that a completion which begins with text doesn't have."""
        tags = self.style.reasoning
        if tags is None or self.style.is_open or tags[0] in self.style.exact:
            return []
        return [f"{SPACE}*{escaped(tags[0])}"]

    def _start(self) -> list[str]:
        if self.style.reasoning is None:
            return ["start: first"]
        opens, closes = self.style.reasoning
        self.add(f"INNER: ANY{self.without(closes)}")
        self._add_up_to("INNER", "inner", closes)
        cut = "" if self.alone else "INNER | "
        if self.style.is_open:
            return [f"start: {cut}inner body"]
        self.add(f"opened: SPACE? {self.mark(opens)}")
        return [f"start: first | opened ({cut}inner body)"]

    def _add_up_to(self, terminal: str, rule: str, mark: str) -> None:
        self.up_to(terminal, rule, mark, self.style.specials.get(mark))

    def up_to(self, terminal: str, rule: str, mark: str, special: int | None) -> None:
        """Add `rule`: text of a terminal that doesn't have the mark, then the mark.

        The mark is text or the special token of that id. Does nothing if the rule exists.
        """
        is_typed = mark not in self.style.exact
        ways = [f"{rule}_mark"] if is_typed else []
        ways += [] if special is None else [f"{terminal} <[{special}]>"]
        line = f"{rule}: {' | '.join(ways)}"
        if line in self._lines:
            return
        if is_typed:
            self.add(f"{rule}_mark[lazy]: {terminal} {text_of(mark)}")
        self.add(line)


_TERMINALS = (
    "ANY: /(?s:.*)/",
    rf"SPACE: /{SPACE}+/",
)


def marked(
    rules: Rules,
    mark: str,
    *,
    starts: Sequence[str] = (),
    after: str = "",
    around: tuple[str, str] | None = None,
) -> None:
    """Add `first` and `body`, completions in which `held` stands after marks.

    With `starts` a completion may be `bare`, and no other begins with these. The text after a call
    is `TEXT{after}`. The marks `around` may stand around calls: if they are special tokens, no text
    has them.
    """
    rules.add(r"EDGE: /[ \t\r\n]{1,2}/")
    if rules.alone:
        _calls_alone(rules, mark, around)
        return
    opens, closes = map(rules.style.specials.get, around or ("", ""))
    behind = "" if closes is None else f" (EDGE? <[{closes}]>)?"

    def turn(name: str) -> str:
        """Return text, a call, and the marks around it."""
        before = f"up_to{name.lower()}"
        if opens is not None:
            before = f"({before} | TEXT{name} <[{opens}]> EDGE? {rules.mark(mark)})"
        return f"{before} held{behind}"

    rules.add(f"rest: TEXT{after}" if rules.one else f"rest: ({turn(after)})* TEXT{after}")
    rules.texts(mark)
    for rule, name, more in (("first", "_FIRST", rules.first_starts()), ("body", "_BODY", [])):
        rules.texts(mark, name, [*more, *starts])
        bare = "bare rest | " if starts else ""
        rules.add(f"{rule}: {bare}TEXT{name} | {turn(name)} rest")


def _calls_alone(rules: Rules, mark: str, around: tuple[str, str] | None) -> None:
    """Add `first` and `body`, completions without text."""
    turn = f"{rules.mark(mark)} held"
    if around is not None:
        opens, closes = map(rules.mark, around)
        turn = f"({opens} EDGE?)? {turn} (EDGE? {closes})?"
    rules.add(f"turn: {turn}")
    form = "form | " if rules.or_form else ""
    rules.add(f"first: {form}{'turn' if rules.one else 'turn (EDGE? turn)*'}")
    rules.add("body: EDGE? first")


def bare_or_form(rules: Rules, calls: str) -> None:
    """Add `first` and `body`, completions that are `calls` without a mark, or else the form."""
    rules.add(f"first: form | {calls}", r"EDGE: /[ \t\r\n]{1,2}/", "body: EDGE? first")


def words(rules: Rules) -> list[tuple[int, str]]:
    """Return the names that can be read without quotes, each with its index."""
    return [
        (index, name)
        for index, name in enumerate(rules.names)
        if len(name) <= MAX_WORD_CHARS and _WORD.fullmatch(name)
    ]


def quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def text_of(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text)


def escaped(text: str) -> str:
    """Escape a text for an expression of Lark, which a slash would end."""
    return "".join([f"\\x{{{ord(char):x}}}" for char in text])


def refused(must: str) -> InvalidSamplingError:
    return InvalidSamplingError(f"tools must {must}", argument="tools")
