"""Classes that describe JSON are accepted as schemas, and completions become their objects."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    ChatAnswer,
    ChatCompletion,
    Completion,
    Engine,
    FinishReason,
    InvalidRequestError,
    InvalidSamplingError,
    RequestFailedError,
    Sample,
    SamplingParams,
    StructuredOutput,
    Timings,
    ToolCall,
    UnparsedError,
    Usage,
)
from aioserve.grammars.schema import referred
from aioserve.testing import FakeModel
from aioserve.text.conversation import conversation_of
from tests.engine.scripted import ScriptedModel
from tests.server.talking import HERMES
from tests.tiers import examples


class Modelled(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=150)


class Struct(msgspec.Struct):
    name: str
    age: int


@dataclasses.dataclass
class Data:
    name: str
    age: int


FORMS: list[Any] = [Modelled, Struct, Data, pydantic.TypeAdapter(Modelled)]
each_form = pytest.mark.parametrize("form", FORMS, ids=["pydantic", "msgspec", "data", "adapter"])


class DrawnModel(pydantic.BaseModel):
    name: Literal["Ada", "Bob"]
    is_known: bool


class DrawnStruct(msgspec.Struct):
    name: Literal["Ada", "Bob"]
    is_known: bool


@dataclasses.dataclass
class DrawnData:
    name: Literal["Ada", "Bob"]
    is_known: bool


DRAWN: list[Any] = [DrawnModel, DrawnStruct, DrawnData, pydantic.TypeAdapter(DrawnModel)]
USAGE, TIMINGS = Usage(1, 1), Timings(0.0, 0.0, 1)
USER = [{"role": "user", "content": "Who?"}]


def completion(text: str, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("r", (Sample(text, (1,), reason),), USAGE, TIMINGS)


def chatted(content: str, reason: FinishReason = FinishReason.STOP, calls: int = 0) -> Any:
    answer = ChatAnswer(content, "", (ToolCall("a", "f", "{}"),) * calls, reason, ())
    return ChatCompletion("r", (answer,), USAGE, TIMINGS)


@each_form
def test_a_class_goes_where_a_schema_goes(form: Any) -> None:
    written = json.loads(str(StructuredOutput(json_schema=form).json_schema))
    assert written == json.loads(str(StructuredOutput(json_schema=written).json_schema))
    assert "age" in str(written)
    tag = {"structures": [{"begin": "<a>", "schema": form, "end": "</a>"}], "triggers": ["<a>"]}
    tagged = json.loads(str(StructuredOutput(structural_tag=tag).structural_tag))
    assert tagged["structures"][0]["schema"] == written
    tool = {"type": "function", "function": {"name": "f", "parameters": form}}
    (told,) = conversation_of(USER, tools=[tool]).tools or [{}]
    assert told["function"]["parameters"] == written


class Outer(pydantic.BaseModel):
    inner: Modelled


REFERRING: list[Any] = [Outer, Struct, pydantic.TypeAdapter(list[Modelled]), Modelled]


@pytest.mark.parametrize("form", REFERRING, ids=["pydantic", "msgspec", "adapter", "flat"])
@pytest.mark.parametrize("name", ["a", "$defs", "a b/c~d%20é"])
def test_a_class_within_a_schema_refers_to_its_own_parts(form: Any, name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "array", "items": form}}}
    written = StructuredOutput(json_schema=schema).json_schema
    within = {"begin": "<a>", "schema": schema, "end": "</a>"}
    tag = {"structures": [within], "triggers": ["<a>"]}
    tagged = json.loads(str(StructuredOutput(structural_tag=tag).structural_tag))
    assert tagged["structures"][0]["schema"] == json.loads(str(written))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    (told,) = conversation_of(USER, tools=[tool]).tools or [{}]
    assert told["function"]["parameters"] == json.loads(str(written))
    items = json.loads(str(written))["properties"][name]["items"]
    refs = re.findall(r'"\$ref": "(.*?)"', json.dumps(items))
    assert bool(refs) == (form is not Modelled)
    for ref in refs:
        assert isinstance(referred(json.loads(str(written)), ref), dict)


class DrawnWithin(DrawnStruct, forbid_unknown_fields=True):
    pass


@pytest.mark.parametrize("name", ["people", "a b/c~d%20é"])
@pytest.mark.asyncio
async def test_what_is_drawn_by_a_class_within_a_schema_is_of_it(name: str) -> None:
    items = {"type": "array", "items": DrawnWithin, "minItems": 1, "maxItems": 2}
    schema = {"type": "object", "properties": {name: items}, "required": [name]}
    form = StructuredOutput(json_schema=schema | {"additionalProperties": False})
    answer = json.dumps({name: [{"name": "Ada", "is_known": True}]}, ensure_ascii=False)
    params = SamplingParams(structured_output=form, max_tokens=128)
    async with Engine(FakeModel(answers=answer)) as engine:
        told = await engine.generate("Ada, 36", params)
    (one,) = json.loads(told.text)[name]
    assert msgspec.convert(one, DrawnWithin).name == "Ada"
    async with Engine(FakeModel(answers=answer.replace("Ada", "Eve"))) as engine:
        with pytest.raises(RequestFailedError, match="comes 'E'"):
            await engine.generate("Ada, 36", params)


@pytest.mark.parametrize("form", DRAWN, ids=["pydantic", "msgspec", "data", "adapter"])
@pytest.mark.asyncio
async def test_what_is_drawn_by_a_class_is_parsed_as_it(form: Any) -> None:
    params = SamplingParams(structured_output=StructuredOutput(json_schema=form), max_tokens=64)
    answer = '{"name": "Bob", "is_known": false}'
    async with Engine(FakeModel(answers=answer)) as engine:
        whole = await engine.generate("Ada, 36", params)
        told = await engine.chat(USER, params).completion()
    for one in (whole.parsed(form), told.parsed(form), told.answers[0].parsed(form)):
        assert isinstance(one, DrawnModel if form is DRAWN[3] else form)
        assert (one.name, one.is_known) == ("Bob", False)


@settings(max_examples=examples(30))
@given(st.text(max_size=20), st.integers(0, 150), st.sampled_from(FORMS))
def test_any_object_comes_back(name: str, age: int, form: Any) -> None:
    text = json.dumps({"name": name, "age": age})
    for one in (completion(text).parsed(form), chatted(text).parsed(form)):
        assert (one.name, one.age) == (name, age)


@each_form
@pytest.mark.parametrize("make", [completion, chatted])
@pytest.mark.parametrize(
    ("text", "reason", "why"),
    [
        ('{"name": "a", "age": 1}', FinishReason.LENGTH, "length"),
        ('{"name": "a", "age": 1}', FinishReason.ABORT, "abort"),
        ("", FinishReason.STOP, "empty"),
        (" \n", FinishReason.STOP, "empty"),
        ("Ada", FinishReason.STOP, "invalid"),
        ("[" * 100_000, FinishReason.STOP, "invalid"),
        ('{"name": "a"}', FinishReason.STOP, "invalid"),
        ('{"name": "a", "age": "' + "x" * 99_999 + '"}', FinishReason.STOP, "invalid"),
    ],
)
def test_what_is_no_object_of_the_class_says_why(
    form: Any, make: Any, text: str, reason: FinishReason, why: str
) -> None:
    with pytest.raises(UnparsedError, match=r"^the completion is no ") as told:
        make(text, reason).parsed(form)
    assert told.value.reason == why
    assert isinstance(told.value, ValueError)
    assert (told.value.__cause__ is not None) == (why == "invalid")
    assert len(str(told.value)) < 1200


def test_calls_in_place_of_content_say_so() -> None:
    with pytest.raises(UnparsedError, match="it has 2 calls of tools") as told:
        chatted("", calls=2).parsed(Modelled)
    assert told.value.reason == "tool_calls"


class Hostile(type):
    """Classes that raise on every access to `model_*`."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("model_"):
            raise SystemExit("planted")
        return super().__getattribute__(name)


