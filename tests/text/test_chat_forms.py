"""Templates in the forms of the main families, with tools and reasoning, against jinja2 as
transformers sets it up. They are written here, in the ways in which those of the families are."""

# ruff: noqa: E501, RUF001  # lines as long as those of templates are, and DeepSeek's marks

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.tiers import examples

SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>" }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- 'Respond in the format {"name": f, "parameters": {}}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's none!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' ~ arg_val ~ '"' }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else  %}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{%- macro parameters_of(properties, required) -%}
    {%- for key, value in properties | dictsort -%}
        {%- if not loop.first %},{% endif -%}
        {{ key }}:{description:<escape>{{ value.description | default('') }}<escape>
        {%- if value.type | upper == 'OBJECT' and value.properties -%}
            ,properties:{ {{- parameters_of(value.properties, value.required or []) -}} }
        {%- endif -%}
        ,type:<escape>{{ value['type'] | upper }}<escape>{{ ',required' if key in required }}}
    {%- endfor -%}
{%- endmacro -%}
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- if tools -%}
<start_of_turn>developer
{% for tool in tools -%}
<start_function_declaration>declaration:{{ tool['function']['name'] }}{
    {{- parameters_of(tool['function']['parameters']['properties'], tool['function']['parameters']['required'] or []) -}}
}<end_function_declaration>
{%- endfor %}<end_of_turn>
{% endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- elif not message['tool_calls'] -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        <start_function_call>call:{{ call.function.name }}{
        {%- for key, value in call['function']['arguments'] | dictsort -%}
            {%- if not loop.first %},{% endif -%}{{ key }}:<escape>{{ value }}<escape>
        {%- endfor -%}
        }<end_function_call>
    {%- endfor -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

PHI4 = """\
{% for message in messages %}{% if message['role'] == 'system' and tools and loop.first %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + tools | tojson + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] %}{{ message['content'] }}{% endif %}\
{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | map(attribute='function') | list | tojson }}<|/tool_call|>{% endif %}\
{{ '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}\
{# tools #}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% if not thinking is defined %}{% set thinking = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true, is_last_user=false) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}\
{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}\
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}\
{%- endif %}{%- endfor %}{% if tools is defined and tools is not none %}\
{% set tool_ns = namespace(text='## Tools\\n') %}{% for tool in tools %}\
{% set tool_ns.text = tool_ns.text + '\\n### ' + tool.function.name + '\\nDescription: ' + (tool.function.description or '') \
+ '\\nParameters: ' + (tool.function.parameters | tojson) + '\\n' %}{% endfor %}\
{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + tool_ns.text %}{% endif %}\
{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}\
{%- set ns.is_tool = false -%}{%- set ns.is_last_user = true -%}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}\
{%- if ns.is_last_user %}{{'<｜Assistant｜></think>'}}{%- endif %}{%- set ns.is_last_user = false -%}\
{%- set ns.is_first = false %}{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}\
{%- if message['content'] is none %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + (tool['function']['arguments'] | tojson) + '<｜tool▁call▁end｜>'}}\
{%- else %}{{message['content'] + '<｜tool▁calls▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + (tool['function']['arguments'] | tojson)}}{%- endif %}\
{%- set ns.is_first = true -%}{%- else %}{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + (tool['function']['arguments']|tojson) + '<｜tool▁call▁end｜>'}}\
{%- endif %}{%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and not (message['tool_calls'] is defined and message['tool_calls']) %}\
{%- if ns.is_last_user %}{{'<｜Assistant｜>'}}{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{'<think>'}}\
{%- else %}{{'</think>'}}{%- endif %}{%- endif %}{%- set ns.is_last_user = false -%}\
{%- set content = message['content'] -%}{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}\
{{content + '<｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}\
{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endfor -%}\
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{'<｜Assistant｜>'}}\
{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{% endif %}
"""

OTHER_WAYS = """\
{%- for message in messages if message.role in ['user', 'assistant', 'tool'] -%}
    {{ loop.index ~ '/' ~ loop.length ~ ' ' ~ (loop.previtem.role if loop.previtem is defined else '-') }}
    {{ loop.cycle('a', 'b') ~ (loop.changed(message.role) | string) ~ loop.revindex0 }}
    {%- if not message.content %}{% continue %}{% endif %}
    {{- message.get('name', 'nobody') | upper ~ message['content'].replace('a', 'b') | title }}
    {{- message.content | length ~ message.content[:3] ~ message.content[-1:] ~ message.content.upper() }}
    {{- (message.content or 'x') | first ~ ' ' ~ message.content | replace('\\n', '|') | indent(2) }}
    {{- message.content.startswith('a') ~ message.content.count('a') ~ ('a' in message.content) }}
{% endfor %}
{%- for tool in tools or [] | sort(attribute='function.name') %}
    {{- tool.function.parameters.properties.keys() | list | join(', ') }}
    {{- tool | tojson(indent=2, sort_keys=true) }}{{ tool | tojson(separators=(',', ':')) }}
    {{- tool.function | string }}{{ tool.function.parameters.required }}
    {%- set names = tool.function.parameters.properties.values() | map(attribute='type') | list %}
    {{- names | unique | sort | join('|') }}{{ names | reject('equalto', 'string') | list | length }}
    {{- dict(a=1, b=names) }}{{ names + ['x'] }}{{ names | last ~ names | first }}
    {%- for key, value in tool.function.parameters.properties.items() %}
        {{- '\\n' ~ key ~ ': ' ~ (value.get('type') or 'any') ~ (' (needed)' if key in tool.function.parameters.required) }}
        {%- if value.enum is defined %}{{ value.enum | map('string') | join(' or ') }}{% endif %}
        {%- if loop.index0 > 1 %}{% break %}{% endif %}
    {%- endfor %}
{%- endfor %}
{% set text %}{{ messages | length }}{% endset %}{{ text ~ '!' }}
{%- filter upper %}loud{% endfilter %}
{{- messages | map(attribute='role') | list }}
{{- messages | selectattr('tool_calls', 'defined') | list | length }}
{{- messages | rejectattr('role', 'in', ['user', 'system']) | map(attribute='role') | join(',') }}
{%- if x is defined %}{{ x }}{{ x is mapping }}{{ x is number }}{{ x is string }}{{ x is none }}{{ x is sequence }}
{{- x is boolean }}{{ x is true }}{{ x is integer }}{{ x is float }}{{ x | tojson }}{{ x is callable }}{% endif %}
{{- none ~ true ~ 1.0 ~ [none, 'a', {'b': false}] }}
"""

TEMPLATES = {
    "Qwen": QWEN,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
    "Phi 4": PHI4,
    "DeepSeek": DEEPSEEK,
    "other ways": OTHER_WAYS,
}
KWARGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "Qwen": st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]),
    "Llama 3": st.sampled_from(
        [
            {"date_string": "1 Jan 2025"},
            {"tools_in_user_message": False},
            {"builtin_tools": ["f0", "g"], "date_string": ""},
        ]
    ),
    "DeepSeek": st.sampled_from([{}, {"thinking": True}]),
    "other ways": st.one_of(
        st.just({}),
        st.sampled_from([None, True, 5, 1.5, "x", [1, None], {"a": [True, "b'"]}]).map(
            lambda x: {"x": x}
        ),
    ),
}

