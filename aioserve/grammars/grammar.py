"""Compiles structured output into a grammar, which makes a matcher for each completion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.calls import CallsOutput, calls_source
from aioserve.grammars.channels import ChannelOutput
from aioserve.grammars.follower import Follower
from aioserve.grammars.gbnf import is_gbnf, lark_of
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.grammars.schema import json_spacing, sound_lark, sound_schema
from aioserve.grammars.sizes import bounded_source, of_lark
from aioserve.grammars.structural_tag import structural_tag_source
from aioserve.grammars.vocabulary import Vocabulary, llguidance
from aioserve.structured_output import StructuredOutput

__all__ = ["CompiledGrammar", "argument_of", "compile_grammar"]

MAX_REASON_CHARS = 500

MAX_ITEMS_IN_ROW = 2000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
"""Most states of a lexer that follows one completion: half a kilobyte to two each."""
SHARED_LEXER_STATES = 4096
"""Most states of a lexer that completions share. Usual schemas need a few hundred."""
MAX_GRAMMAR_SIZE = 100_000

LARGE_SOURCE_CHARS = 4096
"""Longest source of a grammar that takes no more than some 50 ms to compile."""

STATE_BYTES = 1024
PIECE_BYTES = 400
"""Memory of a byte that a terminal forces."""
SOURCE_BYTES = 200
"""Memory of a grammar for each byte of its source."""


class CompiledGrammar:
    """Grammar for all completions with one structured output. Thread-safe.

    Copies of the library's matcher share the states of one lexer, which only grow. So completions
    begin with copies of a prototype whose lexer may have few states. When it has them all, the
    completion that needs more gets a lexer of its own, and the next completion a new prototype.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        source: str,
        *,
        piece_bytes: int = 0,
        starts_with_spaces: bool = False,
    ) -> None:
        """`piece_bytes` is the size of the largest terminal.

        With `starts_with_spaces` a completion is valid with spaces before it or without.
        """
        self._vocabulary = vocabulary
        self._source = source
        # A large grammar takes long to compile, so it is seldom compiled again.
        self._max_shared = min(SHARED_LEXER_STATES + len(source) // 4, MAX_LEXER_STATES)
        self.num_bytes: int = (
            SOURCE_BYTES * len(source) + STATE_BYTES * self._max_shared + PIECE_BYTES * piece_bytes
        )
        """Bytes of memory that it may need, at most."""
        self._starts_with_spaces = starts_with_spaces
        self._forced: tuple[int, ...] = ()
        self._prototype: Any = None
        """Matcher of the library, of which copies are made; None when its lexer is full."""

    @property
    def is_large(self) -> bool:
        """True if a call of one of its matchers may take seconds, as it may compile the grammar
        again.
        """
        return len(self._source) > LARGE_SOURCE_CHARS

    def check(self, refuse: Callable[[str], InvalidSamplingError]) -> None:
        """Make the prototype. Raise `refuse(reason)` if nothing can be valid."""
        first = self._new(self._max_shared)
        if first.is_error():
            raise refuse(first.get_error())
        if warnings := first.get_grammar_warnings():
            raise refuse("; ".join(warnings))
        self._prototype = first
        matcher = self.matcher(frozenset())
        if not matcher.allowed().any() and not matcher.is_accepting:
            raise refuse("nothing that the tokenizer can write is valid")
        self._forced = matcher.forced()

    def matcher(self, end_ids: Set[int]) -> GrammarMatcher:
        """Return a matcher for a new completion, which any of `end_ids` ends."""
        vocabulary = self._vocabulary
        not_first = vocabulary.not_first
        if self._starts_with_spaces:
            not_first = vocabulary.not_first_but_for_spaces
        if (prototype := self._prototype) is None:
            prototype = self._prototype = self._new(self._max_shared)
        known = self._forced and end_ids.isdisjoint(self._forced)
        follower = Follower(
            prototype.deep_copy(), partial(self._alone, prototype), vocabulary.end // 32 + 1
        )
        forced = self._forced if known else None
        return GrammarMatcher(vocabulary, follower, end_ids, not_first, forced)

    def _alone(self, full: Any) -> Any:
        """Return the library's matcher with a lexer of its own. The lexer of `full` has no room."""
        if self._prototype is full:
            self._prototype = None
        return self._new(MAX_LEXER_STATES)

    def _new(self, max_states: int) -> Any:
        limits = _limits(max_states)
        return llguidance().LLMatcher(
            self._vocabulary.library, self._source, log_level=0, limits=limits
        )


def compile_grammar(vocabulary: Vocabulary, output: StructuredOutput) -> CompiledGrammar:
    """Compile structured output.

    It may take long: call it on a thread. Raises `InvalidSamplingError` with the reason for an
    output that isn't supported.
    """
    try:
        return _compiled(vocabulary, output)
    except InvalidSamplingError:
        if isinstance(output, CallsOutput | ChannelOutput) and output.form is not None:
            _compiled(vocabulary, output.form)  # raises where the form is to blame, not the tools
        raise


def _compiled(vocabulary: Vocabulary, output: StructuredOutput) -> CompiledGrammar:
    argument = argument_of(output)
    is_text = isinstance(output, CallsOutput) and output.form is None
    free = is_text or output.structural_tag is not None
    try:
        source, piece_bytes = bounded_source(_source(output), argument)
        grammar = CompiledGrammar(
            vocabulary, source, piece_bytes=piece_bytes, starts_with_spaces=free
        )
        grammar.check(partial(_refused, argument))
    except InvalidSamplingError:
        raise
    except ValueError as error:
        raise _refused(argument, str(error)) from None
    except RecursionError:
        raise _refused(argument, "what is within it is nested too deep") from None
    return grammar


def argument_of(output: StructuredOutput) -> str:
    """Return the parameter to name in an error about a grammar that can't be applied."""
    if isinstance(output, ChannelOutput):
        return argument_of(output.form)
    return "tools" if isinstance(output, CallsOutput) else output.kind


def _limits(max_states: int) -> object:
    """Return limits of one grammar's cost, in units of the library.

    They come to some 20 ms of its lexer to compile, and some 15 ms for a token.
    """
    return llguidance().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=max_states,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _source(output: StructuredOutput) -> str:
    """Return the source of the grammar, as llguidance takes it."""
    if isinstance(output, ChannelOutput):
        frame, form = (
            json.loads(each) for each in (of_lark(output.grammar or ""), _source(output.form))
        )
        return json.dumps(
            {"grammars": [*frame["grammars"], {**form["grammars"][0], "name": "form"}]}
        )
    if isinstance(output, CallsOutput):
        return of_lark(calls_source(output))
    if output.structural_tag is not None:
        return of_lark(structural_tag_source(output))
    if output.json_schema is not None:
        return _json_source(sound_schema(str(output.json_schema), "json_schema"), output)
    if output.json_object:
        return _json_source('{"type":"object"}', output)
    if output.regex is not None:
        return llguidance().LLMatcher.grammar_from_regex(output.regex)
    if output.choice is not None:
        # A terminal, which the lexer reads as one. Alternatives of a rule would each be an item of
        # the parser, which takes fewer items than there may be choices.
        choices = " | ".join(map(json.dumps, output.choice))
        return of_lark(f"start: CHOICE\nCHOICE: {choices}")
    grammar = output.grammar or ""
    return of_lark(sound_lark(lark_of(grammar) if is_gbnf(grammar) else grammar))


def _json_source(schema: str, output: StructuredOutput) -> str:
    if schema.strip() == "false":
        raise ValueError("Unsatisfiable schema: schema is false")
    if schema.strip() == "true":
        schema = "{}"
    spacing = json_spacing(output.whitespace)
    return llguidance().LLMatcher.grammar_from_json_schema(schema, overrides=spacing)


def _refused(argument: str, reason: str) -> InvalidSamplingError:
    must = "be one that can be kept"
    if argument == "tools":
        must = "have parameters that calls can be held to, or not be strict"
    reason = re.sub(r"\s+", " ", reason.partition("<backtrace>")[0].replace("<non-verbose/>", ""))
    return InvalidSamplingError(
        f"{argument} must {must}: {reason.strip()[:MAX_REASON_CHARS]}",
        argument=argument,
    )
