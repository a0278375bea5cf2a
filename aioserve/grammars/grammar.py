"""Compiles structured output into a grammar, which makes a matcher for each completion."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.calls import CallsOutput, calls_source
from aioserve.grammars.channels import ChannelOutput
from aioserve.grammars.gbnf import is_gbnf, lark_of
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.grammars.schema import json_spacing, sound_lark, sound_schema
from aioserve.grammars.sizes import bounded_source, of_lark
from aioserve.grammars.structural_tag import structural_tag_source
from aioserve.grammars.vocabulary import Vocabulary, llguidance
from aioserve.structured_output import StructuredOutput

__all__ = ["CompiledGrammar", "compile_grammar"]

MAX_REASON_CHARS = 500

MAX_ITEMS_IN_ROW = 2000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
"""Most states of the lexer: a kilobyte or two each, in every matcher that comes to have so many."""
MAX_GRAMMAR_SIZE = 100_000


class CompiledGrammar:
    """A grammar for all completions with one structured output. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prototype: Any,
        *,
        forced: tuple[int, ...] = (),
        starts_with_spaces: bool = False,
    ) -> None:
        """`forced`: tokens that every completion begins with, which may take long to find out.
        `starts_with_spaces`: a completion is valid with spaces before it or without."""
        self._vocabulary = vocabulary
        self._prototype = prototype
        self._forced = forced
        self._starts_with_spaces = starts_with_spaces

    def matcher(self, end_ids: Set[int]) -> GrammarMatcher:
        """Return a matcher for a new completion, which any of `end_ids` ends."""
        vocabulary = self._vocabulary
        not_first = vocabulary.not_first
        if self._starts_with_spaces:
            not_first = vocabulary.not_first_but_for_spaces
        known = self._forced and end_ids.isdisjoint(self._forced)
        forced = self._forced if known else None
        return GrammarMatcher(vocabulary, self._prototype.deep_copy(), end_ids, not_first, forced)


def compile_grammar(vocabulary: Vocabulary, output: StructuredOutput) -> CompiledGrammar:
    """Compile structured output. May take long: call it on a thread. Raises `InvalidSamplingError`
    saying why for what isn't supported."""
    try:
        return _compiled(vocabulary, output)
    except InvalidSamplingError:
        if isinstance(output, CallsOutput | ChannelOutput) and output.form is not None:
            _compiled(vocabulary, output.form)  # raises where the form is to blame, not the tools
        raise


def _compiled(vocabulary: Vocabulary, output: StructuredOutput) -> CompiledGrammar:
    library = llguidance()
    argument = _argument(output)
    try:
        source = bounded_source(_source(output), argument)
        prototype = library.LLMatcher(vocabulary.library, source, log_level=0, limits=_limits())
    except InvalidSamplingError:
        raise
    except ValueError as error:
        raise _refused(argument, str(error)) from None
    except RecursionError:
        raise _refused(argument, "what is within it is nested too deep") from None
    if prototype.is_error():
        raise _refused(argument, prototype.get_error())
    if warnings := prototype.get_grammar_warnings():
        raise _refused(argument, "; ".join(warnings))
    is_text = isinstance(output, CallsOutput) and output.form is None
    free = is_text or output.structural_tag is not None
    first = CompiledGrammar(vocabulary, prototype, starts_with_spaces=free).matcher(frozenset())
    if not first.allowed().any() and not first.is_accepting:
        raise _refused(argument, "nothing that the tokenizer can write is valid")
    return CompiledGrammar(vocabulary, prototype, forced=first.forced(), starts_with_spaces=free)


def _argument(output: StructuredOutput) -> str:
    """What to blame for a grammar that can't be kept."""
    if isinstance(output, ChannelOutput):
        return _argument(output.form)
    return "tools" if isinstance(output, CallsOutput) else output.kind


def _limits() -> object:
    """Limits of one grammar's cost, in units of the library: some 20 ms of its lexer to compile,
    some 15 ms for a token."""
    return llguidance().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _source(output: StructuredOutput) -> str:
    """Source of the grammar, as llguidance takes it."""
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
        # A terminal, which the lexer reads as one: alternatives of a rule would each be an item of
        # the parser's, which has fewer than there may be choices.
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
