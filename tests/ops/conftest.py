"""Fixtures that restore the instruction set and thread count of native kernels after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioserve import _native

CPU_INFO = _native.cpu_info()


@pytest.fixture(params=CPU_INFO["isas_supported"] + CPU_INFO["isas_emulated"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.cpu_info()["isa"]
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Allow a test to call `_native.set_num_threads`."""
    before = _native.cpu_info()["threads"]
    yield
    _native.set_num_threads(before)
