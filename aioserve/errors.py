"""Every exception that aioserve raises on purpose.

    AioserveError
    ├── InvalidRequestError          can't be served as written (also a ValueError)
    │   ├── InvalidPromptError       empty, of the wrong type, token ids out of range
    │   ├── PromptTooLongError       longer than the model's context or the KV cache
    │   ├── InvalidSamplingError     a sampling parameter outside its range
    │   └── DuplicateRequestError    the request id is in use
    ├── ConfigError                  an engine option outside its range (also a ValueError)
    │   └── UnknownPolicyError       no plugin offers a scheduling policy of that name
    ├── TraceError                   a trace of requests can't be read (also a ValueError)
    ├── PluginError                  a selected plugin can't be loaded
    ├── ModelError                   a model directory can't be loaded
    │   ├── ModelNotFoundError       no such directory, embedded model or cached hub id
    │   ├── UnsupportedModelError    an architecture or option that aioserve doesn't implement
    │   └── WeightsError             missing tensor, wrong shape, no weight files
    ├── EngineError                  the engine can't take or finish a request
    │   ├── EngineClosedError        it serves nothing: not entered, draining or closed
    │   │   └── EngineFailedError    ... because it broke, and will not work again
    │   ├── WrongLoopError           used from another event loop than its own, or from none
    │   ├── StreamBusyError          another task is reading the stream
    │   ├── RequestRefusedError      it works, and doesn't take this request
    │   │   ├── QueueFullError       more requests wait than `max_waiting` allows
    │   │   └── RequestRejectedError the scheduling policy or a plugin refused the request
    │   └── RequestFailedError       it took this request, can't finish it, and goes on with others
    │       ├── StepError            the step that computed this request failed
    │       ├── StreamStalledError   the reader took nothing for `stall_timeout_seconds`
    │       └── DeadlineExceededError it hadn't ended within its `deadline_seconds`
    ├── UnparsedError                a completion isn't what it is parsed as (also a ValueError)
    └── InvariantError               a bug in aioserve: its own accounting doesn't balance

Messages name the argument, the value that was given and the limit. Errors that a program answers
while it runs carry these as attributes too; an unknown one is None.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal, Self

from aioserve.arguments import plain_value

__all__ = [
    "AioserveError",
    "ConfigError",
    "DeadlineExceededError",
    "DuplicateRequestError",
    "EngineClosedError",
    "EngineError",
    "EngineFailedError",
    "EngineState",
    "InvalidPromptError",
    "InvalidRequestError",
    "InvalidSamplingError",
    "InvariantError",
    "ModelError",
    "ModelNotFoundError",
    "PluginError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestFailedError",
    "RequestRefusedError",
    "RequestRejectedError",
    "StepError",
    "StreamBusyError",
    "StreamStalledError",
    "TraceError",
    "UnknownPolicyError",
    "UnparsedError",
    "UnsupportedModelError",
    "WeightsError",
    "WrongLoopError",
]

EngineState = Literal["new", "loading", "open", "draining", "closed", "failed"]
"""Stage of an engine's life."""


class AioserveError(Exception):
    """Base of every exception that aioserve raises on purpose."""

    def copy(self) -> Self:
        """Return an equal error with the same cause, never raised.

        Raising ties an error to its reader's frames, so each reader gets a copy of its own.
        """
        twin = copy.copy(self)
        return twin if self.__cause__ is None else twin.with_cause(self.__cause__)

    def with_cause(self, cause: BaseException) -> Self:
        """Return itself, with `cause` chained as by `raise ... from cause`."""
        self.__cause__: BaseException | None = cause
        return self


class _ArgumentError(ValueError):
    """An argument or an option has a value that it can't have."""

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        value: object = None,
        limit: object = None,
    ) -> None:
        super().__init__(message)
        self.argument: str | None = argument
        """Argument that is wrong, as `Engine`, `Engine.stream` or `SamplingParams` names it."""
        self.value: object = plain_value(value)
        """Wrong value: itself if it is a short number or str, else its size or a short `repr`."""
        self.limit: object = limit
        """Bound that `value` exceeds."""


class InvalidRequestError(AioserveError, _ArgumentError):
    """The caller's request can't be served as written."""


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty, of the wrong type, or has token ids outside the vocabulary."""

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = "prompt",
        value: object = None,
        limit: object = None,
    ) -> None:
        super().__init__(message, argument=argument, value=value, limit=limit)


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an answer within the model's context or the KV cache."""

    def __init__(
        self,
        message: str,
        *,
        argument: str = "prompt",
        value: int | None = None,
        limit: int | None = None,
        unit: Literal["tokens", "characters", "messages"] = "tokens",
    ) -> None:
        super().__init__(message, argument=argument)
        self.value: int | None = value
        """Length of the prompt, in `unit`."""
        self.limit: int | None = limit
        """Longest prompt that is taken, in `unit`."""
        self.unit: Literal["tokens", "characters", "messages"] = unit
        """Unit of `value` and `limit`. A prompt that is far too long is refused unread, by its
        characters or messages.
        """


class InvalidSamplingError(InvalidRequestError):
    """A sampling parameter is outside its range."""


