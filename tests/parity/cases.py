"""Models, settings and backends that are tried together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["BACKENDS", "on_backends"]

BACKENDS = ("native", "reference")


def on_backends(names: Iterable[str], settings: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test with each name, setting and backend.

    `make test` runs each name once, on the native backend. Each name with another setting or
    backend is marked `more`, and with both, `slow`."""
    settings = tuple(settings)

    def marks(backend: str, is_turn: bool) -> tuple[pytest.MarkDecorator, ...]:
        if backend == "native":
            return () if is_turn else (pytest.mark.more,)
        return (pytest.mark.more,) if is_turn else (pytest.mark.slow,)

    return pytest.mark.parametrize(
        ("name", "settings", "backend"),
        [
            pytest.param(name, setting, backend, marks=marks(backend, (i + j) % len(settings) == 0))
            for i, name in enumerate(names)
            for j, setting in enumerate(settings)
            for backend in BACKENDS
        ],
        indirect=["backend"],
    )
