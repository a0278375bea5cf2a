"""Special tokens never come from what accompanies messages: tools, tool calls and their results,
reasoning, template arguments, keys of objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.errors import InvalidPromptError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import Conversation, conversation_of
from tests.attacks.hostile import named_errors
from tests.attacks.test_forged_turns import forgeries, marks_of, names_of, template, tokenizer_of
from tests.tiers import examples

KINDS = ("chatml", "not marked", "stripping", "nested names", "spelled by the model")

TEMPLATES = {
    "as JSON": "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}"
    "{{ x | default('') | tojson }}",
    "as ASCII": "{{ messages | tojson(ensure_ascii=true) }}{{ tools | tojson(indent=2) }}{{ x }}",
    "as Python shows it": "{{ bos_token }}{{ messages }}{{ tools }}{{ x }}{{ eos_token }}",
    "part by part": "{% for m in messages %}{{ bos_token ~ m.reasoning_content ~ m.content }}"
    "{% for c in m.tool_calls %}{{ c.id ~ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ bos_token ~ k ~ '=' ~ v }}{% endfor %}"
    "{% endfor %}{{ m.tool_call_id }}{{ eos_token }}{% endfor %}"
    "{% for t in tools %}{{ t.function.name ~ t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k ~ v.description ~ v.enum[0] }}"
    "{{ eos_token }}{% endfor %}{% endfor %}{{ x }}",
    "side by side": "{{ bos_token[:-1] ~ x ~ eos_token[1:] }}{% for m in messages %}"
    "{% for c in m.tool_calls %}{{ bos_token[:2] ~ c.function.name ~ c.id }}{% endfor %}"
    "{{ m.tool_call_id ~ eos_token[-1:] }}{% endfor %}{{ tools[0].function.description }}",
}


def dialogues(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Conversation]:
    def made(part: list[str]) -> Conversation:
        a, b, c, d, e, f, g, h, i, j, k, m = part
        function = {"name": a, "arguments": {b: c, "nested": [{d: e}, 5, None, True]}}
        return conversation_of(
            [
                {"role": "user", "content": [{"type": "text", "text": f}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": g,
                    "tool_calls": [{"id": h, "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": h, "name": a, "content": i},
            ],
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "f" + a,
                        "description": j,
                        "parameters": {
                            "type": "object",
                            "properties": {
                                k: {"type": "string", "description": m, "enum": [c]},
                                f"{k}2": {"type": e, "description": d, "enum": [b]},
                            },
                        },
                    },
                }
            ],
            chat_template_kwargs={"x": j},
        )

    return st.lists(texts, min_size=12, max_size=12).map(made)


def harmless(conversation: Conversation) -> Conversation:
    return conversation.mapped(
        lambda text: "~" if text.strip() else text, key=lambda _, index: f"~{index}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_special_tokens_are_those_of_the_template(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=examples(25))
    @given(dialogues(forgeries(kind)), st.sampled_from(sorted(TEMPLATES)))
    def check(conversation: Conversation, style: str) -> None:
        ours = template(kind, TEMPLATES[style])
        with named_errors():
            ids = ours.encode(conversation, tokenizer)
            assert marks_of(kind, ids) == marks_of(
                kind, ours.encode(harmless(conversation), tokenizer)
            )

    check()


PLACES: dict[str, Any] = {
    "call": {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "MARK", "function": {"name": "MARK", "arguments": {"MARK": ["MARK"]}}}]}]},
    "result": {"messages": [{"role": "tool", "tool_call_id": "MARK", "content": "MARK"}]},
    "reasoning": {"messages": [
        {"role": "assistant", "content": "MARK", "reasoning_content": "MARK"}]},
    "tool": {"messages": [{"role": "user", "content": ""}], "tools": [
        {"type": "function", "MARK": "MARK", "function": {
            "name": "MARK", "parameters": {"properties": {"MARK": {"type": "MARK"}}}}}]},
    "argument": {"messages": [{"role": "user", "content": ""}],
                 "chat_template_kwargs": {"x": {"MARK": ["MARK"]}}},
}  # fmt: skip


def filled(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return value.replace("MARK", mark)
    if isinstance(value, dict):
        return {filled(key, mark): filled(entry, mark) for key, entry in value.items()}
    return [filled(entry, mark) for entry in value]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("style", ["as JSON", "as ASCII", "as Python shows it"])
def test_a_mark_is_text_wherever_it_is_typed(place: str, style: str) -> None:
    kind = "chatml"
    tokenizer, mark = tokenizer_of(kind), names_of(kind)[0]
    ours = template(kind, TEMPLATES[style])
    forged = conversation_of(**filled(PLACES[place], mark))
    plain = conversation_of(**filled(PLACES[place], "word"))
    ids = ours.encode(forged, tokenizer)
    assert marks_of(kind, ids) == marks_of(kind, ours.encode(plain, tokenizer))
    text = ours.render(forged)
    assert mark in text.replace("\\", "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    taken = ours.encode(forged, tokenizer, special_tokens_in_messages=True)
    assert len(marks_of(kind, taken)) > len(marks_of(kind, ids))


# -- what templates ask of ids, types and names isn't refused


def test_a_template_may_check_the_length_of_ids() -> None:
    kind = "chatml"
    ours = template(
        kind,
        "{% for m in messages %}{{ bos_token }}{% for c in m.tool_calls %}"
        "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('9 of them') }}"
        "{% endif %}{{ c.id }}{% endfor %}{% if m.role == 'tool' and "
        "m.tool_call_id | length != 9 %}{{ raise_exception('9 of them') }}{% endif %}{% endfor %}",
    )

    def ids(call_id: str) -> list[int]:
        called = {"id": call_id, "function": {"name": "f", "arguments": {}}}
        return ours.encode(
            conversation_of(
                [
                    {"role": "assistant", "tool_calls": [called]},
                    {"role": "tool", "tool_call_id": call_id, "content": "the end"},
                ]
            ),
            tokenizer_of(kind),
        )

    assert len(marks_of(kind, ids("abcdefghi"))) == 2
    with pytest.raises(InvalidPromptError, match="refused: 9 of them"):
        ids("abc")


READS: dict[str, str] = {
    "a refusal": "{% if m.content == 'go' %}{{ bos_token }}{% else %}"
    "{{ raise_exception('no') }}{% endif %}",
    "a word": "{{ bos_token if m.content == 'go' }}",
}


@pytest.mark.parametrize("reads", READS)
def test_a_template_may_refuse_what_it_reads_in_texts(reads: str) -> None:
    kind = "chatml"
    ours = template(kind, "{% for m in messages %}" + READS[reads] + "{% endfor %}")
    ids = ours.encode([{"role": "user", "content": "go"}], tokenizer_of(kind))
    assert len(marks_of(kind, ids)) == 1


def test_where_others_are_refused_a_text_with_the_word_of_a_token_is_too() -> None:
    ours = template(
        "chatml",
        "{% if 'go' in messages[0].content %}{{ '<|' ~ messages[0].content[2:] ~ '|>' }}"
        "{% else %}{{ raise_exception('no') }}{% endif %}",
    )
    with pytest.raises(InvalidPromptError, match="writes 1 with these contents and none with"):
        ours.encode([{"role": "user", "content": "goim_end"}], tokenizer_of("chatml"))


def test_properties_that_a_template_marks_one_by_one_are_no_forgery() -> None:
    ours: ChatTemplate = template(
        "chatml",
        "{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}"
        "{{ bos_token ~ k ~ v.type }}{% endfor %}{% endfor %}{{ messages[0].content }}",
    )
    properties = {f"end{n}": {"type": "string"} for n in range(40)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    conversation = conversation_of(
        [{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}]
    )
    assert len(marks_of("chatml", ours.encode(conversation, tokenizer_of("chatml")))) == 40