words = st.one_of(
    st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=8),
    st.sampled_from(["  a\n", "<b>&'\"", "日本 🙂", "</think>\n\nyes", "{{ x }}", ""]),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([0.5, 2.0, -1.25]),
        words,
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
names = st.sampled_from(["f0", "g", "get_weather"])


@st.composite
def conversations(draw: st.DrawFn, *, single: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words)})
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(words)})
        if draw(st.booleans()):
            calls = [
                {
                    "id": f"abcdefg{index:02}",
                    "type": "function",
                    "function": {
                        "name": draw(names),
                        "arguments": draw(st.dictionaries(words, values, max_size=2)),
                    },
                }
                for index in range(1 if single else draw(st.integers(1, 2)))
            ]
            messages.append(
                {"role": "assistant", "content": draw(st.none() | words), "tool_calls": calls}
            )
            for call in calls:
                messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": draw(words)}
                )
        messages.append({"role": "assistant", "content": draw(words)})
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(words)
    if draw(st.booleans()):
        messages.pop()
    return messages


@st.composite
def toolboxes(draw: st.DrawFn) -> list[dict[str, Any]] | None:
    if not draw(st.booleans()):
        return None
    properties = st.dictionaries(
        st.sampled_from(["city", "unit", "when", "items_"]),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["string", "integer"]), "description": words},
            optional={"enum": st.lists(words, max_size=2)},
        ),
        min_size=1,
        max_size=3,
    )
    return [
        {
            "type": "function",
            "function": {
                "name": draw(names),
                "description": draw(words),
                "parameters": {
                    "type": "object",
                    "properties": draw(properties),
                    "required": draw(st.lists(st.sampled_from(["city", "unit"]), max_size=2)),
                },
            },
        }
        for _ in range(draw(st.integers(1, 2)))
    ]


@pytest.mark.parametrize("style", TEMPLATES)
def test_tools_and_reasoning_are_rendered_as_in_transformers(style: str) -> None:
    source = TEMPLATES[style]
    ours = ChatTemplate(source, special_tokens=SPECIAL, origin="here")

    @settings(max_examples=examples(60))
    @given(
        conversations(single=style == "Llama 3"),
        toolboxes(),
        KWARGS.get(style, st.just({})),
        st.booleans(),
        st.booleans(),
    )
    def check(
        messages: list[dict[str, Any]],
        tools: Any,
        kwargs: dict[str, Any],
        generate: bool,
        as_json: bool,
    ) -> None:
        (expected,), _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=generate,
            **kwargs,
            **SPECIAL,
        )
        if as_json:  # as the OpenAI API has arguments
            messages = json.loads(json.dumps(messages))
            for message in messages:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        conversation = conversation_of(
            messages,
            tools=tools,
            chat_template_kwargs=kwargs,
            add_generation_prompt=generate,
        )
        assert ours.render(conversation) == expected

    check()


def test_a_message_is_continued_as_in_transformers() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b \n"},
    ]
    for source in (QWEN, GEMMA, PHI4):
        (expected,), _ = render_jinja_template(
            [messages], chat_template=source, continue_final_message=True, **SPECIAL
        )
        conversation = conversation_of(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        ours = ChatTemplate(source, special_tokens=SPECIAL, origin="here")
        assert ours.render(conversation) == expected


def test_the_date_is_todays() -> None:
    ours = ChatTemplate(LLAMA3, special_tokens=SPECIAL, origin="here")
    text = ours.render(conversation_of([{"role": "user", "content": "x"}]))
    years = {datetime.date.today().year, datetime.date.today().year + 1}
    assert any(f"{year}\n\n" in text for year in years)
