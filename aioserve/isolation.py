"""The only way to call an object of a plugin.

Any exception of a plugin becomes a `PluginFault`, even `SystemExit` and `CancelledError`. A call
awaits nothing, so the caller's own task can't be what is cancelled. Only `KeyboardInterrupt`
passes: it is the user's. An answer is an object of the plugin's, so reading its class, iterating
over it or showing it may raise too. All of that happens within the call.

This protects against mistakes. It can't end a call that never returns, and it is no sandbox.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from aioserve.arguments import shown
from aioserve.errors import PluginError

__all__ = ["NotAnAnswer", "PluginCalls", "PluginFault", "blamed", "shown"]

T = TypeVar("T")

SLOW_SECONDS = 0.1
"""Time in one step after which a plugin is logged as slow, in seconds."""
MAX_LOGGED_FAULTS = 10
"""Faults of one plugin that are all logged. After these, only the 16th, 32nd, 64th and so on."""


class PluginFault(Exception):
    """A mistake of a plugin, in words. `__cause__` is the exception that it raised, if any."""


class NotAnAnswer(Exception):
    """Raised within a call to report a wrong answer: `NotAnAnswer(answer, "not a number")`."""


class PluginCalls:
    """Stands between the engine and one object of a plugin.

    A subclass decides what is asked, and what follows a fault: another answer, another object, a
    refusal. The `label` names the object and its distribution. In a fault's log message, `after`
    says what follows. With a `clock`, calls that take long between two `begin_step` are logged as
    slow, once.
    """

    def __init__(
        self,
        label: str,
        after: str,
        logger: logging.Logger,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.label = label
        self.faults_total: int = 0
        self.last_fault: str | None = None
        self._after = after
        self._logger = logger
        self._clock = clock
        self._step_seconds = 0.0
        self._called_slow = False

    def begin_step(self) -> None:
        self._step_seconds = 0.0

    def call(self, what: str, ask: Callable[..., T], *args: Any) -> T:
        """Return `ask(*args)`, which asks the plugin and examines its answer.

        Raises `PluginFault`, counted and logged, if it raises. A `NotAnAnswer` is a fault without a
        cause. `what` names the question.
        """
        clock = self._clock
        began = 0.0 if clock is None else clock()
        try:
            return ask(*args)
        except KeyboardInterrupt:
            raise
        except NotAnAnswer as error:
            answer, why = error.args
            raise self.fault(what, f"answered {shown(answer)}, {why}") from None
        except BaseException as error:
            raise self.fault(what, f"raised {shown(error)}", error) from error
        finally:
            if clock is not None:
                seconds = clock() - began
                self._step_seconds += seconds
                if self._step_seconds > SLOW_SECONDS and not self._called_slow:
                    self._say_slow(what, seconds)

    def fault(self, what: str, said: str, error: BaseException | None = None) -> PluginFault:
        """Count and log a fault. It is returned, not raised."""
        fault = self.last_fault = f"{self.label}: {what} {said}"
        self.faults_total = number = self.faults_total + 1
        if number <= MAX_LOGGED_FAULTS or number.bit_count() == 1:
            message = f"{fault}; {self._after} (fault {number})"
            try:
                self._logger.error("%s", message, exc_info=error)
            except KeyboardInterrupt:
                raise
            except BaseException:  # a traceback shows notes and causes, which are the plugin's too
                self._logger.error("%s", message)
        return PluginFault(fault)

    def _say_slow(self, what: str, seconds: float) -> None:
        self._called_slow = True
        took = f"{what} took {seconds:.3g} s, of {self._step_seconds:.3g} s in one step"
        self._logger.warning(
            "%s is slow: %s; the event loop stood still meanwhile (said once)", self.label, took
        )


@contextlib.contextmanager
def blamed(what: str, *let_through: type[Exception]) -> Iterator[None]:
    """Turn what setup code of a plugin raises into a `PluginError` that begins with `what`.

    Exceptions of the classes `let_through` pass unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, *let_through):
        raise
    except BaseException as error:
        raise PluginError(f"{what}: {shown(error)}") from error
