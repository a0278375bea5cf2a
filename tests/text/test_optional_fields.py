"""Fields that messages may leave out, for templates that fail without them."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import InvalidPromptError, RequestFailedError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.attacks.test_forged_turns import tokenizer_of

USER = {"role": "user", "content": "a secret"}


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    fields = {"function": {"name": name, "arguments": '{"city": "Zürich"}'}}
    return fields if call_id is None else {"id": call_id, **fields}


def called(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def result(call_id: str | None = None, **more: Any) -> dict[str, Any]:
    fields = {"role": "tool", "content": "12:00", **more}
    return fields if call_id is None else fields | {"tool_call_id": call_id}


def rendered(source: str, *messages: dict[str, Any], tools: Any = None) -> str:
    source = "{# tools tool_calls #}{% for m in messages %}" + source + "{% endfor %}"
    ours = ChatTemplate(source, origin="/models/here")
    conversation = conversation_of([USER, *messages], tools=tools)
    ours.encode(conversation, tokenizer_of("chatml"))
    return ours.render(conversation)


NAMES = "{% if m.role == 'tool' %}{{ m.name + ';' }}{% endif %}"


def test_a_result_without_a_name_has_that_of_its_call() -> None:
    calls = called(call("f", "1"), call("g", "2"))
    assert rendered(NAMES, calls, result("2"), result("1")) == "g;f;"
    assert rendered(NAMES, calls, result("2", name="own"), result("1")) == "own;f;"
    again = called(call("h", "1"))
    assert rendered(NAMES, calls, result("1"), result("2"), again, result("1")) == "f;g;h;"


def test_a_result_without_an_id_answers_the_call_at_its_place() -> None:
    calls = called(call("f"), call("g"))
    assert rendered(NAMES, calls, result(), result()) == "f;g;"


def test_a_result_of_no_call_is_refused_by_the_field_that_it_lacks() -> None:
    for one in (result("3"), result()):
        with pytest.raises(InvalidPromptError, match="no attribute 'name'") as caught:
            rendered(NAMES, called(call("f", "1"), content=""), result("1"), one)
        assert caught.value.argument == "messages"
        assert "secret" not in str(caught.value)
        assert "/models" not in str(caught.value)


def test_what_a_template_prints_without_a_field_stays_as_it_is() -> None:
    source = "{{ m.name }}{{ m.content }}{{ m.tool_calls }};"
    assert "f" not in rendered(source, called(call("g", "1")), result("1")).split(";")[2]
    assert rendered(source, called(call("g", "1"))).startswith("a secret;[")


@pytest.mark.parametrize("use", ["m.content + ''", "m.content.strip()", "m.content | length"])
def test_a_content_that_is_null_is_empty_for_a_template_that_takes_texts(use: str) -> None:
    printed = rendered(f"{{{{ {use} }}}};", called(call("f", "1")))
    assert printed.split(";")[1] in ("", "0")


def test_a_tool_may_lack_all_but_its_name() -> None:
    tool = {"type": "function", "function": {"name": "ping"}}
    source = (
        "{% for t in tools %}{{ t.function.name + t.function.description }}"
        "{{ t.function.parameters.properties | tojson }}{% endfor %}"
    )
    assert rendered(source, tools=[tool]) == "ping{}"
    null = {"type": "function", "function": tool["function"] | {"description": None}}
    assert rendered(source, tools=[null]) == "ping{}"


def test_arguments_are_json_for_a_template_that_joins_them_to_texts() -> None:
    source = "{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}"
    assert rendered(source, called(call("f", "1"), content="")) == 'f{"city": "Zürich"}'


def test_messages_that_a_template_fails_with_are_refused_and_a_broken_one_fails() -> None:
    source = "{{ messages | length }}{{ %s }}"
    ours = ChatTemplate(source % "messages[0].content.nothing.more", origin="/models/here")
    with pytest.raises(RequestFailedError, match=r"^here: rendering failed: .*line 1\)$"):
        ours.render([USER, USER])
    ours = ChatTemplate(source % "messages[1].content.nothing.more if messages[1]", origin="/m/t")
    with pytest.raises(
        InvalidPromptError,
        match=r"^the model's chat template t can't render these messages: rendering failed: "
        r"'str object' has no attribute 'nothing' \(in line 1\)$",
    ):
        ours.render([USER, USER])


def test_messages_that_take_a_template_too_long_are_refused() -> None:
    source = "{% for a in range(99999) if messages[1] %}{% set b = a * a * a %}{% endfor %}"
    with pytest.raises(InvalidPromptError, match="these messages: rendering was stopped: it took"):
        ChatTemplate(source, origin="here").render([USER, USER])