class Raising(metaclass=Hostile):
    pass


class Lying:
    @classmethod
    def model_json_schema(cls) -> Any:
        return {"type": object()}

    @classmethod
    def model_validate_json(cls, text: str) -> Any:
        raise SystemError("planted")


class Breaking(Lying):
    @classmethod
    def model_json_schema(cls) -> Any:
        raise KeyError("planted")


class Muttering(Lying):
    """Raises an exception that can't be shown, and returns itself as a schema."""

    @classmethod
    def model_json_schema(cls) -> Any:
        return cls

    @classmethod
    def model_validate_json(cls, text: str) -> Any:
        raise Unsaid


class Unsaid(SystemExit):
    def __str__(self) -> str:
        raise KeyError("planted")


@pydantic.dataclasses.dataclass
class Validated:
    name: str


@pytest.mark.parametrize("form", [5, "x", None, int, dict, list[int], Raising, Validated, object()])
def test_what_has_no_schema_is_refused_by_name(form: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^form must be a pydantic model or TypeAdapter"):
        completion("{}").parsed(form)
    if form is not None and not isinstance(form, str):
        with pytest.raises(InvalidSamplingError, match=r"^json_schema must be a dict"):
            StructuredOutput(json_schema=form)


def test_a_class_that_fails_is_told_by_name() -> None:
    with pytest.raises(InvalidSamplingError, match="json_schema must hold nothing but what JSON"):
        StructuredOutput(json_schema=Lying)
    with pytest.raises(InvalidSamplingError, match=r"json_schema must be a class .*'planted'"):
        StructuredOutput(json_schema=Breaking)
    with pytest.raises(UnparsedError, match="planted"):
        completion("{}").parsed(Lying)
    for schema in (Muttering, {"items": Muttering}):
        with pytest.raises(InvalidSamplingError, match=r"json_schema must be a class .* says <cl"):
            StructuredOutput(json_schema=schema)
    with pytest.raises(UnparsedError, match=r"no Muttering: Unsaid\(\)") as told:
        completion("{}").parsed(Muttering)
    assert told.value.reason == "invalid"
    with pytest.raises(UnparsedError) as told:
        completion("{}").parsed(type("L" * 10_000, (Lying,), {}))
    assert len(str(told.value)) < 1200
    tool = {"type": "function", "function": {"name": "f", "parameters": Breaking}}
    with pytest.raises(InvalidRequestError, match=r"parameters.* must be a class with a JSON sch"):
        conversation_of(USER, tools=[tool])


@pytest.mark.asyncio
async def test_calls_of_a_tool_with_a_class_for_parameters_are_held_to_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": Modelled}}]
    async with Engine(ScriptedModel(HERMES, call)) as engine:
        told = await engine.chat(USER, SamplingParams(seed=0), tools=tools).completion()
    assert Modelled.model_validate_json(told.tool_calls[0].arguments).age == 36
