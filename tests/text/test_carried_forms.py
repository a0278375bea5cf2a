"""Calls that come back as a server told them reach the prompt, whatever a template takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioserve.errors import InvalidPromptError, RequestFailedError
from aioserve.text.carried_forms import BROKEN
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.text.answering_templates import TEMPLATES

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
ASKED = "Is it wet there?"
WRITTEN = {
    '{"city": "Oslo"}': "Oslo",
    "null": "look_up",
    "": "look_up",
    "{'city': 'Oslo'}": "Oslo",
    '{"city": "Oslo",}': "Oslo",
    '{"city": NaN, "x": "Oslo"}': "Oslo",
    '["Oslo"]': "Oslo",
    "to Oslo": "Oslo",
    '{"city": "Osl': "Osl",
}
"""Arguments as a model may write them, and what of them is in the prompt."""


def carried(content: str | None, *written: str) -> list[dict[str, Any]]:
    """A conversation with calls, each with its result."""
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "look_up", "arguments": arguments},
        }
        for number, arguments in enumerate(written)
    ]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "rain"} for one in calls]
    calling = {"role": "assistant", "content": content, "tool_calls": calls}
    return [{"role": "user", "content": ASKED}, calling, *results]


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, origin="here").render(conversation_of(messages, tools=[TOOL]))


def called(prompt: str) -> str:
    """Return the prompt between the user's text and the first result."""
    return prompt.partition("</user>")[2].partition("<tool>")[0]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_without_text_reach_the_prompt(name: str, content: str | None) -> None:
    for arguments, seen in WRITTEN.items():
        prompt = rendered(TEMPLATES[name], carried(content, arguments))
        assert "look_up" in called(prompt), arguments
        assert seen in called(prompt), arguments
        assert "none" not in prompt.lower(), arguments
        assert "rain" in prompt
    several = rendered(TEMPLATES[name], carried(content, *WRITTEN))
    assert called(several).count("look_up") == len(WRITTEN)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_as_it_is_stays_as_it_is(name: str) -> None:
    """The text of a message with text, and objects where no text is joined to them."""
    if name == "looks for calls without text":
        return  # and leaves them out beside text
    prompt = rendered(TEMPLATES[name], carried("Let me see.", '{"city": "Oslo"}'))
    assert "Let me see." in called(prompt)
    assert '\\"' not in prompt
    assert BROKEN not in prompt


def test_text_is_below_a_name_of_its_own_where_a_template_goes_through_arguments() -> None:
    source = TEMPLATES["goes through the arguments"]
    prompt = rendered(source, carried(None, "to Oslo", '{"city": 1}'))
    assert f'[look_up {BROKEN}="to Oslo" ][look_up city=1 ]' in prompt


def test_arguments_are_joined_as_json_with_their_characters() -> None:
    prompt = rendered(TEMPLATES["joins the arguments"], carried("", '{"city":"Å"}', "to Å"))
    assert "[look_up (" + json.dumps({"city": "Å"}, ensure_ascii=False) + ")]" in prompt
    assert "[look_up (to Å)]" in prompt


def test_a_template_that_takes_no_form_says_why_it_fails_on_the_first() -> None:
    broken = "{{ messages[1].tool_calls[0].function.arguments.no_such() }}{{ tools }}"
    with pytest.raises(RequestFailedError, match="rendering failed"):
        rendered(broken, carried(None, "{}"))
    refusing = "{{ raise_exception('I refuse ' ~ messages[1].content) }}{{ tools }}"
    with pytest.raises(InvalidPromptError, match=r"I refuse [Nn]one"):
        rendered(refusing, carried(None, "{}"))


def test_a_rendering_that_is_stopped_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{{ tools }}{% if messages[0].content == 'go' %}" + loop + "{% endif %}", origin="here"
    )
    begun: list[Any] = []
    whole = template._render

    def counted(*arguments: Any) -> str:
        begun.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(template, "_render", counted)
    template.render(conversation_of(carried(None, "{}"), tools=[TOOL]))
    begun.clear()
    messages = [{"role": "user", "content": "go"}, *carried(None, "{}")[1:]]
    with pytest.raises(InvalidPromptError, match="stopped"):
        template.render(conversation_of(messages, tools=[TOOL]))
    of_these = [one for one, *_ in begun if len(one.messages) == len(messages)]
    assert len(of_these) == 1  # others find out whether the template works at all
