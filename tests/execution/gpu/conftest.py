"""Triton has no packages for anything but Linux on x86-64 and arm64."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = (
    []
    if find_spec("triton")
    else ["test_attention_choice.py", "test_decoder_steps.py", "test_extras.py", "test_loading.py"]
)
