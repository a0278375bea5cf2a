"""The same random examples on every machine, in every order of tests.

Hypothesis also draws constants that it finds in the modules of a project, as far as these have been
imported. Which ones have been depends on the tests that a process ran before.
"""

from __future__ import annotations

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

__all__ = ["draw_no_constants"]


def draw_no_constants() -> None:
    """Let hypothesis draw no constants of modules for the rest of this process. Raises
    `AttributeError` where hypothesis has another name for them."""
    name = "_get_local_constants"
    getattr(providers, name)
    setattr(providers, name, Constants)
