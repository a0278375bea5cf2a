"""`Engine.chat`: parts of answers over streams of tokens."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from aioserve import (
    ChatAnswer,
    ChatStream,
    Engine,
    EngineClosedError,
    FinishReason,
    InvalidPromptError,
    InvalidRequestError,
    SamplingParams,
    StreamOptions,
    ToolCall,
)
from aioserve.errors import RequestFailedError
from aioserve.testing import FakeModel, check_invariants
from aioserve.testing.fake_model import PlantedError
from aioserve.text.conversation import conversation_of
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel

pytestmark = pytest.mark.asyncio

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "CALL{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
HERMES = "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}" + TURNS
THINKING = HERMES + "{# </think> #}"
MISTRAL = "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + TURNS
LLAMA = "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}" + TURNS
ASK = [{"role": "user", "content": "What's the weather in Oslo?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ARGUMENTS = '{"city": "Oslo \u00c5"}'
ANSWERS = {
    HERMES: f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    MISTRAL: f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    LLAMA: f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
}
FIRST = SamplingParams(seed=0)


@pytest.mark.parametrize("template", ANSWERS, ids=["hermes", "mistral", "llama3_json"])
@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_calls_come_out_of_the_tokens_also_where_marks_are_special(
    template: str, stop: tuple[str, ...]
) -> None:
    async with Engine(ScriptedModel(template, "Let me see. " + ANSWERS[template])) as engine:
        params = SamplingParams(seed=0, stop=stop)
        async with engine.chat(ASK, params, tools=TOOLS, request_id="mine") as stream:
            assert isinstance(stream, ChatStream)
            assert stream.request_id == "mine"
            deltas = [delta async for delta in stream]
        done = await stream.completion()
        assert "".join(delta.content for delta in deltas) == done.content == "Let me see."
        (call,) = done.tool_calls
        assert (call.name, call.arguments) == ("weather", ARGUMENTS)
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert len(calls) > 5
        assert "".join(call.arguments for call in calls) == ARGUMENTS
        assert (done.finish_reason, done.reasoning) == (FinishReason.STOP, "")
        tokens = [token for delta in deltas for token in delta.tokens]
        assert tuple(tokens) == done.answers[0].tokens
        assert len(tokens) == done.usage.completion_tokens == stream.usage.completion_tokens
        assert [token.index for token in tokens] == list(range(len(tokens)))
        assert done.timings.completion_tokens == len(tokens)
        assert done.request_id == "mine"
        # Only answers read as such have special tokens.
        plain = await engine.generate(ASK, params, tools=TOOLS)
        assert "[TOOL_CALLS]" not in plain.text
        assert "<|python_tag|>" not in plain.text
        assert await all_given_back(engine)


async def test_a_character_in_halves_before_a_mark_is_still_before_it() -> None:
    model = ScriptedModel(MISTRAL, ANSWERS[MISTRAL])
    model.answers[0].insert(0, 0xC3)  # the first half of a letter
    async with Engine(model) as engine:
        done = await engine.chat(ASK, FIRST, tools=TOOLS).completion()
        assert done.content == "\ufffd"
        assert len(done.tool_calls) == 1


@pytest.mark.parametrize("thinks", [False, True])
async def test_reasoning_has_a_field_of_its_own_whoever_opens_it(thinks: bool) -> None:
    text = "Hm.\n</think>\n\nIt rains."
    async with Engine(ScriptedModel(THINKING, text if thinks else f"<think>{text}")) as engine:
        kwargs = {"enable_thinking": thinks}
        stream = engine.chat(ASK, FIRST, chat_template_kwargs=kwargs)
        done = await stream.completion()
        assert (done.reasoning, done.content) == ("Hm.", "It rains.")
        raw = await engine.chat(
            ASK, FIRST, chat_template_kwargs=kwargs, reasoning_parser="none"
        ).completion()
        assert raw.content == (text if thinks else f"<think>{text}")
        plain = await engine.generate(ASK, FIRST, chat_template_kwargs=kwargs)
        assert plain.text == raw.content


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [
        ("<think>\nLet me" + " see" * 50, "b", "c"),
        ("<think>a</think>", "", "b</think>c"),
        ("The tag <think> is", "", "b</think>c"),
    ],
)
async def test_a_message_that_is_continued_within_its_reasoning_goes_on_with_it(
    begun: str, reasoning: str, content: str
) -> None:
    messages = [*ASK, {"role": "assistant", "content": begun}]
    async with Engine(ScriptedModel(THINKING, "b</think>c")) as engine:
        done = await engine.chat(
            messages, FIRST, add_generation_prompt=False, continue_final_message=True
        ).completion()
        assert (done.reasoning, done.content) == (reasoning, content)


async def test_samples_are_read_one_by_one() -> None:
    texts = ["<think>a</think>b", ANSWERS[HERMES], "plain"]
    async with Engine(ScriptedModel(THINKING, *texts), max_num_seqs=4) as engine:
        stream = engine.chat(ASK, SamplingParams(seed=0, n=3), tools=TOOLS)
        deltas = [delta async for delta in stream]
        done = await stream.completion()
        assert [(a.reasoning, a.content) for a in done.answers] == [
            ("a", "b"),
            ("", ""),
            ("", "plain"),
        ]
        assert [len(answer.tool_calls) for answer in done.answers] == [0, 1, 0]
        for sample, answer in enumerate(done.answers):
            mine = [delta for delta in deltas if delta.sample == sample]
            assert "".join(delta.content for delta in mine) == answer.content
            assert tuple(t for delta in mine for t in delta.tokens) == answer.tokens
            assert {token.sample for token in answer.tokens} == {sample}
        assert stream.finish_reasons == (FinishReason.STOP,) * 3


async def test_an_answers_message_goes_on_with_the_conversation() -> None:
    text = f"<think>t</think>c {ANSWERS[HERMES]}"
    model = ScriptedModel(THINKING, text)
    async with Engine(model) as engine:
        done = await engine.chat(ASK, FIRST, tools=TOOLS).completion()
        (call,) = done.tool_calls
        function = {"name": "weather", "arguments": ARGUMENTS}
        assert done.message == {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "t",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*ASK, done.message, result]
        again = await engine.chat(messages, FIRST, tools=TOOLS).completion()
        prompt = model.template.encode(conversation_of(messages, tools=TOOLS), model.tokenizer)
        assert again.usage.prompt_tokens == len(prompt)
        assert '"arguments": {"city": "Oslo Å"}' in model.tokenizer.decode(prompt)
        plain = ChatAnswer("c", "", (), FinishReason.STOP, ())
        assert plain.message == {"role": "assistant", "content": "c"}


async def test_what_is_cut_off_is_given_as_far_as_it_is_known() -> None:
    async with Engine(ScriptedModel(HERMES, ANSWERS[HERMES], "a <tool_")) as engine:
        params = SamplingParams(seed=0, max_tokens=50)
        done = await engine.chat(ASK, params, tools=TOOLS).completion()
        (call,) = done.tool_calls
        assert ARGUMENTS.startswith(call.arguments)
        assert done.finish_reason is FinishReason.LENGTH
        done = await engine.chat(ASK, SamplingParams(seed=1), tools=TOOLS).completion()
        assert done.content == "a <tool_"


async def test_a_parser_is_named_or_found_where_tools_are() -> None:
    text = ANSWERS[HERMES]
    async with Engine(ScriptedModel(HERMES, text)) as engine:
        cases: list[tuple[dict[str, Any], int]] = [
            ({}, 0),
            ({"tools": TOOLS}, 1),
            ({"tools": []}, 0),
            ({"tool_parser": "hermes"}, 1),
            ({"tools": TOOLS, "tool_parser": "none"}, 0),
            ({"tools": TOOLS, "tool_parser": "mistral"}, 0),
        ]
        for options, calls in cases:
            done = await engine.chat(ASK, FIRST, **options).completion()
            assert len(done.tool_calls) == calls
            assert done.content == ("" if calls else text)


async def test_the_argument_that_is_wrong_is_named_and_nothing_has_changed() -> None:
    async with Engine(ScriptedModel(TURNS + "{{ tools }}", "x")) as engine:
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (InvalidRequestError, "tool_parser must be named", {"tools": TOOLS}),
            (InvalidRequestError, "tool_parser must be one of", {"tool_parser": "x"}),
            (InvalidRequestError, "reasoning_parser must be one of", {"reasoning_parser": 5}),
            (InvalidPromptError, "tools must be a list", {"tools": 5, "tool_parser": "none"}),
            (InvalidRequestError, "tenant must be", {"tenant": ""}),
            (TypeError, "chat.* takes no 'temperature'", {"temperature": 1}),
        ]
        for error, complaint, options in wrong:
            with pytest.raises(error, match=complaint):
                engine.chat(ASK, **options)
        for prompt in ("text", [1, 2]):
            with pytest.raises(InvalidPromptError, match="messages must be a list of messages"):
                engine.chat(prompt)  # type: ignore[arg-type]
        assert engine.stats().num_waiting == 0
        check_invariants(engine)
    with pytest.raises(EngineClosedError):
        engine.chat(ASK)


OF_MESSAGES: dict[str, Any] = {
    "tools": TOOLS,
    "chat_template_kwargs": {"enable_thinking": True},
    "add_generation_prompt": False,
    "continue_final_message": True,
}


@pytest.mark.parametrize("argument", OF_MESSAGES)
@pytest.mark.parametrize(("prompt", "kind"), [("text", "text"), ([1, 2], "token ids")])
async def test_what_goes_with_messages_alone_is_refused_beside_other_prompts(
    argument: str, prompt: Any, kind: str
) -> None:
    options = {argument: OF_MESSAGES[argument]}
    async with Engine(ScriptedModel(HERMES, "x")) as engine:
        with pytest.raises(
            InvalidRequestError, match=f"{argument} goes with a prompt of messages .* beside {kind}"
        ) as caught:
            engine.stream(prompt, **options)
        assert caught.value.argument == argument
        with pytest.raises(InvalidRequestError):
            await engine.generate(prompt, **options)


async def test_the_prompt_is_that_of_the_template_with_what_was_given() -> None:
    model = ScriptedModel(THINKING, "x")
    last = {"role": "assistant", "content": "It is"}
    async with Engine(model) as engine:
        cases: list[tuple[list[dict[str, str]], dict[str, Any]]] = [
            (ASK, {}),
            (ASK, {"tools": TOOLS}),
            (ASK, {"chat_template_kwargs": {"enable_thinking": True}}),
            (ASK, {"add_generation_prompt": False}),
            ([*ASK, last], {"add_generation_prompt": False, "continue_final_message": True}),
        ]
        counts = []
        for messages, options in cases:
            ids = model.template.encode(conversation_of(messages, **options), model.tokenizer)
            done = await engine.generate(messages, FIRST, **options)
            assert done.usage.prompt_tokens == len(ids)
            counts.append(len(ids))
        assert len(set(counts)) == len(cases)


async def test_a_stream_that_is_left_ends_its_request() -> None:
    async with Engine(ScriptedModel(HERMES, "x" * 1000)) as engine:
        stream = engine.chat(ASK, FIRST)
        await stream.started()
        assert (await anext(stream)).content == "x"
        stream.close()
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(engine)
        task = asyncio.create_task(engine.chat(ASK, FIRST, request_id="again").completion())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await all_given_back(engine)
        async for _ in engine.chat(ASK, FIRST):
            break
        assert await all_given_back(engine)


async def test_an_answer_that_failed_never_looks_whole() -> None:
    def disturb(index: int, plan: Any, outcome: Any) -> Any:
        if index == 20:
            raise PlantedError("planted")
        return outcome

    async with Engine(ScriptedModel(HERMES, "a <tool_call>" * 9, disturb=disturb)) as engine:
        stream = engine.chat(ASK, FIRST, tools=TOOLS)
        with pytest.raises(RequestFailedError):
            await stream.completion()
        with pytest.raises(RequestFailedError):
            await anext(stream)


async def test_a_model_without_a_template_answers_no_messages() -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidPromptError, match="has no chat template"):
            engine.chat(ASK)


async def test_chat_takes_what_stream_takes() -> None:
    of_stream = [
        name
        for name, parameter in inspect.signature(Engine.stream).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert of_stream == [
        name for name in inspect.signature(Engine.chat).parameters if name in of_stream
    ]
    assert set(of_stream) == StreamOptions.__optional_keys__


async def test_ids_of_calls_are_new() -> None:
    async with Engine(ScriptedModel(HERMES, "\n".join([ANSWERS[HERMES]] * 2))) as engine:
        calls: list[ToolCall] = []
        for _ in range(3):
            calls += (await engine.chat(ASK, FIRST, tools=TOOLS).completion()).tool_calls
        assert len({call.id for call in calls}) == len(calls) == 6
