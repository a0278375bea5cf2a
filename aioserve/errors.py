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
while it runs carry these as attributes too; one that isn't known is None.
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
"""Where an engine is in its life."""


class AioserveError(Exception):
    """Base of every exception that aioserve raises on purpose."""

    def copy(self) -> Self:
        """An equal error with the same cause, never raised: raising ties an error to its reader's
        frames, so each reader gets one of its own."""
        twin = copy.copy(self)
        return twin if self.__cause__ is None else twin.with_cause(self.__cause__)

    def with_cause(self, cause: BaseException) -> Self:
        """Itself, with `cause` chained as by `raise ... from cause`."""
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
        """Which one is wrong, as `Engine`, `Engine.stream` or `SamplingParams` names it."""
        self.value: object = plain_value(value)
        """What is wrong about it: the value given, if it is a short number or str, what is shown
        of it, or its size."""
        self.limit: object = limit
        """The bound that `value` is beyond."""


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
        """The prompt's length."""
        self.limit: int | None = limit
        """The longest that is taken."""
        self.unit: Literal["tokens", "characters", "messages"] = unit
        """Unit of `value` and `limit`. What is far too long is refused unread, by its characters or
        messages."""


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
        """Names of the policies that there are."""


class TraceError(AioserveError, ValueError):
    """A trace of requests can't be read, or isn't in the format it was read as; names the file, the
    line and the field."""


class PluginError(AioserveError):
    """A plugin that was selected can't be loaded or breaks its contract."""


class ModelError(AioserveError):
    """A model directory can't be loaded."""


class ModelNotFoundError(ModelError):
    """No directory, embedded model or locally cached hub id of that name."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option in its config, isn't implemented."""


class WeightsError(ModelError):
    """A weight file or tensor is missing or has the wrong shape."""


class EngineError(AioserveError):
    """The engine can't take, or can't finish, a request."""


class EngineClosedError(EngineError):
    """The engine serves nothing: it wasn't entered yet, is draining, or has ended. No request will
    do better; another engine may."""

    def __init__(self, message: str, *, state: EngineState | None = None) -> None:
        super().__init__(message)
        self.state: EngineState | None = state
        """Where the engine was in its life."""


class EngineFailedError(EngineClosedError):
    """The engine ended by itself: a bug, a cancelled task or the end of the program. The cause is
    chained where there is one."""

    def __init__(self, message: str, *, state: EngineState | None = "failed") -> None:
        super().__init__(message, state=state)


class WrongLoopError(EngineError):
    """The engine was used from another event loop or process than it was entered in, or where no
    event loop of asyncio runs."""


class StreamBusyError(EngineError):
    """Another task waits for the next token of this stream: a stream has one reader."""


class RequestRefusedError(EngineError):
    """The engine works and didn't take this request. The same request may be taken later."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds: float | None = retry_after_seconds
        """When to try again, in seconds from now; None where that is unknown."""


class QueueFullError(RequestRefusedError):
    """More requests wait, or more of their text, than the engine's limits or the request's deadline
    allow; or all threads that compile structured output are busy with some that takes too long."""

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
        """What waits: requests, tokens of prompts, or characters of long ones that are to be
        encoded; the seconds until a completion would begin; or the grammars that take too long."""
        self.limit: float | None = limit
        """The engine's `max_waiting` or `max_waiting_tokens`, or how many characters or grammars
        may; or the request's `deadline_seconds`."""
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
        """Name of the policy or plugin."""
        self.reason: str | None = reason
        """What it said, which its author wrote for the caller to read."""


class RequestFailedError(EngineError):
    """The engine can't finish this request, and goes on with the others. Raised as such where
    something failed in this request alone."""


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
    """The request hadn't ended within its deadline, so it was aborted, wherever it was. Tokens that
    came before can be read."""

    def __init__(self, message: str, *, deadline_seconds: float | None = None) -> None:
        super().__init__(message)
        self.deadline_seconds: float | None = deadline_seconds
        """As its caller gave it."""


class UnparsedError(AioserveError, ValueError):
    """A completion isn't the object that `parsed` was to make of it. The request itself went
    well."""

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["length", "abort", "error", "tool_calls", "empty", "invalid"] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: Literal["length", "abort", "error", "tool_calls", "empty", "invalid"] | None
        self.reason = reason
        """Why: the finish reason of one that was cut off, what it has in place of content, or
        "invalid", for content that isn't of the form; the cause is chained then."""


class InvariantError(AioserveError):
    """A bug in aioserve: its own accounting doesn't balance."""
