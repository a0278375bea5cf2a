"""Contents of a conversation beside its messages: tool calls, tools, arguments of the template, and
how a prompt ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvalidPromptError, InvalidRequestError, PromptTooLongError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import MAX_TEMPLATE_KWARGS, MAX_TOOLS, Conversation, conversation_of
from aioserve.text.json_values import MAX_DEPTH, MAX_INT_BITS, MAX_JSON_CHARS, MAX_VALUES
from aioserve.text.messages import MAX_ID_CHARS, MAX_NAME_CHARS

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments} | more.pop("function", {})
    return {"id": "a1", "type": "function", "function": function} | more


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def seen(*messages: Any, **options: Any) -> list[dict[str, Any]]:
    """The messages as a template gets them."""
    return conversation_of(list(messages), **options).validated().messages


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b", "type": "text"}]
    assert seen({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    assert seen({"role": "tool", "content": parts[:1]}) == [{"role": "tool", "content": "a"}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, 2.5, null, true, "x"], "b": {}}', {"a": [1, 2.5, None, True, "x"], "b": {}}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        (" null ", {}),
        ({}, {}),
    ],
)
def test_templates_get_arguments_as_an_object(arguments: Any, value: Any) -> None:
    (message,) = seen(calling(call(arguments)))
    assert message["tool_calls"] == [call(value)]
    assert list(message) == ["role", "content", "tool_calls"]


@pytest.mark.parametrize(
    "arguments",
    [
        *("{a", "[1]", "5", '"x"', '{"city": "Oslo",}', "city=Oslo", "{'city': 'Oslo'}"),
        *('{"a": NaN}', '{"a": 1e999}', '{"a": 1' + "0" * 40 + "}", '{"a": ' + "1" * 5000 + ", "),
        *('{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a":' + "[" * 50_000),
        json.dumps({"a": nested(MAX_DEPTH)}),
        '{"a":"' + "x" * MAX_JSON_CHARS + '"}',
    ],
)
def test_arguments_that_are_no_object_reach_templates_as_the_text_that_they_are(
    arguments: str,
) -> None:
    (message,) = seen(calling(call(arguments)))
    assert message["tool_calls"] == [call(arguments)]


def test_what_was_left_out_stays_left_out() -> None:
    given_ = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert seen(given_) == [given_]
    assert seen({"role": "assistant", "content": "", "tool_calls": []}) == [
        {"role": "assistant", "content": ""}
    ]
    answer = {"role": "tool", "tool_call_id": "a1", "name": "f", "content": "22"}
    assert seen(calling(call({})), answer) == [calling(call({})), answer]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_templates_get_reasoning_by_the_names_that_they_know(field: str) -> None:
    conversation = conversation_of([{"role": "assistant", "content": "b", field: "a"}])
    template = ChatTemplate(
        "{{ messages[0].reasoning_content ~ messages[0].thinking }}", origin="here"
    )
    assert template.render(conversation) == "aa"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": []}, r"\['content'\] must have a content part, got \[\]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"\['content'\]\[0\]\['type'\] must be 'text', the only part that is supported",
        ),
        (
            {"role": "user", "content": [{"type": "image", "text": ""}]},
            r"\['content'\]\[0\]\['type'\] must be 'text', the only part that is supported, "
            "got 'image'",
        ),
        ({"role": "user", "content": ["x"]}, r"\['content'\]\[0\] must be a dict, got str"),
        ({"role": "user", "content": 5}, "must be a str or a list of content parts, got int"),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "x": 1}]},
            r"\['content'\]\[0\] has the unsupported field 'x'; only type, text are",
        ),
        (USER | {"tool_calls": [call()]}, "'tool_calls'; only role, content, name are"),
        (USER | {"reasoning_content": "x"}, "unsupported field 'reasoning_content'"),
        ({"role": "assistant", "content": None}, "must be a str or a list"),
        ({"role": "assistant", "content": "x", "index": 1}, "of role 'assistant' tool_calls, "),
        (USER | {"name": "x" * (MAX_NAME_CHARS + 1)}, r"\['name'\] must have at most"),
        (calling(reasoning="a", reasoning_content="b", content=""), "one of reasoning_content and"),
        (calling(5), r"\['tool_calls'\]\[0\] must be a dict, got int"),
        (calling(tool_calls="x"), r"\['tool_calls'\] must be a list, got str"),
        (calling(call(type="custom")), r"\[0\]\['type'\] must be 'function', got 'custom'"),
        (calling(call(index=0)), r"unsupported field 'index'; only id, type, function are"),
        (calling({"id": "x"}), r"\['function'\] must be a dict, got NoneType"),
        (calling(call(function={"name": 5})), r"\['function'\]\['name'\] must be a str, got int"),
        (calling(call(function={"x": 5})), "unsupported field 'x'; only name, arguments are"),
        (
            calling(call(function={"name": "x" * (MAX_NAME_CHARS + 1)})),
            f"must have at most {MAX_NAME_CHARS} characters, got {MAX_NAME_CHARS + 1}",
        ),
        (
            calling(call(id="x" * (MAX_ID_CHARS + 1))),
            rf"\['id'\] must have at most {MAX_ID_CHARS} characters",
        ),
        (calling(call([1])), r"\['arguments'\] must be a dict or JSON of one, got list"),
        (calling(call({"a": 10**40})), f"at most {MAX_INT_BITS} bits, got 133"),
        (calling(call({"a": math.nan})), r"\['a'\] must be finite, got nan"),
        (calling(call({"a": "\ud800"})), r"\['a'\] can't be encoded as UTF-8: '\\ud800'"),
        (calling(call({"\ud800": 1})), "a key of messages.* can't be encoded"),
        (calling(call("\ud800")), r"\['arguments'\] can't be encoded"),
        (calling(call({"a": object()})), r"\['a'\] must be a value of JSON, got object"),
        (calling(call({5: 1})), r"\['arguments'\] must have keys of str, got 5"),
        (calling(call({"a": nested(MAX_DEPTH)})), f"nested at most {MAX_DEPTH} deep"),
        (calling(call({"a": [0] * MAX_VALUES})), f"more than {MAX_VALUES} values"),
        (calling(call(json.dumps({"a": [0] * MAX_VALUES}))), f"more than {MAX_VALUES} values"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, r"\['tool_call_id'\] must be a str"),
    ],
)
def test_what_no_message_may_have_is_refused_by_place(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidPromptError, match=rf"messages\[1\].*{complaint}|{complaint}") as got:
        seen(USER, message)
    assert "messages[1]" in str(got.value)
    assert got.value.argument == "prompt"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tools": "x"}, "tools must be a list, got str"),
        ({"tools": {"a": 1}}, "tools must be a list, got dict"),
        ({"tools": [5]}, r"tools\[0\] must be a dict, got int"),
        ({"tools": [{"type": "x"}]}, r"tools\[0\]\['type'\] must be 'function', got 'x'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\['function'\] must be a dict"),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            r"tools\[0\]\['function'\]\['name'\] must be a str of 1 to 256 characters, got ''",
        ),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, f"tools must be at most {MAX_TOOLS}, got more"),
        ({"tools": [TOOL | {"x": object()}]}, r"tools\[0\]\['x'\] must be a value of JSON"),
        ({"tools": [TOOL | {"x": [0] * MAX_VALUES}]}, f"more than {MAX_VALUES} values"),
        ({"tools": [TOOL | {"x": nested(40)}]}, "must be nested at most 32 deep, got 33"),
        ({"tools": [TOOL | {"x": "\ud800"}]}, r"tools\[0\]\['x'\] can't be encoded"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a dict, got int"),
        ({"chat_template_kwargs": {5: 1}}, "must have keys of str, got 5"),
        ({"chat_template_kwargs": {"messages": 1}}, "mean nothing else .* got 'messages'"),
        ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs must have names of"),
        ({"chat_template_kwargs": {"x" * 65: 1}}, "at most 64 letters"),
        (
            {"chat_template_kwargs": {f"x{i}": 1 for i in range(MAX_TEMPLATE_KWARGS + 1)}},
            f"must be at most {MAX_TEMPLATE_KWARGS}, got more",
        ),
        ({"chat_template_kwargs": {"x": [object()]}}, r"\['x'\]\[0\] must be a value of JSON"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be a bool, got 1"),
        ({"continue_final_message": None}, "continue_final_message must be a bool, got None"),
        ({"continue_final_message": True}, "goes with add_generation_prompt=False alone"),
    ],
)
def test_what_comes_with_messages_is_refused_by_name(options: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as got:
        seen(USER, **options)
    assert got.value.argument in options


class Endless(Mapping[str, Any]):
    """Says that it has nothing, and has no end."""

    def __getitem__(self, key: str) -> Any:
        return "x"

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            yield f"x{(number := number + 1)}"


class Raises(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise KeyError("planted")


@pytest.mark.parametrize("of", [lambda x: {"tools": [x]}, lambda x: {"chat_template_kwargs": x}])
def test_objects_that_lie_or_raise_are_named(of: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidPromptError, match=f"more than {MAX_VALUES} values"):
        seen(USER, **of(Endless()))
    with pytest.raises(InvalidPromptError, match="can't be read: KeyError"):
        seen(USER, **of(Raises({"x": 1})))
    with pytest.raises(InvalidPromptError, match=f"more than {MAX_VALUES} values"):
        seen(calling(call(Endless())))


def test_characters_of_all_that_comes_are_counted_together() -> None:
    options: Any = {"tools": [TOOL], "chat_template_kwargs": {"x": "12345"}}
    chars = conversation_of([USER], **options).num_chars
    assert conversation_of([USER], max_chars=chars, **options)
    with pytest.raises(PromptTooLongError, match=f"has {chars} characters up to chat_template_"):
        conversation_of([USER], max_chars=chars - 1, **options)


def test_nothing_of_what_is_given_is_kept_or_changed() -> None:
    messages, tools, kwargs = [calling(call("{}"))], [{**TOOL}], {"x": [1]}
    before = json.dumps([messages, tools, kwargs])
    conversation = conversation_of(messages, tools=tools, chat_template_kwargs=kwargs)
    kwargs["x"].append(2)
    assert conversation.template_kwargs == {"x": [1]}
    checked = conversation.validated()
    assert conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert checked.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
    kwargs["x"].pop()
    assert json.dumps([messages, tools, kwargs]) == before


# -- what a template reads


def test_tools_that_a_template_does_not_read_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", origin="here")
    with pytest.raises(InvalidPromptError, match="tools are not supported: the chat template here"):
        template.render(conversation_of([USER], tools=[TOOL]))
    assert template.render(conversation_of([USER], tools=[])) == "hi"


def test_arguments_that_a_template_does_not_read_are_refused() -> None:
    template = ChatTemplate(
        "{{ messages[0].content ~ x ~ bos_token }}",
        special_tokens={"bos_token": "<s>"},
        origin="here",
    )

    def render(**kwargs: Any) -> str:
        return template.render(conversation_of([USER], chat_template_kwargs=kwargs))

    assert render(x=5) == "hi5<s>"
    with pytest.raises(InvalidPromptError, match="not have 'y': the chat template here doesn't"):
        render(x=5, y=5)
    with pytest.raises(InvalidPromptError, match=r"not have 'bos_token': .* a value of its own"):
        render(bos_token="<t>")


# -- how a prompt ends

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content CONTENT }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x1c\x1d\x1e\x1f"), min_size=1))
def test_a_message_is_continued_where_its_content_ends(content: str) -> None:
    conversation = conversation_of(
        [USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    for filter_, expected in (("", content), ("| trim", content.strip())):
        template = ChatTemplate(TURNS.replace("CONTENT", filter_), origin="here")
        assert template.render(conversation) == f"<user>hi</><assistant>{expected}"


def test_a_message_that_a_template_does_not_write_is_not_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", origin="here")
    conversation = conversation_of(
        [USER, USER], add_generation_prompt=False, continue_final_message=True
    )
    with pytest.raises(InvalidPromptError, match="continue_final_message needs a chat template"):
        template.render(conversation)
    with pytest.raises(InvalidRequestError, match="needs a last message with content"):
        conversation_of(
            [{"role": "user", "content": ""}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_a_conversation_maps_every_text_and_no_word_of_the_api() -> None:
    conversation = conversation_of(
        [calling(call({"key": ["v"]}, id="i"), content="c", reasoning_content="r")],
        tools=[TOOL | {"extra": "e"}],
        chat_template_kwargs={"x": {"k": "v"}},
    )
    mapped: Conversation = conversation.mapped(lambda text: f"<{text}>")
    assert mapped.messages == [
        {
            "role": "assistant",
            "content": "<c>",
            "tool_calls": [call({"<key>": ["<v>"]}, id="<i>", function={"name": "<f>"})],
            "reasoning_content": "<r>",
        }
    ]
    assert mapped.tools == [
        {
            "type": "function",
            "function": {"name": "<f>", "parameters": {"type": "object"}},
            "<extra>": "<e>",
        }
    ]
    assert mapped.template_kwargs == {"x": {"<k>": "<v>"}}
    assert "key" in set(conversation.texts())
    assert "assistant" not in set(conversation.texts())