class DuplicateRequestError(InvalidRequestError):
    """A live request already has this id."""

    def __init__(self, message: str, *, value: str | None = None) -> None:
        super().__init__(message, argument="request_id", value=value)


class ConfigError(AioserveError, _ArgumentError):
    """An engine option is outside its range or contradicts another."""


class UnknownPolicyError(ConfigError):
    """No installed plugin offers a scheduling policy of that name."""

    def __init__(
        self, message: str, *, name: str | None = None, known: Sequence[str] | None = None
    ) -> None:
        super().__init__(message)
        self.name: str | None = name
        self.known: tuple[str, ...] | None = None if known is None else tuple(known)
        """Names of the policies that plugins offer."""


class TraceError(AioserveError, ValueError):
    """A trace of requests can't be read, or isn't in the format it was read as.

    The message names the file, the line and the field.
    """


class PluginError(AioserveError):
    """A plugin that was selected can't be loaded or breaks its contract."""


class ModelError(AioserveError):
    """A model directory can't be loaded."""


class ModelNotFoundError(ModelError):
    """No directory, embedded model or locally cached hub id has this name."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option in its config, isn't implemented."""


class WeightsError(ModelError):
    """A weight file or tensor is missing or has the wrong shape."""


class EngineError(AioserveError):
    """The engine can't take, or can't finish, a request."""


class EngineClosedError(EngineError):
    """The engine serves nothing: it wasn't entered yet, is draining, or has ended.

    Sending the request again won't help; another engine may take it.
    """

    def __init__(self, message: str, *, state: EngineState | None = None) -> None:
        super().__init__(message)
        self.state: EngineState | None = state
        """Stage of the engine's life."""


class EngineFailedError(EngineClosedError):
    """The engine ended by itself: a bug, a cancelled task or the end of the program.

    The cause is chained if it is known.
    """

    def __init__(self, message: str, *, state: EngineState | None = "failed") -> None:
        super().__init__(message, state=state)


class WrongLoopError(EngineError):
    """The engine was used from another event loop or process than its own, or outside asyncio."""


class StreamBusyError(EngineError):
    """Another task waits for the next token of this stream. A stream has one reader."""


class RequestRefusedError(EngineError):
    """The engine works and refused this request. It may take the same request later."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds: float | None = retry_after_seconds
        """Time until a retry makes sense, in seconds from now; None if it is unknown."""


class QueueFullError(RequestRefusedError):
    """The queue is full: requests or their text, or the wait against the request's deadline.

    Also raised while all threads that compile structured output are busy with slow grammars.
    """

    def __init__(
        self,
        message: str,
        *,
        value: float | None = None,
        limit: float | None = None,
        unit: Literal["requests", "tokens", "characters", "seconds", "grammars"] = "requests",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.value: float | None = value
        """Amount that waits, in `unit`: requests, prompt tokens, characters of long prompts to be
        encoded, or slow grammars. In seconds, the wait until a completion would begin.
        """
        self.limit: float | None = limit
        """Bound of `value`: `max_waiting`, `max_waiting_tokens`, the most characters or grammars,
        or the request's `deadline_seconds`.
        """
        self.unit: Literal["requests", "tokens", "characters", "seconds", "grammars"] = unit
        """Unit of `value` and `limit`."""


class RequestRejectedError(RequestRefusedError):
    """The scheduling policy, or a plugin's admission check, refused the request."""

    def __init__(
        self,
        message: str,
        *,
        refused_by: str | None = None,
        reason: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.refused_by: str | None = refused_by
        """Name of the policy or plugin that refused."""
        self.reason: str | None = reason
        """Reason that it gave, written by its author for the caller to read."""


class RequestFailedError(EngineError):
    """The engine can't finish this request, and goes on with the others.

    Raised itself if something failed in this request alone.
    """


class StepError(RequestFailedError):
    """The step that computed this request failed; the cause is chained."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step: int | None = step
        """Number of the step, as in the log."""


class StreamStalledError(RequestFailedError):
    """The reader took no token for longer than the stall timeout, so the request was aborted."""

    def __init__(self, message: str, *, timeout_seconds: float | None = None) -> None:
        super().__init__(message)
        self.timeout_seconds: float | None = timeout_seconds
        """The engine's `stall_timeout_seconds`."""


class DeadlineExceededError(RequestFailedError):
    """The request hadn't ended within its deadline, so it was aborted at whatever stage it was.

    Tokens that came before can be read.
    """

    def __init__(self, message: str, *, deadline_seconds: float | None = None) -> None:
        super().__init__(message)
        self.deadline_seconds: float | None = deadline_seconds
        """Deadline that the caller gave."""


class UnparsedError(AioserveError, ValueError):
    """A completion isn't the object that `parsed` was to make of it, though its request went
    well.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["length", "abort", "error", "tool_calls", "empty", "invalid"] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: Literal["length", "abort", "error", "tool_calls", "empty", "invalid"] | None
        self.reason = reason
        """Reason: the finish reason of a completion that was cut off, or what it has in place of
        content. If it is "invalid", the content doesn't match the form, and the cause is chained.
        """


class InvariantError(AioserveError):
    """A bug in aioserve: its own accounting doesn't balance."""
