"""Arguments that were cut off anywhere: what is there of them is kept, and is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, SamplingParams
from aioserve.server.chat_parts.turns import is_cut_off
from aioserve.text.cut_off import closed
from tests.engine.scripted import ScriptedModel

words = st.text(st.sampled_from('ab"\\\n/é😀\ud83d{}[],:'), max_size=5)
floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(words, values, max_size=3)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


def is_part(part: Any, whole: Any) -> bool:
    """Return true if `part` is the beginning of `whole`, and nothing else."""
    if isinstance(whole, str):
        # The second half of a character in two escapes may be missing.
        return isinstance(part, str) and whole.startswith(part)
    if isinstance(whole, list):
        pairs = list(zip(part, whole, strict=False))
        return len(part) <= len(whole) and _are_parts(pairs)
    if isinstance(whole, dict):
        names = [*whole][: len(part)]
        return [*part] == names and _are_parts([(part[name], whole[name]) for name in names])
    return part == whole and type(part) is type(whole)


def _are_parts(pairs: list[tuple[Any, Any]]) -> bool:
    """All but the last are whole."""
    return all(a == b for a, b in pairs[:-1]) and all(is_part(a, b) for a, b in pairs[-1:])


def has_half(value: Any) -> bool:
    """Return true if there is half a character, which is refused anyway."""
    return "\ud83d" in json.dumps(value, ensure_ascii=False)


@given(objects, layouts, st.data())
def test_what_is_there_is_kept_and_nothing_else(
    value: dict[str, Any], layout: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value, **layout)
    at = data.draw(st.integers(1, len(text) - 1))
    whole = closed(text[:at])
    assert whole is not None
    part = json.loads(whole)
    assert is_part(part, value)
    assert is_cut_off(text[:at]) or has_half(value)
    if at < len(text) - 1:
        longer = json.loads(closed(text[: at + 1]) or "")
        assert is_part(part, longer)


@given(objects, layouts)
def test_a_whole_object_was_not_cut_off(value: dict[str, Any], layout: dict[str, Any]) -> None:
    text = json.dumps(value, **layout)
    for behind in ("", " ", "}", "x", "5"):
        assert closed(text + behind) is None
        assert not is_cut_off(text + behind) or has_half(value)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("{", "{}"),
        (' {"a', " {}"),
        ('{"a": ', "{}"),
        ('{"a": 12', "{}"),
        ('{"a": 12, ', '{"a": 12}'),
        ('{"a": tru', "{}"),
        ('{"a": [1, 2', '{"a": [1]}'),
        ('{"a": [{"b": "c', '{"a": [{"b": "c"}]}'),
        ('{"a": "b\\', '{"a": "b"}'),
        ('{"a": "b\\\\', '{"a": "b\\\\"}'),
        ('{"a": "b\\u00e', '{"a": "b"}'),
        ('{"a": "b\\ud83d', '{"a": "b"}'),
        ('{"a": "b\\ud83d\\ude0', '{"a": "b"}'),
        ('{"a": "b\\\\ud83d', '{"a": "b\\\\ud83d"}'),
        ('{"a": "b\\\\u12', '{"a": "b\\\\u12"}'),
        ('{"a": "b\\ud83d\\ude00', '{"a": "b\\ud83d\\ude00"}'),
        ("", None),
        ("x", None),
        ("[1", None),
        ('"a', None),
        ('{"a" 1', None),
        ("{'a", None),
        ('{"a": 1}', None),
        ('{"a": 01', None),
    ],
)
def test_what_becomes_of_a_text(text: str, kept: str | None) -> None:
    assert closed(text) == kept


TEMPLATE = (
    "{{ tools }}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.mark.asyncio
async def test_an_answer_that_was_cut_off_can_be_gone_on_from_wherever_that_was() -> None:
    ask = [{"role": "user", "content": "x"}]
    async with Engine(ScriptedModel(TEMPLATE, CALL)) as engine:
        for most in range(1, len(CALL)):
            params = SamplingParams(max_tokens=most, seed=0)
            stream = engine.chat(ask, params, tools=[TOOL], tool_parser="hermes")
            cut = await stream.completion()
            again = [*ask, cut.message, *ask]
            prompt = engine.tokenizer.decode(await engine.encode(again, tools=[TOOL]))
            if cut.tool_calls:
                begun = prompt.rpartition("[")[2].rpartition("]")[0]
                assert is_part(json.loads(begun), {"city": "Oslo"})
        wrong = [*ask, cut.message | {"tool_calls": [_call('{"city"; 5')]}]
        prompt = engine.tokenizer.decode(await engine.encode(wrong, tools=[TOOL]))
        assert json.dumps('{"city"; 5') in prompt


def _call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}
