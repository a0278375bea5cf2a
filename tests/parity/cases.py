"""Models, settings and backends that are tried together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["BACKENDS", "on_backends"]

BACKENDS = ("native", "reference")


def on_backends(names: Iterable[str], settings: Iterable[str]) -> pytest.MarkDecorator:
    """Each name with each setting on the native backend, and with one of them on the reference's;
    the others are slow."""
    settings = tuple(settings)
    return pytest.mark.parametrize(
        ("name", "settings", "backend"),
        [
            pytest.param(
                name,
                setting,
                backend,
                marks=()
                if backend == "native" or (i + j) % len(settings) == 0
                else pytest.mark.slow,
            )
            for i, name in enumerate(names)
            for j, setting in enumerate(settings)
            for backend in BACKENDS
        ],
        indirect=["backend"],
    )
