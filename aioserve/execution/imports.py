"""Imports what needs torch, without holding the interpreter's lock for long.

Must not import torch at its top: it is there for those that haven't yet.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_loading"]

_SHARED_LIBRARIES = (
    ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL | os.RTLD_LAZY),
    ("libtorch_python.so", os.RTLD_NOW),
)
"""What `import torch` maps into the process, in its order and as it does."""


def import_loading() -> ModuleType:
    """`aioserve.execution.loading`; call it in a thread, since it imports torch.

    Most of that is Python code, during which other threads run. But the interpreter maps shared
    libraries with its lock held, and the initializers of torch's take a tenth of a second and more.
    So they are mapped before, in a call that lets go of the lock.
    """
    if "torch" not in sys.modules:
        _map_torch()
    return importlib.import_module("aioserve.execution.loading")


def _map_torch() -> None:
    """A library that isn't there, or can't be mapped, is for the import itself to complain of."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _SHARED_LIBRARIES:
        dlopen(os.fsencode(Path(spec.origin).parent / "lib" / name), flags)
