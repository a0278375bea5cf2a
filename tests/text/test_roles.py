"""Roles that a template doesn't know are refused; what it does with those that it knows is its."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import InvalidPromptError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import Conversation
from aioserve.text.roles import KNOWN_ROLES, MAX_COMPARED, Roles
from tests.tiers import examples

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DROPPING = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
    "{% elif m['role'] in ['assistant', \"critique\"] %}A:{{ m.content }}"
    "{% elif m.role.startswith('tool_') %}T:{{ m.content }}{% endif %}{% endfor %}"
)
MISREADING = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{% else %}A:{% endif %}{{ m.content }}"
    "{% endfor %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}"
    "{% else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}


def render(source: str, *roles: str) -> str:
    messages: list[dict[str, Any]] = [{"role": role, "content": f"from {role}"} for role in roles]
    return ChatTemplate(source, origin="dir/chat.jinja").render(messages)


@pytest.mark.parametrize("source", [CHATML, DROPPING, MISREADING, REFUSING])
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("asistant", "assistant"),
        ("assisstant", "assistant"),
        ("Assistant", "assistant"),
        ("USER", "user"),
        (" user", "user"),
        ("usr", "user"),
        ("sytem", "system"),
        ("tools", "tool"),
        ("functions", "function"),
        ("develper", "developer"),
    ],
)
def test_a_misspelt_role_is_refused_with_the_one_that_was_meant(
    source: str, wrong: str, meant: str
) -> None:
    with pytest.raises(InvalidPromptError) as told:
        render(source, "user", wrong)
    assert str(told.value).startswith("messages[1]['role'] must be one of system, developer, user,")
    assert str(told.value).endswith(f"knows, got {wrong!r}; did you mean {meant}?")
    assert told.value.argument == "messages"
    assert told.value.value == wrong


@pytest.mark.parametrize("source", [DROPPING, MISREADING])
@pytest.mark.parametrize("role", ["narrator", "human", "user_1", "", "x" * 64, "'", "Ünknown"])
def test_a_role_that_a_template_would_drop_or_misread_is_refused(source: str, role: str) -> None:
    told = r"messages\[2\]\['role'\] must be one of .* or another that the chat template chat.jinja"
    with pytest.raises(InvalidPromptError, match=told):
        render(source, "user", "assistant", role)


@pytest.mark.parametrize("role", ["content", "name", "parts"])
def test_a_key_that_a_template_reads_is_no_role_that_it_names(role: str) -> None:
    source = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m.get('name', '') }}"
        "{{ m['content'] or (m)['parts'] or [m]['parts'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidPromptError, match=rf"chat\.jinja knows, got '{role}'$"):
        render(source, "user", role)


def test_a_role_that_a_template_names_is_rendered() -> None:
    assert render(DROPPING, "user", "critique") == "U:from userA:from critique"


def test_a_role_that_a_template_tells_by_its_beginning_is_rendered() -> None:
    assert render(DROPPING, "user", "tool_search") == "U:from userT:from tool_search"


@given(st.text(st.characters(exclude_categories=["L", "Cs"]), max_size=12) | st.just("narrator"))
def test_a_template_that_writes_any_role_gets_any_but_a_misspelt_one(role: str) -> None:
    assert render(CHATML, "user", role).endswith(f"{role}\nfrom {role}<|im_end|>\n")


def test_many_speakers_of_a_template_that_writes_any_role_are_rendered() -> None:
    roles = [f"speaker{index}" for index in range(300)]
    assert render(CHATML, *roles).count("<|im_start|>") == 300


def test_a_template_that_refuses_a_role_says_so_in_its_own_words() -> None:
    with pytest.raises(InvalidPromptError, match="no such role: narrator"):
        render(REFUSING, "user", "narrator")


@settings(max_examples=examples(10))
@given(st.lists(st.sampled_from(KNOWN_ROLES), min_size=1, max_size=4))
def test_known_roles_are_left_to_every_template(roles: list[str]) -> None:
    for source in (CHATML, DROPPING, MISREADING):
        render(source, *roles)


def test_only_so_many_roles_are_tried() -> None:
    roles = [f"tool_{number}" for number in range(MAX_COMPARED + 40)]
    assert render(DROPPING, *roles[:MAX_COMPARED]).count("T:") == MAX_COMPARED
    tried: list[Conversation] = []

    def rendered(conversation: Conversation) -> str:
        tried.append(conversation)
        role = conversation.messages[1]["role"]
        return role if role in roles else ""

    with pytest.raises(InvalidPromptError, match=rf"messages\[{MAX_COMPARED}\]"):
        Roles("", rendered, "dir").check([{"role": role, "content": ""} for role in roles])
    assert len(tried) == MAX_COMPARED + 2
