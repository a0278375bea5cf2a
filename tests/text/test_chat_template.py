"""Chat templates against Hugging Face's own rendering, and their refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from aioserve.errors import InvalidPromptError, ModelError, RequestFailedError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.text.kinds import byte_level_backend
from tests.tiers import examples

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
  {% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
  {% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}
"""

MISTRAL = """\
{%- set ns = namespace(index=0, last=none) -%}
{%- for message in messages if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor -%}
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'user' %}
        {%- if ns.index == ns.last and messages[0]['role'] == 'system' %}
            {{- '[INST] ' ~ messages[0]['content'].strip() ~ '\n\n' }}
            {{- message.content ~ ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' ~ message['content'] ~ ' [/INST]' }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message['content'].split('</think>')[-1].lstrip('\n') + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}\
{{'<|system|>\n' + message['content'] + '<|end|>\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}\
{% else %}{{ eos_token }}{% endif %}
"""

QWEN3 = """\
{%- macro turn(role, content='') %}
{{- '<|im_start|>' ~ role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endmacro %}
{%- set ns = namespace(query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n').rstrip() %}
    {%- if loop.index0 > ns.query or loop.last %}
        {{- turn(message.role, '<think>\n\n</think>\n\n' + content) }}
    {%- else %}
        {%- generation %}
        {{- turn(message.role, content=content) }}
        {%- endgeneration %}
    {%- endif %}
    {%- for key, value in message.items() %}
        {%- if loop.first %}{{ key.upper() }}={{ value | tojson }}{% else %}{% break %}{% endif %}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
{{ messages | tojson }}
{{ messages | map(attribute='role') | unique | join(', ') }}
"""

TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA3,
    "Gemma": GEMMA,
    "Mistral": MISTRAL,
    "Phi-3": PHI3,
    "Qwen 3": QWEN3,
}

characters = st.characters(codec="utf-8")
contents = st.one_of(
    st.text(characters, max_size=30),
    st.sampled_from(
        [
            "  spaces around  \n",
            "<b>&amp; 'quotes' \"double\"</b>",
            "{{ messages }} {% raw %} {# no #}",
            "<think>\nhm\n</think>\n\nanswer",
            "日本語 🙂 \u2028",
            "",
        ]
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    """Turns of user and assistant, as every template takes them."""
    count = draw(st.integers(1, 5))
    return [
        {"role": ("user", "assistant")[turn % 2], "content": draw(contents)}
        for turn in range(count)
    ]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL, origin="here")


@pytest.mark.parametrize("style", TEMPLATES)
def test_rendering_equals_transformers(style: str, oracle: PreTrainedTokenizerFast) -> None:
    source = TEMPLATES[style]
    ours = template(source)

    @settings(max_examples=examples(60))
    @given(conversations(), contents, st.booleans(), st.booleans())
    def check(
        messages: list[dict[str, str]], system: str, with_system: bool, generate: bool
    ) -> None:
        if with_system and style != "Gemma":
            messages = [{"role": "system", "content": system}, *messages]
        expected = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=generate
        )
        assert ours.render(messages, add_generation_prompt=generate) == expected

    check()


@pytest.mark.parametrize("style", ["Gemma", "Mistral"])
def test_what_a_template_refuses_is_an_invalid_prompt_in_its_own_words(style: str) -> None:
    messages = [{"role": "tool", "content": "x"}]
    with pytest.raises(InvalidPromptError, match=r"Roles must alternate|Only user, system and"):
        template(TEMPLATES[style]).render(messages)


def test_a_template_that_breaks_fails_the_request_without_quoting_the_messages() -> None:
    broken = template("{{ messages[0].content }}{{ no_such_function() }}")
    with pytest.raises(RequestFailedError, match=r"here: .*no_such_function") as caught:
        broken.render([{"role": "user", "content": "a secret"}])
    assert "secret" not in str(caught.value)


def test_a_malformed_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"here: .* \(in line 2\)$"):
        template("text\n{% if %}")


def test_messages_are_data_and_never_templates() -> None:
    text = "{{ 1 + 1 }}{% for x in y %}{{ bos_token }}"
    rendered = template("{{ messages[0].content }}").render([{"role": "user", "content": text}])
    assert rendered == text


def test_the_date_can_be_printed() -> None:
    rendered = template("{{ strftime_now('%Y-%m-%d') }}").render([{"role": "user", "content": ""}])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "must not be empty"),
        ("hello", "messages must be a list, got str"),
        (None, "messages must be a list, got NoneType"),
        ({"role": "user"}, "messages must be a list, got dict"),
        (["hello"], r"messages\[0\] must be a dict, got str"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"content": "x"}], r"messages\[0\] has no 'role'"),
        (
            [{"role": "user", "content": "x"}, {"role": 1, "content": "x"}],
            r"messages\[1\]\['role'\] must be a str, got int",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\]\['content'\]\[0\]\['text'\] must be a str, got NoneType",
        ),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] must be a str"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\['content'\] can't be encoded"),
        (
            [{"role": "user", "content": "x", "named": "Ann"}],
            r"messages\[0\] has the unsupported field 'named'",
        ),
    ],
)
def test_malformed_messages_are_refused_by_index_and_field(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidPromptError, match=complaint):
        conversation_of(messages).validated()
    with pytest.raises(InvalidPromptError, match=complaint):
        template(CHATML).render(messages)


USER = [{"role": "user", "content": "hi"}]


def write_config(directory: Path, **config: object) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path) -> ChatTemplate:
    loaded = ChatTemplate.from_directory(directory)
    assert loaded is not None
    return loaded


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    assert ChatTemplate.from_directory(write_config(tmp_path, bos_token="<s>")) is None


def test_special_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        pad_token=None,
    )
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<u>", "bos_token": "old"}')
    assert load(tmp_path).render(USER) == "<s>|</s>||<u>"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    write_config(tmp_path, chat_template=named)
    assert load(tmp_path).render(USER) == "plain"
    write_config(tmp_path, chat_template=named[:1])
    assert load(tmp_path).render(USER) == "tools"


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="config", eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert load(tmp_path).render(USER) == "file </s>"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"chat_template": 3}', "must be a string or a list of named templates"),
        ('{"chat_template": [{"name": "a"}]}', "must be a string or a list of named templates"),
        (
            '{"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}',
            r"no entry named 'default', only \['a', 'b'\]",
        ),
    ],
)
def test_a_malformed_config_is_an_error_naming_the_file(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{complaint}"):
        ChatTemplate.from_directory(tmp_path)
