"""`/api/chat` and `/api/generate`: answers in lines of JSON, or in one object.

    {"model": "m", ..., "message": {"role": "assistant", "content": "Hi"}, "done": false}
    {"model": "m", ..., "message": {...}, "done": true, "done_reason": "stop", ...}

Durations are those of the request, in nanoseconds. The model is loaded already, so `load_duration`
is the wait before the first step. The others are the time for the prompt, and for the tokens after
the first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

import msgspec

from aioserve.engine.interface import TokenStreamLike
from aioserve.request import FinishReason
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import (
    OWN_ENDS,
    Answering,
    Arguments,
    CallBegun,
    Content,
    Piece,
    Reasoning,
    Writer,
    answered,
    size_of,
)
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.endpoint import LINES, Endpoint, ErrorShape, Handler, Streams, endpoint
from aioserve.server.errors import ApiError, as_named
from aioserve.server.ollama.ollama_request import (
    NAMES,
    ChatBody,
    GenerateBody,
    chat_input_of,
    check_generated,
    options_of,
    plan_of,
    served_name,
)
from aioserve.server.openai.completions_request import gap_of

__all__ = ["OLLAMA_ERRORS", "chat", "generate", "posted"]

B = TypeVar("B")


class OllamaErrorBody(msgspec.Struct, frozen=True):
    error: str


OLLAMA_ERRORS: ErrorShape = ErrorShape(
    OllamaErrorBody, lambda error, _: OllamaErrorBody(error.message), is_line=True
)


class OllamaFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an answer, or all of it. The last line has the counts."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChat(_Answer, frozen=True, kw_only=True, omit_defaults=True):
    message: OllamaMessage


class OllamaText(_Answer, frozen=True, kw_only=True, omit_defaults=True):
    response: str
    thinking: str = ""


class RawAnswering:
    """Answer to a text: a `Source`, as `Answering` is for messages."""

    def __init__(self, call: Call, body: GenerateBody, plan: AnswerPlan) -> None:
        with self.in_words():
            params = options_of(call, body, plan)
            prompt = body.prompt or ""
            if body.suffix:
                prompt = gap_of(call.facts, prompt, body.suffix)
            call.kept.begin(size_of(call, params, (), stream=body.is_streamed))
            self.stream: TokenStreamLike = call.engine.stream(prompt, params, **call.options())

    @property
    def streams(self) -> Sequence[TokenStreamLike]:
        return (self.stream,)

    def in_words(self) -> AbstractContextManager[None]:
        return as_named(NAMES | {"prompt": "prompt"})

    async def started(self) -> None:
        await self.stream.started()

    def close(self) -> None:
        self.stream.close()

    @property
    def is_cut_off(self) -> bool:
        return self.stream.finish_reason is FinishReason.LENGTH

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[list[Piece], None]:
        while tokens := await self.stream.batch(min_tokens):
            if text := "".join([token.text for token in tokens]):
                yield [Content(text)]
        if self.stream.finish_reason not in OWN_ENDS:
            raise ApiError(503, "the answer was ended by the server", code="draining")


class AnswerWriter(Writer[list[Piece]]):
    """Writer of one answer. A call is sent once it is whole."""

    kind: ClassVar[bytes] = LINES

    def __init__(self, name: str, answering: Answering | RawAnswering, *, is_chat: bool) -> None:
        super().__init__(answering.batches)
        self._name = name
        self._answering = answering
        self._is_chat = is_chat
        self._called: tuple[str, list[str]] | None = None
        """Call that is being written: its function, and pieces of its arguments."""

    async def whole(self) -> object:
        said: list[tuple[str, str]] = []
        calls: list[OllamaCall] = []
        async for pieces in self.batches(1):
            text, thought, called = self._read(pieces)
            said.append((text, thought))
            calls += called
        calls += self._ended()
        text, thought = ("".join(parts) for parts in zip(*said, strict=True)) if said else ("", "")
        return self._answer(text, thought, calls, **self._counts())

    async def written(self, batch: list[Piece]) -> AsyncGenerator[bytes, None]:
        text, thought, calls = self._read(batch)
        if text or thought or calls:
            yield _line(self._answer(text, thought, calls, done=False))

    def end(self) -> bytes:
        calls = self._ended()
        told = _line(self._answer("", "", calls, done=False)) if calls else b""
        return told + _line(self._answer("", "", [], **self._counts()))

    def _read(self, pieces: Sequence[Piece]) -> tuple[str, str, list[OllamaCall]]:
        text, thought, calls = "", "", []
        for piece in pieces:
            match piece:
                case Content():
                    text += piece.text
                case Reasoning():
                    thought += piece.text
                case CallBegun():
                    calls += self._ended()
                    self._called = (piece.name, [])
                case Arguments():
                    if self._called is not None:
                        self._called[1].append(piece.text)
        return text, thought, calls

    def _ended(self) -> list[OllamaCall]:
        """Return the call that was being written, if there is one."""
        if self._called is None:
            return []
        (name, pieces), self._called = self._called, None
        try:
            arguments = msgspec.json.decode("".join(pieces), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = {}  # cut off, as the reason says
        return [OllamaCall(OllamaFunction(name, arguments))]

    def _answer(self, text: str, thought: str, calls: list[OllamaCall], **more: Any) -> _Answer:
        about = {"model": self._name, "created_at": now(), **more}
        if not self._is_chat:
            return OllamaText(**about, response=text, thinking=thought)
        message = OllamaMessage(role="assistant", content=text, thinking=thought, tool_calls=calls)
        return OllamaChat(**about, message=message)

    def _counts(self) -> dict[str, Any]:
        stream = self._answering.stream
        timings, usage = stream.timings, stream.usage
        first = timings.first_token_seconds or 0.0
        return {
            "done": True,
            "done_reason": "length" if self._answering.is_cut_off else "stop",
            "total_duration": _nanoseconds(timings.total_seconds),
            "load_duration": _nanoseconds(timings.queued_seconds or 0.0),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prefill_seconds or 0.0),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timings.total_seconds - first),
        }


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _line(answer: _Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


def posted(
    path: str, summary: str, *, answer: Any = None, streams: Streams | None = None
) -> Callable[[Handler[B]], Endpoint[B]]:
    """Make an endpoint of the handler below. Clients of Ollama may send its body without the type
    of JSON."""
    return endpoint(
        OLLAMA_ERRORS,
        path,
        summary,
        method="POST",
        answer=answer,
        any_content_type=True,
        streams=streams,
    )


@posted("/api/chat", "Answer a conversation in lines", answer=OllamaChat, streams="if asked")
async def chat(call: Call, body: ChatBody) -> object:
    name = served_name(call, body.model)
    if not body.messages:
        message = OllamaMessage(role="assistant", content="")
        return OllamaChat(**_loaded(name), message=message)
    answering = await Answering.begun(
        call, await chat_input_of(call, body), stream=body.is_streamed
    )
    writer = AnswerWriter(name, answering, is_chat=True)
    return await answered(call, answering, writer, stream=body.is_streamed)


@posted("/api/generate", "Answer a text in lines", answer=OllamaText, streams="if asked")
async def generate(call: Call, body: GenerateBody) -> object:
    name = served_name(call, body.model)
    is_raw = check_generated(call, body)
    if not (body.prompt or body.suffix):
        return OllamaText(**_loaded(name), response="")
    if is_raw:
        answering = RawAnswering(call, body, plan_of(call, body))
    else:
        answering = await Answering.begun(
            call, await chat_input_of(call, body), stream=body.is_streamed
        )
    writer = AnswerWriter(name, answering, is_chat=False)
    return await answered(call, answering, writer, stream=body.is_streamed)


def _loaded(name: str) -> dict[str, Any]:
    """Answer to clients that want the model loaded, which it is."""
    return {"model": name, "created_at": now(), "done": True, "done_reason": "load"}
