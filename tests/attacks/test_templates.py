"""A chat template is a program of somebody's: what it does has bounds, and holds nobody up."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from aioserve import ModelError, RequestFailedError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.attacks.held_loop import assert_loop_is_free
from tests.attacks.hostile import hostile_json, named_errors
from tests.attacks.test_forged_turns import tokenizer_of
from tests.text.beside_transformers import assert_same, reference
from tests.text.test_chat_template import SPECIAL, TEMPLATES
from tests.timing import computing_at_most

USER = [{"role": "user", "content": "hi"}]
ANY = conversation_of(USER).validated()

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
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for a in range(60000) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
}


GROWING = {
    "a width": "{{ 'x'.center(10**9) }}",
    "a width of a filter": "{{ 'x' | center(10**9) }}",
    "a filter by name": "{{ range(9) | map('center', 10**9) | list }}",
    "a width in a format": "{{ '%999999999d' % 1 }}",
    "a width beside a format": "{{ '%*d' % (10**9, 1) }}",
    "a width behind a key": "{{ '%(a)999999999d' % {'a': 1} }}",
    "a width behind a key with parentheses": "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
    "a precision behind a key": "{{ '%(a).999999999f' | format(a=1.5) }}",
    "a width in a filter's format": "{{ '%999999999s' | format('x') }}",
    "a width in a field": "{{ '{:>999999999}'.format('x') }}",
    "a width in a field's field": "{{ '{:>{}}'.format('x', 10**9) }}",
    "fields": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "marks in a format": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "tabs": "{{ ('\t' * 10000).expandtabs(10**6) }}",
    "zeros": "{{ '1'.zfill(10**9) }}",
    "replacements": "{{ ('x' * 100000).replace('', 'x' * 100000) }}",
    "replacements of a filter": "{{ ('x' * 100000) | replace('x', 'x' * 100000) }}",
    "a separator": "{{ ('x' * 100000).join('x' * 100000) }}",
    "a separator of a filter": "{{ ('x' * 100000) | join('x' * 100000) }}",
    "an indent of lines": "{{ ('\n' * 100000) | indent('x' * 100000) }}",
    "wrapped lines": "{{ ('x' * 100000) | wordwrap(1, wrapstring='x' * 100000) }}",
    "separators of JSON": "{{ [1] * 100000 | tojson(separators=('x' * 100000, ':')) }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "a batch": "{{ [1] | batch(10**9, 1) | list }}",
    "a power": "{{ 10**1000000000 }}",
    "a precision": "{{ 1 | round(10**9, 'ceil') }}",
    "squares": "{% set ns = namespace(x=10**9) %}{% for a in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "a list again and again": "{{ [1] * 10**10 }}",
    "one text many times": "{% set x = 'x' * 1000000 %}{{ " + "x ~ " * 2000 + "x }}",
    "pairs of pairs": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "pairs in dicts": "{% set ns = namespace(x=1) %}{% for a in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "pairs by arguments": "{% set ns = namespace(x=[1]) %}{% macro m() %}"
    "{% set ns.x = kwargs %}{% endmacro %}{% for a in range(60) %}"
    "{% set b = m(a=ns.x, b=ns.x) %}{% endfor %}",
    "pairs by filling": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}"
    "{% set ns.x = [1] | slice(3, ns.x) | list %}{% endfor %}",
    "pairs compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{{ ns.x == ns.y }}",
    "pairs as a key": "{% set ns = namespace(x=1) %}{% for a in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "a sum of texts": "{{ range(100000) | map('string') | sum(start='') }}",
    "a sum of many lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "a spaces' list": "{{ (' ' * 10**6).split(' ') | map('list') | list | length }}"
    "{% for a in range(99) %}{% set b = (' ' * 10**5).split(' ') %}{% endfor %}",
}
ESCAPES = {
    "a class": "{{ ''.__class__ }}",
    "a class by name": "{{ ''['__class__'] }}",
    "a class of a filter": "{{ '' | attr('__class__') }}{{ ('' | attr('__class__')).mro() }}",
    "a class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "a field of a format": "{{ '{0.__class__}'.format('') }}",
    "a format by name": "{{ ['{0.__class__}'] | map(attribute='format') | first }}"
    "{{ ([('{0.__class__}')] | map(attribute='format') | first)('') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals of a global": "{{ strftime_now.__builtins__ }}",
    "a frame": "{{ ([1] | map('string')).gi_frame }}",
    "a context": "{{ self._TemplateReference__context }}",
    "a name of a namespace": "{{ namespace(__html__=1) }}",
    "an attribute of a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a change of a list": "{{ messages.append(1) }}",
    "a change of a dict": "{{ messages[0].update(role='system') }}",
    "a class of dict": "{{ dict.mro() }}",
    "an import": "{% import 'os' as os %}",
    "an include": "{% include '/etc/passwd' %}",
    "a base": "{% extends '/etc/passwd' %}",
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL, origin="here")


@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize("name", STOPPED)
async def test_a_template_without_end_is_stopped_by_name(name: str) -> None:
    ours = template(STOPPED[name])

    def attack() -> None:
        with pytest.raises(RequestFailedError, match=r"^here: rendering (was stopped: it|failed)"):
            ours.render(USER)

    with computing_at_most(20):
        await assert_loop_is_free(partial(asyncio.to_thread, attack))


@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize("name", GROWING)
def test_a_template_whose_values_grow_is_stopped_ahead_of_its_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with (
            computing_at_most(20),
            pytest.raises(RequestFailedError, match=r"^here: rendering (was stopped: it|failed)"),
        ):
            template(GROWING[name]).render(USER)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_gets_at_nothing_but_its_values(name: str) -> None:
    with pytest.raises(RequestFailedError, match=r"^here: rendering failed: .*") as caught:
        print(template(ESCAPES[name] + "{{ messages[0].nothing.more }}").render(USER))
    said = str(caught.value)
    assert not any(word in said for word in ("<class", "<function", "root:"))


def test_the_limit_is_named() -> None:
    with pytest.raises(RequestFailedError, match=r"here: .* took more than \d+ steps$"):
        template(STOPPED["two loops"]).render(USER)
    with pytest.raises(RequestFailedError, match=r"here: .* wrote more than \d+ characters$"):
        template(STOPPED["doubling"]).render(USER)


def test_what_is_left_out_of_the_library_is_told_when_it_is_loaded() -> None:
    for name in ("pprint", "striptags", "urlize", "xmlattr"):
        with pytest.raises(ModelError, match=rf"No filter named '{name}'\. \(in line 1\)$"):
            template(f"{{{{ messages | {name} }}}}")


LONG = {
    "a template": ("x" * 300_000, r"at most 262144 characters, got 300000"),
    "nesting": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "can't be read"),
    "brackets": ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "can't be read"),
    "minuses": ("{{ " + "-" * 2046 + "1 }}", "can't be read"),
    "tags": ("{{ 1 }}" * 30_000, r"a program of \d+ characters, and at most 131072 are compiled"),
    "operators": ("{{ x" + " ~ x" * 30_000 + " }}", r"a program of \d+ characters"),
    "attributes": ("{{ x" + ".a" * 1020 + " }}", "can't be read"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LONG)
def test_a_template_too_long_to_be_parsed_is_refused_by_name(name: str) -> None:
    source, complaint = LONG[name]
    with pytest.raises(ModelError, match=f"^here: .*{complaint}"):
        template(source)


AT_THE_LIMITS = {
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 500 + "{% endif %}",
    "pluses": "{{ 1" + "+1" * 1020 + " }}",
    "slices": "{{ x" + "[1:]" * 500 + " }}",
    "tests": "{{ x" + " is string" * 200 + " }}",
    "filters": "{{ x" + "|string" * 290 + " }}",
    "many tags": "{{ 1 }}" * 5000,
    "a string without end": "{{ '" + "\\'" * 100_000 + "\\",
    "many blocks": "{% if 1 %}{% endif %}" * 4000,
    "a constant": "{{ 10**1000000000 }}{{ 'x' * 10**12 }}{{ 'x' | center(10**12) }}",
    "constants": "{% set x = 10**1000000000 %}{% if [1] * 10**12 %}{% endif %}",
}


@pytest.mark.sampled(2)
@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize("name", AT_THE_LIMITS)
async def test_a_template_at_the_limits_neither_crashes_nor_holds_the_loop(name: str) -> None:
    ours = None
    with named_errors():
        ours = template(AT_THE_LIMITS[name])

    def attack() -> None:
        with named_errors():
            if ours is not None:
                ours.render(USER)

    await assert_loop_is_free(partial(asyncio.to_thread, attack))


CONVERSATION = [
    {"role": ("user", "assistant")[i % 2], "content": f"Message {i}. " + "word " * 5}
    for i in range(5000)
]


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize("style", TEMPLATES)
async def test_thousands_of_messages_render_and_hold_nobody_up(style: str) -> None:
    ours = template(TEMPLATES[style])
    await assert_loop_is_free(lambda: asyncio.to_thread(ours.render, CONVERSATION))


@pytest.mark.more
@pytest.mark.asyncio
async def test_thousands_of_messages_are_encoded_and_hold_nobody_up() -> None:
    encode = partial(template(TEMPLATES["Qwen 3"]).encode, CONVERSATION, tokenizer_of("chatml"))
    encode()
    await assert_loop_is_free(lambda: asyncio.to_thread(encode))


# -- what is counted changes nothing of what is printed

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


@given(_SOURCES)
def test_fuzz_a_template_prints_what_it_prints_in_transformers(source: str) -> None:
    source = "{% set a = 'A' %}{% set ns = namespace(y='y') %}" + source
    try:
        ours = template(source)
    except ModelError:
        with pytest.raises(TemplateError):
            reference(source, ANY)
        return
    assert_same(source, ours, ANY)


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
