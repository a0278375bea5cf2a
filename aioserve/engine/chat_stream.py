"""`ChatStream`: completions of messages, in their parts.

Knows the format in which a model writes tool calls and reasoning. `aioserve.text.output_parsers`
reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.engine.answer_constraints import (
    AnswerConstraints,
    answer_constraints,
    check_marked,
    form_beside_calls,
    has_tools,
)
from aioserve.engine.chat_answers import ChatAnswer, ChatCompletion, ChatDelta
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.stream import RequestStream, yield_before
from aioserve.errors import InvalidRequestError, InvariantError, RequestFailedError
from aioserve.execution.runner import LoadedModel
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import CallsOutput, calls_output
from aioserve.grammars.channels import ChannelOutput, channel_frame
from aioserve.grammars.grammar import CompiledGrammar
from aioserve.grammars.thinking import ThinkingBudget
from aioserve.isolation import PluginFault
from aioserve.request import FinishReason, Token
from aioserve.structured_output import StructuredOutput
from aioserve.text.conversation import Conversation
from aioserve.text.json_values import MAX_VALUES
from aioserve.text.messages import FIELDS, FIELDS_OF, MAX_MESSAGES
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.harmony import HarmonyChannels, HarmonyParser
from aioserve.text.output_parsers.parts import (
    Parts,
    joined,
    whole_calls,
)
from aioserve.text.output_parsers.reasoning import ReasoningTags
from aioserve.text.output_parsers.registry import (
    OutputParsers,
    ReasoningFormat,
    reasoning_format_named,
    tool_parser_named,
)
from aioserve.text.output_parsers.tool_parser import ToolParser
from aioserve.text.tokenizer import Tokenizer

__all__ = [
    "MAX_MESSAGES",
    "MAX_VALUES",
    "MESSAGE_FIELDS",
    "ChatAnswer",
    "ChatCompletion",
    "ChatDelta",
    "ChatFormat",
    "ChatStream",
]

MESSAGE_FIELDS: frozenset[str] = frozenset([*FIELDS, *itertools.chain(*FIELDS_OF.values())])
"""Fields that messages may have, of all roles together."""

PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt that are searched for an open tag."""

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class ChatFormat:
    """Format of the completions of one request. Some of it becomes known when the prompt is
    encoded."""

    def __init__(
        self,
        tools: type[ToolParser] | None,
        reasoning: ReasoningFormat | None,
        tokenizer: Tokenizer | None,
        held: AnswerConstraints | None = None,
        whole: StructuredOutput | None = None,
    ) -> None:
        """`whole` is the structured output of all content, if there is one."""
        self._tools = tools
        self.tool_parser: str | None = None if tools is None else tools.name
        """Name of the tool parser that reads calls."""
        self._reasoning = reasoning
        self.held: AnswerConstraints | None = held
        self._whole = whole
        self._named_tools: Sequence[Mapping[str, Any]] = ()
        self._types = ArgumentTypes()
        self._begun = ""
        self._opened = ""
        marks = (*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ()))
        self.shown: Mapping[int, str] = {} if tokenizer is None else tokenizer.special_among(marks)
        """Special tokens that are part of the completions' text, by id."""

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is separated from content."""
        return self._reasoning is not None

    @property
    def has_channels(self) -> bool:
        """True if reasoning is in a channel, beside that of the answer."""
        return isinstance(self._reasoning, HarmonyChannels)

    @classmethod
    def asked(
        cls,
        model: LoadedModel,
        config: EngineConfig,
        parsers: OutputParsers,
        structured_output: StructuredOutput | None,
        tools: object,
        *,
        tool_parser: object,
        reasoning_parser: object,
        strict_tools: object,
        required_tools: object,
        parallel_tool_calls: object,
        max_whitespace: object,
    ) -> ChatFormat:
        """Return the format of completions for these arguments of a caller.

        If all of a completion is `structured_output`, "auto" reads neither calls nor reasoning.
        Reasoning in a channel is still read, since the output has a channel of its own. Raises
        `InvalidRequestError`.
        """
        is_structured = structured_output is not None
        form = form_beside_calls(structured_output, tools, tool_parser, config, parsers)
        whole = structured_output if form is None else None
        if whole is not None and tool_parser == "auto":
            tool_parser = "none"
        held = answer_constraints(
            strict_tools,
            required_tools,
            parallel_tool_calls,
            max_whitespace,
            is_structured=is_structured,
            form=form,
        )
        return cls.of(model, config, parsers, tools, tool_parser, reasoning_parser, held, whole)

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        config: EngineConfig,
        parsers: OutputParsers,
        tools: object,
        tool_parser: object,
        reasoning_parser: object,
        held: AnswerConstraints | None = None,
        whole: StructuredOutput | None = None,
    ) -> ChatFormat:
        """Return the named format. "auto" takes what the engine's options name, or else the
        format of the model's chat template. Raises `InvalidRequestError`."""
        template, has_any_tools = model.chat_template, has_tools(tools)
        source = "" if template is None else template.for_tools(has_any_tools).source
        if tool_parser == "auto" and has_any_tools:
            tool_parser = config.tool_parser
        is_said = reasoning_parser != "auto"
        if not is_said:
            reasoning_parser = config.reasoning_parser
        read = tool_parser_named(tool_parser, source, has_tools=has_any_tools, parsers=parsers)
        if read is not None:
            check_marked(held, read)
        elif held is not None:
            for argument, named in held.names.items():
                if named:
                    raise InvalidRequestError(
                        f"{argument} go with tools, and a tool_parser that reads calls of them",
                        argument=argument,
                        value=sorted(named),
                    )
        reasoning = reasoning_format_named(reasoning_parser, source, parsers)
        if whole is not None and not is_said and isinstance(reasoning, ReasoningTags):
            reasoning = None
        return cls(read, reasoning, model.tokenizer, held, whole)

    def conversation_is(self, conversation: Conversation) -> None:
        """Take the tools, and the message that completions continue.

        Raises `InvalidRequestError` for a strict or required tool that isn't there.
        """
        if conversation.continue_final_message:
            self._begun = conversation.messages[-1]["content"]
        self._named_tools = conversation.tools or ()
        self._types = ArgumentTypes(self._named_tools)
        if self.held is not None:
            names = {_name_of(tool) for tool in self._named_tools}
            for argument, named in self.held.names.items():
                if unknown := named - names:
                    raise InvalidRequestError(
                        f"{argument} must be names of functions in tools, got "
                        f"{min(unknown)!r:.300}",
                        argument=argument,
                        value=min(unknown),
                    )
            if len(names) < len(self._named_tools) or None in names:
                raise InvalidRequestError(
                    "tools must be functions with names of their own where some are strict or "
                    "required, or an answer is of some form",
                    argument="tools",
                )

    def prompt_is(self, ids: npt.NDArray[np.int32], tokenizer: Tokenizer | None) -> None:
        """Take the end of the prompt, which may leave reasoning open."""
        if self._reasoning is not None and tokenizer is not None:
            tail = ids[-PROMPT_END_TOKENS:].tolist()
            prompt_end = tokenizer.decode(tail, skip_special_tokens=False)
            self._opened = self._reasoning.opened_by(prompt_end, self._begun)

    def output(self) -> StructuredOutput | None:
        """Return the structured output that constrains completions, once the prompt is known.

        None if nothing constrains them. Raises `InvalidSamplingError` for tools whose calls can't
        be constrained.
        """
        output, is_framed = self._whole, self.has_channels
        if self.held is not None and self._tools is not None:
            output = self._calls_output(self.held, self._tools)
            is_framed = is_framed and self._tools is not HarmonyParser
        if output is None or not is_framed:
            return None if output is self._whole else output
        return ChannelOutput(grammar=channel_frame(self._specials, self._opened), form=output)

    @property
    def _specials(self) -> Mapping[str, int]:
        """Marks that are special tokens, with their ids."""
        return {name: token_id for token_id, name in self.shown.items()}

    @property
    def _exact(self) -> frozenset[str]:
        """Marks that are special tokens, and plain text if the model types them."""
        typed = self._tools.marks if self._tools and self._tools.takes_typed_marks else ()
        return frozenset(self.shown.values()) - frozenset(typed)

    def _calls_output(self, held: AnswerConstraints, tools: type[ToolParser]) -> CallsOutput:
        tags = self._reasoning if isinstance(self._reasoning, ReasoningTags) else None
        style = Style(
            tools=tools.name,
            declared=tools,
            reasoning=None if tags is None else (tags.opens, tags.closes),
            is_open=tags is not None and bool(self._opened),
            opened=self._opened,
            specials=self._specials,
            exact=self._exact,
        )
        return calls_output(
            style,
            self._named_tools,
            held.strict,
            one=held.one,
            max_whitespace=held.max_whitespace,
            form=held.form,
            required=held.required,
        )

    def budget(
        self, num_tokens: int, model: LoadedModel, grammar: CompiledGrammar | None
    ) -> ThinkingBudget:
        """Return a grammar that ends reasoning after `num_tokens`, on top of `grammar`.

        Needs to know the prompt.
        """
        if self._reasoning is None or model.tokenizer is None:
            raise InvariantError("a budget of reasoning that can't be told")
        reasoning = self._reasoning
        requires = self.held is not None and bool(self.held.required)
        if self.has_channels and self._tools is HarmonyParser and requires:
            reasoning = HarmonyChannels(calls=True)
        return ThinkingBudget(
            num_tokens=num_tokens,
            reasoning=reasoning,
            opened=self._opened,
            shown=self.shown,
            tokenizer=model.tokenizer,
            num_logits=model.limits.vocab_size,
            grammar=grammar,
        )

    def reader(self) -> CompletionReader:
        """Return a reader for one completion."""
        return CompletionReader(
            self._tools,
            self._reasoning,
            opened=self._opened,
            types=self._types,
            alone=self.held is not None and self.held.is_whole,
            exact=self._exact,
        )


