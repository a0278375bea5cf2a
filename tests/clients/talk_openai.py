"""Common uses of the openai client, tried on a server. Prints the ones that worked.

    OPENAI_API_KEY=... python talk_openai.py PYHELP_URL SCRIPTED_URL

The first URL serves "pyhelp", and the second "scripted". There, the seed chooses the answer: 0 is
content, 1 is a call of the tool `add`, and 2 is reasoning and content.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

USER: Any = [{"role": "user", "content": "What does json.dumps do?"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Add(BaseModel):
    a: int
    b: int


class Colour(BaseModel):
    name: str = Field(max_length=20)  # without it, the model would never end
    is_warm: bool


def lists_models(pyhelp: OpenAI, scripted: OpenAI) -> None:
    assert [model.id for model in pyhelp.models.list()] == ["pyhelp"]
    assert pyhelp.models.retrieve("pyhelp").id == "pyhelp"
    try:
        pyhelp.models.retrieve("org/other")
    except openai.NotFoundError as told:
        assert told.code == "model_not_found"
    else:
        raise AssertionError("a model that isn't there was found")


def completes(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "pyhelp", "prompt": "json.dumps", "max_tokens": 8, "temperature": 0}
    whole = pyhelp.completions.create(**asked, logprobs=2, echo=True)
    logprobs = whole.choices[0].logprobs
    assert whole.choices[0].text.startswith("json.dumps")
    assert logprobs is not None and logprobs.token_logprobs and logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens or ()) == whole.choices[0].text
    chunks = list(pyhelp.completions.create(**asked, stream=True))
    assert "json.dumps" + "".join(c.text for chunk in chunks for c in chunk.choices) == (
        whole.choices[0].text
    )
    several = pyhelp.completions.create(**{**asked, "prompt": ["json", "os"], "n": 2})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None and several.usage.completion_tokens == 32


def chats(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "pyhelp", "messages": USER, "max_completion_tokens": 24, "seed": 1}
    whole = pyhelp.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    content, logprobs = whole.choices[0].message.content, whole.choices[0].logprobs
    assert content and whole.choices[0].message.role == "assistant"
    assert logprobs is not None and logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(pyhelp.chat.completions.create(**asked, **options))
    streamed = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert streamed == content
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def keeps_a_form(pyhelp: OpenAI, scripted: OpenAI) -> None:
    parsed = pyhelp.chat.completions.parse(
        model="pyhelp", messages=USER, response_format=Colour, max_completion_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)
    whole = pyhelp.chat.completions.create(
        model="pyhelp",
        messages=USER,
        extra_body={"structured_outputs": {"choice": ["red", "blue"]}},
    )
    assert whole.choices[0].message.content in ("red", "blue")


def calls_tools(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": USER, "tools": [ADD], "seed": 1}
    whole = scripted.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    chunks = list(scripted.chat.completions.create(**asked, stream=True))
    deltas = [d for chunk in chunks for c in chunk.choices for d in c.delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "add"
    told = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert told == call.function.arguments
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    message: Any = whole.choices[0].message.model_dump(exclude_none=True)
    after = scripted.chat.completions.create(
        model="scripted", messages=[*USER, message, answer], tools=[ADD], seed=0
    )
    assert after.choices[0].finish_reason == "stop"


def calls_strict_tools(pyhelp: OpenAI, scripted: OpenAI) -> None:
    add = openai.pydantic_function_tool(Add, name="add")
    asked: Any = {"model": "scripted", "messages": USER, "tools": [add], "seed": 1}
    whole = scripted.chat.completions.parse(**asked, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Add(a=1, b=2)
    with scripted.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert [one.function.parsed_arguments for one in streamed] == [Add(a=1, b=2)]
    flat: Any = openai.pydantic_function_tool(Add, name="add")["function"]
    parsed = scripted.responses.parse(
        model="scripted",
        input="What is 1 and 2?",
        tools=[{"type": "function", **flat}],
        extra_body={"seed": 1},
    )
    (item,) = [item for item in parsed.output if item.type == "function_call"]
    assert json.loads(item.arguments) == {"a": 1, "b": 2}


def forces_tools(pyhelp: OpenAI, scripted: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    for choice in (named, "required"):
        whole = pyhelp.chat.completions.create(
            model="pyhelp",
            messages=USER,
            tools=[ADD],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_completion_tokens=200,
        )
        (call,) = whole.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "add"
        assert set(json.loads(call.function.arguments)) == {"a", "b"}


def reasons(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": USER, "seed": 2}
    message = scripted.chat.completions.create(**asked).choices[0].message
    assert message.content == "It is 4."
    assert getattr(message, "reasoning_content", None) == "Two and two."


def embeds(pyhelp: OpenAI, scripted: OpenAI) -> None:
    vectors = pyhelp.embeddings.create(model="pyhelp", input=["json", "pathlib"]).data
    plain = pyhelp.embeddings.create(model="pyhelp", input="json", encoding_format="float").data
    assert [vector.index for vector in vectors] == [0, 1]
    assert vectors[0].embedding == plain[0].embedding
    assert abs(sum(x * x for x in plain[0].embedding) - 1) < 1e-3


def responds(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "pyhelp", "input": "What does json.dumps do?", "max_output_tokens": 24}
    whole = pyhelp.responses.create(**asked)
    assert whole.output_text
    with pyhelp.responses.stream(**asked) as stream:
        streamed = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert streamed == whole.output_text
    going_on = pyhelp.responses.create(
        model="pyhelp", input="And json.loads?", previous_response_id=whole.id, max_output_tokens=8
    )
    assert going_on.previous_response_id == whole.id
    assert pyhelp.responses.retrieve(whole.id).output_text == whole.output_text


def is_told_what_is_wrong(pyhelp: OpenAI, scripted: OpenAI) -> None:
    asked: Any = {"model": "pyhelp", "messages": USER}
    for error, changed in (
        (openai.BadRequestError, {**asked, "temperature": 1000}),
        (openai.BadRequestError, {**asked, "extra_body": {"best_offer": 1}}),
        (openai.NotFoundError, {**asked, "model": "gpt-4"}),
    ):
        try:
            pyhelp.chat.completions.create(**changed)
        except error as told:
            assert told.body, told
        else:
            raise AssertionError(f"{changed} was taken")
    try:
        pyhelp.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was taken")


def works_with_asyncio(pyhelp: OpenAI, scripted: OpenAI) -> None:
    async def talk() -> None:
        async with AsyncOpenAI(base_url=pyhelp.base_url) as client:
            stream = await client.chat.completions.create(
                model="pyhelp", messages=USER, stream=True, max_completion_tokens=8
            )
            async for _ in stream:
                break
            await stream.close()
            whole = await client.chat.completions.create(model="pyhelp", messages=USER)
            assert whole.choices[0].message.content

    asyncio.run(talk())


CHECKS = (
    lists_models,
    completes,
    chats,
    keeps_a_form,
    calls_tools,
    calls_strict_tools,
    forces_tools,
    reasons,
    embeds,
    responds,
    is_told_what_is_wrong,
    works_with_asyncio,
)


def main() -> None:
    pyhelp, scripted = (OpenAI(base_url=f"{url}/v1", max_retries=0) for url in sys.argv[1:])
    for check in CHECKS:
        check(pyhelp, scripted)
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
