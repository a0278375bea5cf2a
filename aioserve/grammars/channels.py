"""Grammars of completions in harmony, whose messages are in channels.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>{}
    free                                                                                      │ form

Reasoning is free. The form applies to the last message, or to the arguments of the calls. If the
prompt has begun a message (`opened`), the completion goes on with that.

Knows the format. Must not know how tokens spell it.
"""

from __future__ import annotations

from collections.abc import Mapping

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.call_rules import Rules, Style, refused, text_of, words
from aioserve.structured_output import StructuredOutput
from aioserve.text.output_parsers import harmony as form
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS

__all__ = ["ChannelOutput", "channel_frame", "harmony_calls"]


class ChannelOutput(StructuredOutput, frozen=True, kw_only=True):
    """Structured output in the channel of the answer.

    The `grammar` is all except the form of the answer, which it names `@form`.
    """

    form: StructuredOutput


def channel_frame(specials: Mapping[str, int], opened: str) -> str:
    """Return the grammar of a completion whose answer is `@form`.

    `specials` are marks that are special tokens, with their ids. Raises `InvalidSamplingError` if
    the prompt ends within a head.
    """
    style = Style(tools="harmony", opened=opened, specials=specials, exact=specials.keys())
    rules = Rules(style, (), (), one=False, max_whitespace=None)
    _messages(rules, '"analysis"', "@form")
    return rules.text()


def harmony_calls(rules: Rules) -> None:
    """Add `first` and `body`: messages, and calls after them."""
    named = words(rules)
    if len(named) < len(rules.names):
        raise refused(
            f"have names of letters, digits, '_', '-' and '.', at most {MAX_WORD_CHARS}, "
            "where one is strict or required and the model writes harmony"
        )
    channel, message = rules.mark(form.CHANNEL), rules.mark(form.MESSAGE)
    rules.add(f'kind: (" "? {rules.mark(form.CONSTRAIN)} "json" | " json")?')
    rules.add('channel: "commentary" | "analysis"')
    calls: list[str] = []
    for index, name in named:
        to = text_of(f" to=functions.{name}")
        head = f"({to} {channel} channel | {channel} channel {to}) kind {message}"
        calls.append(f"{head} {rules.args(index)}")
    rules.add(f"call: {' | '.join(calls)}")
    ends = f"({rules.mark(form.CALL)} | {rules.mark(form.END)})"
    again = "" if rules.one else f" ({ends} {rules.mark(form.START)} {text_of(form.ROLE)} call)*"
    rules.add(f"calls: call{again} {rules.mark(form.CALL)}?")
    if rules.alone:
        _messages(rules, '"analysis"', "form" if rules.or_form else "", or_else="calls")
    else:
        _messages(rules, '"analysis" | "commentary" | "final"', "BODY", or_else="calls")
    rules.add("body: first")


def _messages(rules: Rules, channels: str, answer: str, *, or_else: str = "") -> None:
    """Add `first`: messages in any of these channels, then the answer or `or_else`.

    `answer` may be empty: then there is none.
    """
    start, channel, message = map(rules.mark, (form.START, form.CHANNEL, form.MESSAGE))
    rules.add(f"BODY: ANY{rules.without(*form.HarmonyParser.marks)}")
    rules.up_to("BODY", "to_end", form.END, rules.style.specials.get(form.END))
    rules.add(f"next: to_end {start} {text_of(form.ROLE)}")
    rules.add(f"said: {channel} ({channels}) {message} next")
    ways = [f'{channel} "final" {message} {answer}'] if answer else []
    ways += [or_else] if or_else else []
    rules.add(f"last: {' | '.join(ways)}")
    opened = rules.style.opened
    if not opened:
        rules.add("first: said* last")
    elif form.is_reasoning_opened(opened):
        rules.add("first: next said* last")
    elif opened.endswith(form.MESSAGE) and answer:
        rules.add(f"first: {answer}")
    elif not answer:
        raise InvalidSamplingError(
            "required_tools must be empty where the prompt has begun a message that is no "
            f"reasoning, got a prompt that ends with {opened!r:.300}",
            argument="required_tools",
        )
    else:
        raise InvalidSamplingError(
            "structured_output must be None where the prompt ends within the head of a message, "
            f"got a prompt that ends with {opened!r:.300}",
            argument="structured_output",
        )
