"""A budget of reasoning: it ends with its tag in time, and nothing else is forced or forbidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.thinking import ThinkingBudget
from aioserve.text.output_parsers.reasoning import ReasoningReader, ReasoningTags
from tests.grammars.test_calls import END_ID, TOOLS, VOCABULARY
from tests.grammars.walks import ids_in

TOKENIZER, WORDS = VOCABULARY
TAGS = [("<think>", "</think>"), ("<|im_start|>", "[ARGS]")]
"""Written as text, and special tokens."""
texts = st.lists(
    st.sampled_from(["a", "\n", " ", "</thi", "<think>", "</think>", "<", "é", "[ARGS]"]),
    max_size=9,
).map("".join)


def budget_of(
    num_tokens: int,
    tags: tuple[str, str],
    *,
    is_open: bool,
    grammar: CompiledGrammar | None = None,
) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens,
        reasoning=ReasoningTags(*tags, is_open=False),
        opened=tags[0] * is_open,
        shown=TOKENIZER.special_among(tags),
        tokenizer=TOKENIZER,
        num_logits=WORDS.num_logits,
        grammar=grammar,
    )


def text_of(ids: list[int], tags: tuple[str, str]) -> str:
    shown = TOKENIZER.special_among(tags)
    return "".join(shown.get(i, chr(i) if i < 256 else "") for i in ids)


@pytest.mark.parametrize("tags", TAGS)
@given(texts, st.booleans(), st.booleans(), st.integers(0, 12))
def test_reasoning_ends_in_time_and_all_else_is_free(
    tags: tuple[str, str], text: str, is_open: bool, opens: bool, most: int
) -> None:
    wanted = TOKENIZER.encode((tags[0] if opens else "") + text)
    tag = TOKENIZER.encode(tags[1])
    matcher = budget_of(most, tags, is_open=is_open).matcher({END_ID})
    # A plain model: the text so far read anew for each token.
    ids: list[int] = []
    num_reasoned, was_forced = 0, False
    while wanted or matcher.forced():
        reader = ReasoningReader(*tags, is_open=is_open)
        reader.push(text_of(ids, tags))
        is_due = reader.is_inside and num_reasoned >= most and not was_forced
        if is_due:
            assert matcher.forced() == tuple(tag)
            assert matcher.argument == "thinking_token_budget"
            for token_id in tag:
                assert ids_in(matcher.allowed()) == [token_id]
                assert not matcher.accept(END_ID)
                assert matcher.accept(token_id)
            ids += tag
            was_forced = True
            continue
        assert matcher.forced() == ()
        assert np.all(matcher.allowed() == -1)
        token_id = wanted.pop(0)
        assert matcher.accept(token_id)
        ids.append(token_id)
        num_reasoned += reader.is_inside
    assert matcher.accept(END_ID)
    assert matcher.has_ended
    assert not matcher.allowed().any()
    assert not matcher.accept(0)


def test_a_special_tag_is_one_token_and_one_in_text_is_as_the_tokenizer_writes_it() -> None:
    for tags, length in zip(TAGS, (len("</think>"), 1), strict=True):
        matcher = budget_of(0, tags, is_open=True).matcher({END_ID})
        assert len(matcher.forced()) == length
        assert matcher.forced(1) == matcher.forced()[:1]


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def test_a_budget_goes_with_calls_that_are_held_to_their_tools() -> None:
    style = Style(tools="hermes", reasoning=TAGS[0], is_open=True)
    output = calls_output(style, TOOLS, frozenset(["now"]), one=True)
    grammar = compile_grammar(WORDS, output)
    matcher = budget_of(4, TAGS[0], is_open=True, grammar=grammar).matcher({END_ID})

    def goes(text: str) -> bool:
        return all(matcher.accept(token_id) for token_id in text.encode())

    assert goes("Now?")
    assert bytes(matcher.forced()).decode() == "</think>"
    assert not goes("x")
    assert goes("</think>" + CALL[:30])
    assert matcher.argument == "structured_output"
    assert not goes("x")
    assert goes(CALL[30:])
    assert matcher.accept(END_ID)
    assert matcher.has_ended
    assert matcher.error is None


def same(matcher: Any, other: Any) -> bool:
    return matcher.forced() == other.forced() and bool(np.all(matcher.allowed() == other.allowed()))


@given(texts, st.integers(0, 6))
def test_two_matchers_of_the_same_tokens_are_equal(text: str, most: int) -> None:
    budget = budget_of(most, TAGS[0], is_open=True)
    one, other = budget.matcher({END_ID}), budget.matcher({END_ID})
    for token_id in TOKENIZER.encode(text):
        assert one.accept(token_id) is other.accept(token_id)
        assert same(one, other)
