"""A chat template is a program of somebody's: what it does has bounds, and holds nobody up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import minijinja
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import ModelError, RequestFailedError
from aioserve.text import template_budget
from aioserve.text.chat import ChatTemplate
from tests.attacks.held_loop import assert_loop_is_free
from tests.attacks.hostile import hostile_json, named_errors
from tests.attacks.test_forged_turns import tokenizer_of
from tests.text.test_chat import SPECIAL, TEMPLATES
from tests.timing import computing_at_most

USER = [{"role": "user", "content": "hi"}]

STOPPED = {
    "two loops": "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
    "two loops that print": "{% for a in range(10000) %}{% for b in range(10000) %}x{% endfor %}"
    "{% endfor %}",
    "a long text again and again": "{% for a in range(9000) %}" + "x" * 10_000 + "{% endfor %}",
    "a long text after a tag": "{% for a in range(9000) %}{% if a %}{% endif %}"
    + "x" * 10_000
    + "{% endfor %}",
    "a raw text again and again": "{% for a in range(9000) %}{% raw %}"
    + "x" * 10_000
    + "{% endraw %}{% endfor %}",
    "a print again and again": "{% set x = 'x' * 10000 %}{% for a in range(9000) %}{{ x }}"
    "{% endfor %}",
    "doubling": "{% set ns = namespace(x='x') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling in a capture": "{% set x = 'x' %}{% for a in range(60) %}{% endfor %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubling in macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}x"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "macros that print nothing": "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}"
    "{% set a = m(n - 1) %}{% endif %}{% endmacro %}{% set a = m(60) %}",
    "blocks": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop that recurs": "{% for i in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "callers": "{% macro a() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro m(n) %}"
    "{% call a() %}{% if n %}{{ m(n - 1) }}{% endif %}{% endcall %}{% endmacro %}{{ m(60) }}",
    "a range": "{{ range(10**12) | list }}",
    "a huge repetition": "{{ 'x' * 10**18 }}",
    "an indent": "{{ [1] | tojson(indent=10**9) }}",
    "a sum of lists": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% for b in ns.x %}{% endfor %}{% endfor %}",
    "slices of slices": "{% set ns = namespace(x=[1]) %}{% for a in range(20000) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}",
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL, origin="here")


@pytest.mark.asyncio
@pytest.mark.parametrize("name", STOPPED)
async def test_a_template_without_end_is_stopped_by_name(name: str) -> None:
    ours = template(STOPPED[name])

    def attack() -> None:
        with pytest.raises(RequestFailedError, match=r"^here: rendering (was stopped: it|failed)"):
            ours.render(USER)

    with computing_at_most(20):
        await assert_loop_is_free(partial(asyncio.to_thread, attack))


def test_the_limit_is_named() -> None:
    with pytest.raises(RequestFailedError, match=r"here: .* took more than 10100 steps$"):
        template(STOPPED["two loops"]).render(USER)
    with pytest.raises(RequestFailedError, match=r"here: .* wrote more than \d+ characters$"):
        template(STOPPED["doubling"]).render(USER)


LONG = {
    "a template": ("x" * 300_000, r"at most 262144 characters, got 300000"),
    "a tag": ("\n{{ " + "-" * 3000 + "1 }}", r"at most 2048 characters, .* got 3003 in line 2"),
    "elifs": (
        "{% if 0 %}" + "{% elif 0 %}" * 600 + "{% endif %}",
        r"at most 500 elif tags, got 600",
    ),
    "nesting": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "can't be read"),
    "brackets": ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "can't be read"),
}


@pytest.mark.parametrize("name", LONG)
def test_a_template_too_long_to_be_parsed_is_refused_by_name(name: str) -> None:
    source, complaint = LONG[name]
    with pytest.raises(ModelError, match=f"^here: .*{complaint}"):
        template(source)


AT_THE_LIMITS = {
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 500 + "{% endif %}",
    "minuses": "{{ " + "-" * 2046 + "1 }}",
    "pluses": "{{ 1" + "+1" * 1020 + " }}",
    "slices": "{{ x" + "[1:]" * 500 + " }}",
    "attributes": "{{ x" + ".a" * 1020 + " }}",
    "tests": "{{ x" + " is string" * 200 + " }}",
    "filters": "{{ x" + "|string" * 290 + " }}",
    "many tags": "{{ 1 }}" * 30_000,
    "a string without end": "{{ '" + "\\'" * 100_000 + "\\",
    "many blocks": "{% if 1 %}{% endif %}" * 12_000,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", AT_THE_LIMITS)
async def test_a_template_at_the_limits_neither_crashes_nor_holds_the_loop(name: str) -> None:
    def attack() -> None:
        with named_errors():
            template(AT_THE_LIMITS[name]).render(USER)

    await assert_loop_is_free(partial(asyncio.to_thread, attack))


def test_a_panic_of_the_library_is_an_error_by_name() -> None:
    ours = template("{{ messages[0].content[::-1] }}")
    with pytest.raises(RequestFailedError, match="here: rendering failed: index out of bounds"):
        ours.render([{"role": "user", "content": ""}])
    assert ours.render(USER) == "ih"


CONVERSATION = [
    {"role": ("user", "assistant")[i % 2], "content": f"Message {i}. " + "word " * 5}
    for i in range(5000)
]


@pytest.mark.asyncio
@pytest.mark.parametrize("style", TEMPLATES)
async def test_thousands_of_messages_render_and_hold_nobody_up(style: str) -> None:
    ours = template(TEMPLATES[style])
    await assert_loop_is_free(lambda: asyncio.to_thread(ours.render, CONVERSATION))


@pytest.mark.asyncio
async def test_thousands_of_messages_are_encoded_and_hold_nobody_up() -> None:
    encode = partial(template(TEMPLATES["Qwen 3"]).encode, CONVERSATION, tokenizer_of("chatml"))
    encode()
    await assert_loop_is_free(lambda: asyncio.to_thread(encode))


# -- what is asked of a template changes nothing of what it prints

_TEXTS = st.sampled_from(["x", " ", "\n", "  \n  ", "\n\n", "text " * 20, "}}", "%}", "'", "{", ""])
_EXPRESSIONS = st.sampled_from(
    [
        "a",
        "1",
        "'%}'",
        '"}}"',
        "{'k': {'l': 1}}",
        "none",
        "nothing",
        "1.0",
        "a if false",
        "m(a)",
        "[1, 'b']",
        "a | upper",
        "a ~ '{{'",
        "ns.y",
        "(1, 2)",
        "'it\\'s'",
        "loop.index",
        "-1",
    ]
)
_SIGNS = st.sampled_from(["", "-", "+"])


def _tag(opens: str, closes: str) -> Callable[[str], st.SearchStrategy[str]]:
    return lambda body: st.builds(
        lambda left, right: f"{opens}{left} {body} {right}{closes}", _SIGNS, _SIGNS
    )


_block, _print, _comment = _tag("{%", "%}"), _tag("{{", "}}"), _tag("{#", "#}")


def _around(start: str, end: str, inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda *parts: "".join(parts), _block(start), inner, _block(end))


def _more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        _around("for i in [1, 2]", "endfor", inner),
        _around("for i in [[1], []] recursive", "endfor", inner),
        _around("if a", "endif", inner),
        _around("macro m(q)", "endmacro", inner),
        _around("call m(1)", "endcall", inner),
        _around("set ns.y", "endset", inner),
        _around("set a", "endset", inner),
        _around("filter upper", "endfilter", inner),
        _around("with a = 3", "endwith", inner),
        _around("block b", "endblock", inner),
        _around("raw", "endraw", inner),
        _around("generation", "endgeneration", inner),
    )


_SOURCES = st.recursive(
    st.one_of(
        _TEXTS,
        _EXPRESSIONS.flatmap(_print),
        _EXPRESSIONS.flatmap(lambda value: _block(f"set a = {value}")),
        _EXPRESSIONS.flatmap(lambda value: _block(f"set ns.y = {value}")),
        st.sampled_from(["{{ a }} {% if", "no comment", "{% raw %}"]).flatmap(_comment),
        st.sampled_from(["{{", "{%", "{#", "{{ }}", "{% %}", "{{ 'a }}"]),
    ),
    _more,
    max_leaves=12,
)


def _plainly(source: str, asked: bool) -> str:
    """By the library alone."""
    generation = re.sub(r"(end)?generation", lambda m: "endif" if m[1] else "if true", source)
    environment = minijinja.Environment(
        auto_escape_callback=lambda _: False, debug=False, trim_blocks=True, lstrip_blocks=True
    )
    source = template_budget.asking(generation, "here") if asked else generation
    try:
        return environment.render_str(
            "{% set ns = namespace(y='y') %}" + source,
            a="A",
            **{template_budget.SPEND: template_budget.Budget(1, 1).spend},
        )
    except RuntimeError as error:
        return f"failed: {getattr(error, 'kind', '')}"


@given(_SOURCES)
def test_fuzz_a_template_prints_what_it_prints_unasked(source: str) -> None:
    assert _plainly(source, asked=True) == _plainly(source, asked=False)


@given(st.one_of(_SOURCES, st.text(st.sampled_from("{%}#-'\"[]()x|~+*. for in endfor\n"))))
def test_fuzz_any_template_renders_or_fails_by_name(source: str) -> None:
    with named_errors():
        template(source).render(USER)


# -- files


def write(directory: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("chat_template__jinja", b"\xff\xfe", "not valid UTF-8"),
        ("chat_template__jinja", b"x" * (5 << 20), "has 5242880 bytes"),
        ("tokenizer_config__json", b"[" * 100_000, "nested too deeply"),
        ("tokenizer_config__json", b" " * (5 << 20), "has 5242880 bytes"),
        ("tokenizer_config__json", b'{"chat_template": "\xff"}', "not valid JSON"),
        ("tokenizer_config__json", b'{"chat_template": [["name", "template"]]}', "each, got"),
        ("tokenizer_config__json", b'{"chat_template": {"name": "a"}}', "a list of named"),
        ("tokenizer_config__json", b'{"chat_template": [{"name": [], "template": ""}]}', "each"),
        ("tokenizer_config__json", b'{"chat_template": [{"name": "a", "template": 5}]}', "each"),
        ("tokenizer_config__json", b'{"chat_template": []}', "no entry named 'default'"),
    ],
)
def test_a_file_that_is_no_template_is_an_error_naming_it(
    tmp_path: Path, file: str, content: bytes, complaint: str
) -> None:
    write(tmp_path, **{file: content})
    with pytest.raises(ModelError, match=f"{file.replace('__', '.')}.*{complaint}") as caught:
        ChatTemplate.from_directory(tmp_path)
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


def test_deep_names_of_tokens_are_an_error_naming_the_file(tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja=b"x", special_tokens_map__json=b'{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"special_tokens_map\.json.*nested too deeply"):
        ChatTemplate.from_directory(tmp_path)


@given(
    st.dictionaries(
        st.sampled_from(["chat_template", "bos_token", "eos_token", "name"]), hostile_json()
    )
)
def test_fuzz_any_tokenizer_config_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, object]
) -> None:
    directory = tmp_path_factory.mktemp("model")
    write(directory, tokenizer_config__json=json.dumps(config).encode())
    with named_errors():
        if (ours := ChatTemplate.from_directory(directory)) is not None:
            ours.render(USER)
