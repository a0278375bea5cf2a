"""Answers to messages as their callers see them, whole and in parts. Plain values."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from aioserve.arguments import brief, counted, quoted
from aioserve.request import FinishReason, Token, Usage
from aioserve.schema_classes import Validates, parsed_answer
from aioserve.text.output_parsers.parts import ToolCall, ToolCallDelta
from aioserve.timings import Timings

__all__ = ["ChatAnswer", "ChatCompletion", "ChatDelta"]

T = TypeVar("T")


class ChatDelta(msgspec.Struct, frozen=True):
    """New parts of one completion, with its last tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    sample: int = 0
    """Index of the completion among the request's `n`, from 0."""
    tokens: tuple[Token, ...] = ()
    """Tokens that came since the completion's last delta."""

    def __repr__(self) -> str:
        return brief(
            self,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=len(self.tool_calls) or None,
            sample=self.sample or None,
            tokens=len(self.tokens),
        )


class ChatAnswer(msgspec.Struct, frozen=True):
    """One completion of a request, whole."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    tokens: tuple[Token, ...]

    @property
    def message(self) -> dict[str, Any]:
        """Message of the assistant, as `Engine.chat` takes it to continue the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def parsed(self, form: type[T] | Validates[T]) -> T:
        """Parse the content into an object: see `ChatCompletion.parsed`."""
        return parsed_answer(form, self.content, self.finish_reason, len(self.tool_calls))

    def __repr__(self) -> str:
        return brief(self, *_in_short(self))


class ChatCompletion(msgspec.Struct, frozen=True):
    """All completions of a request. Properties are those of the first one."""

    request_id: str
    answers: tuple[ChatAnswer, ...]
    usage: Usage
    timings: Timings

    @property
    def content(self) -> str:
        return self.answers[0].content

    @property
    def reasoning(self) -> str:
        return self.answers[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.answers[0].tool_calls

    @property
    def finish_reason(self) -> FinishReason:
        return self.answers[0].finish_reason

    @property
    def message(self) -> dict[str, Any]:
        return self.answers[0].message

    def parsed(self, form: type[T] | Validates[T]) -> T:
        """Parse the content into an object, as `Completion.parsed` does. Also raises
        `UnparsedError` if the answer has tool calls."""
        return self.answers[0].parsed(form)

    def __repr__(self) -> str:
        more = [f"{len(self.answers)} answers"] if len(self.answers) > 1 else []
        first = _in_short(self.answers[0]) if self.answers else []
        return brief(self, quoted(self.request_id), *first, *more)


def _in_short(answer: ChatAnswer) -> list[str]:
    calls = [counted(len(answer.tool_calls), "tool call")] if answer.tool_calls else []
    num_tokens = counted(len(answer.tokens), "token")
    return [quoted(answer.content), *calls, num_tokens, str(answer.finish_reason)]
