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
    │   ├── EngineClosedError        used before `async with` or after it ended
    │   ├── WrongLoopError           used from another event loop than its own
    │   ├── QueueFullError           more requests wait than `max_waiting` allows
    │   ├── RequestRejectedError     the scheduling policy or a plugin refused the request
    │   ├── StepError                the step that computed this request failed
    │   ├── RequestFailedError       something failed in this request alone (NaN logits, template)
    │   └── StreamStalledError       the reader took nothing for `stall_timeout_seconds`
    └── InvariantError               a bug in aioserve: its own books don't balance

Messages name the argument, the value that was given and the limit.
"""

from __future__ import annotations

__all__ = [
    "AioserveError",
    "ConfigError",
    "DuplicateRequestError",
    "EngineClosedError",
    "EngineError",
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
    "RequestRejectedError",
    "StepError",
    "StreamStalledError",
    "TraceError",
    "UnknownPolicyError",
    "UnsupportedModelError",
    "WeightsError",
    "WrongLoopError",
]


class AioserveError(Exception):
    """Base of every exception that aioserve raises on purpose."""


class InvalidRequestError(AioserveError, ValueError):
    """The caller's request can't be served as written."""


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty, of the wrong type, or has token ids outside the vocabulary."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an answer within the model's context or the KV cache."""


class InvalidSamplingError(InvalidRequestError):
    """A sampling parameter is outside its range."""


class DuplicateRequestError(InvalidRequestError):
    """A live request already has this id."""


class ConfigError(AioserveError, ValueError):
    """An engine option is outside its range or contradicts another."""


class UnknownPolicyError(ConfigError):
    """No installed plugin offers a scheduling policy of that name."""


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
    """The engine was used before `async with` or after it ended."""


class WrongLoopError(EngineError):
    """The engine was used from another event loop than the one it was entered on."""


class QueueFullError(EngineError):
    """More requests wait than the engine's limit allows."""


class RequestRejectedError(EngineError):
    """The scheduling policy, or a plugin's admission check, refused the request."""


class StepError(EngineError):
    """The step that computed this request failed; the cause is chained."""


class RequestFailedError(EngineError):
    """Something failed in this request alone; the engine and its other requests go on."""


class StreamStalledError(EngineError):
    """The reader took no token for longer than the stall timeout, so the request was aborted."""


class InvariantError(AioserveError):
    """A bug in aioserve: its own accounting doesn't balance."""
