"""Triton has packages only for Linux on x86-64 and arm64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore = (
    []
    if find_spec("triton")
    else ["test_attention_choice.py", "test_decoder_steps.py", "test_extras.py", "test_loading.py"]
)


@pytest.fixture
def unmeasured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off measuring the cost of steps and drafters on simulated clocks, too.

    Draft tokens are then made as long as they are right.
    """
    from aioserve.scheduling.speculation.draft_lengths import DraftLengths

    monkeypatch.setattr(DraftLengths, "record", lambda *args, **options: None)
