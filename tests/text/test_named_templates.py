"""Templates that a model has for prompts with tools, beside the one for all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve import InvalidPromptError, ModelError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of

TOOL = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
USER = [{"role": "user", "content": "hi"}]
WITH_TOOLS = conversation_of(USER, tools=[TOOL])
PLAIN, TOOLS = "plain {{ bos_token }}", "{{ tools | length }} of them {{ bos_token }}"
NAMED = [
    {"name": "rag", "template": "{% documents %}"},
    {"name": "tool_use", "template": TOOLS},
    {"name": "default", "template": PLAIN},
]


def written(directory: Path, in_config: object = None, **files: str) -> ChatTemplate | None:
    config = {"bos_token": "<s>", "chat_template": in_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "additional_chat_templates").mkdir(exist_ok=True)
    for name, source in files.items():
        place = directory if name == "chat_template" else directory / "additional_chat_templates"
        (place / f"{name}.jinja").write_text(source)
    return ChatTemplate.from_directory(directory)


def assert_both(ours: ChatTemplate | None) -> None:
    assert ours is not None
    assert ours.render(USER) == "plain <s>"
    assert ours.render(WITH_TOOLS) == "1 of them <s>"
    with pytest.raises(InvalidPromptError, match="must not have 'x': the chat template"):
        ours.render(conversation_of(USER, tools=[TOOL], chat_template_kwargs={"x": 1}))


def test_prompts_with_tools_are_rendered_by_the_template_named_tool_use(tmp_path: Path) -> None:
    assert_both(written(tmp_path, NAMED))


def test_named_templates_may_be_files_beside_one_for_all_others(tmp_path: Path) -> None:
    assert_both(written(tmp_path, "old", chat_template=PLAIN, tool_use=TOOLS))
    assert_both(written(tmp_path, "old", chat_template=PLAIN, tool_use=TOOLS, rag="{% no %}"))


def test_a_file_of_a_named_template_may_stand_beside_the_config(tmp_path: Path) -> None:
    assert_both(written(tmp_path, PLAIN, tool_use=TOOLS))


def test_a_template_of_the_operator_is_for_all_prompts(tmp_path: Path) -> None:
    written(tmp_path, NAMED)
    own = tmp_path / "own.jinja"
    own.write_text("own {{ tools is none }}")
    ours = ChatTemplate.from_directory(tmp_path, own)
    assert ours is not None
    assert ours.render(WITH_TOOLS) == "own False"


def test_a_broken_template_for_tools_is_an_error_naming_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"additional_chat_templates/tool_use\.jinja: .*read"):
        written(tmp_path, chat_template=PLAIN, tool_use="{% if %}")


def test_too_many_files_of_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at most 64 templates are read, got 65"):
        written(tmp_path, **{f"t{number}": "" for number in range(65)})