def _name_of(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class _Reading:
    """One completion as far as it has been read."""

    def __init__(self, sample: int) -> None:
        self.sample = sample
        self.reader: CompletionReader | None = None
        self.deltas: list[ChatDelta] = []
        self.reasoning_tokens = 0
        self._tokens: list[Token] = []
        self._num_unsaid = 0
        """Tokens since the last one that added something."""

    def push(self, tokens: Sequence[Token], chat_format: ChatFormat) -> ChatDelta | None:
        if self.reader is None:
            self.reader = chat_format.reader()
        self._tokens += tokens
        if len(tokens) == 1 or self.reader.may_reason:
            parts = joined([self._read(self.reader, token) for token in tokens])
        else:
            text, marks = "", list[int]()
            for token in tokens:
                marks += [len(text) + mark for mark in token.marks]
                text += token.text
            parts = self.reader.push(text, marks)
        return self._delta(parts) if parts else None

    def _read(self, reader: CompletionReader, token: Token) -> Parts:
        parts = reader.push(token.text, token.marks)
        self._num_unsaid += 1
        self._count(parts)
        return parts

    def _count(self, parts: Parts) -> None:
        if parts.reasoning:
            self.reasoning_tokens += self._num_unsaid
        if parts:
            self._num_unsaid = 0

    def finish(self) -> ChatDelta | None:
        parts = Parts() if self.reader is None else self.reader.finish()
        self.reader = None
        self._count(parts)
        return self._delta(parts) if parts or self._tokens else None

    def _delta(self, parts: Parts) -> ChatDelta:
        tokens, self._tokens = tuple(self._tokens), []
        delta = ChatDelta(parts.content, parts.reasoning, parts.tool_calls, self.sample, tokens)
        self.deltas.append(delta)
        return delta

    def answer(self, finish_reason: FinishReason | None) -> ChatAnswer:
        return ChatAnswer(
            content="".join([delta.content for delta in self.deltas]),
            reasoning="".join([delta.reasoning for delta in self.deltas]),
            tool_calls=whole_calls(call for delta in self.deltas for call in delta.tool_calls),
            finish_reason=finish_reason or FinishReason.ABORT,
            tokens=tuple(token for delta in self.deltas for token in delta.tokens),
        )


class ChatStream(RequestStream):
    """The parts of the completions of one prompt of messages, as they come.

    Each delta adds something. Joined, the deltas of a sample are its completion, whatever tokens
    the model wrote it with. The stream owns its request, ends as a `TokenStream` does, and is read
    like one: by one task, on the engine's event loop.
    """

    __slots__ = ("_ending", "_format", "_readings")

    def __init__(self, mailbox: Mailbox, chat_format: ChatFormat) -> None:
        super().__init__(mailbox)
        self._format = chat_format
        self._readings = [_Reading(sample) for sample in range(len(mailbox.finish_reasons))]
        self._ending: Iterator[_Reading] | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens read so far that added to the reasoning, of all samples. Marks around reasoning
        count with the text that follows them."""
        return sum([reading.reasoning_tokens for reading in self._readings])

    async def __anext__(self) -> ChatDelta:
        """The next delta. Raises what ended the request, if that was an error, and
        `RequestFailedError` where a plugin's tool parser fails."""
        mailbox = self._mailbox
        try:
            while True:
                self._check_loop()
                while mailbox.lacks():
                    await self._arrival()
                if (token := mailbox.take()) is None:
                    break
                delta = self._readings[token.sample].push((token,), self._format)
                if delta is not None:
                    return delta
            if self._ending is None:
                self._ending = iter(self._readings)
            for reading in self._ending:
                if (delta := reading.finish()) is not None:
                    return delta
        except PluginFault as error:
            raise self._failed(error) from error
        raise StopAsyncIteration

    async def batch(self, min_tokens: int = 1, *, by_token: bool = False) -> list[ChatDelta]:
        """Wait for something new, and return all of it; an empty list means the end.

        There are at most two deltas for each sample, the second only at its end. Otherwise it works
        as `TokenStream.batch`. A delta of several tokens doesn't show the order of its parts.
        `by_token` gives the deltas that reading one by one would have given.
        """
        try:
            return await self._next_deltas(min_tokens, by_token=by_token)
        except PluginFault as error:
            raise self._failed(error) from error

    async def _next_deltas(self, min_tokens: int, *, by_token: bool) -> list[ChatDelta]:
        while tokens := await self._batch(min_tokens):
            deltas: list[ChatDelta | None] = []
            if by_token:
                deltas += [self._readings[one.sample].push((one,), self._format) for one in tokens]
            else:
                by_sample: dict[int, list[Token]] = {}
                for token in tokens:
                    by_sample.setdefault(token.sample, []).append(token)
                for sample, its in by_sample.items():
                    deltas.append(self._readings[sample].push(its, self._format))
            for reading, reason in zip(self._readings, self.finish_reasons, strict=True):
                if reason in _OWN_ENDS:
                    deltas.append(reading.finish())
            if new := [delta for delta in deltas if delta is not None]:
                return new
        return [delta for each in self._readings if (delta := each.finish()) is not None]

    def _failed(self, fault: PluginFault) -> RequestFailedError:
        """End the request, whose parser has failed: what follows can't be told apart."""
        self.close()
        return RequestFailedError(f"the answer can't be read: {fault}")

    async def completion(self) -> ChatCompletion:
        """Read to the end, and return all completions, including parts read before. Cancelling
        ends the request."""
        async for _ in self:
            pass
        answers: list[ChatAnswer] = []
        for reading, reason in zip(self._readings, self.finish_reasons, strict=True):
            await yield_before(len(reading.deltas))
            answers.append(reading.answer(reason))
        return ChatCompletion(self.request_id, tuple(answers), self.usage, self.timings)
