"""Imports torch and its users without holding the interpreter's lock for long.

Must not import torch at its top: callers haven't imported it yet.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_without_collecting", "map_torch"]

_SHARED_LIBRARIES = (
    ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL | os.RTLD_LAZY),
    ("libtorch_python.so", os.RTLD_NOW),
)
"""Libraries that `import torch` maps into the process, in its order and with its flags."""

FROZEN_BY_PROGRAM = 1_000
"""Number of frozen objects that shows that the program has called `gc.freeze()`. It would freeze
thousands, while CPython 3.12 freezes about 400 itself at startup."""


def map_torch() -> None:
    """Map torch's shared libraries into the process. Call it in a thread, before the import.

    The interpreter does that with its lock held, and the initializers of these libraries take a
    tenth of a second and more. This call releases the lock. But the linker has a lock, too, which
    is needed to start a thread, and for a library's first thread-local variable. A thread that does
    either would keep the interpreter's lock until this call ends. So start no thread beside this
    call, and don't call into libraries like tokenizers.

    A library that is missing or can't be mapped is left to the import, which reports it.
    """
    if "torch" in sys.modules:
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _SHARED_LIBRARIES:
        dlopen(os.fsencode(Path(spec.origin).parent / "lib" / name), flags)


def import_without_collecting(name: str) -> ModuleType:
    """Import a module that needs torch. Call it in a thread.

    Most of the import is Python code, during which other threads run. Garbage collection is off: it
    would take a fifth of the import, hold the lock in long stretches, and find nothing. Afterwards
    the new objects go to its oldest generation at once, so that it doesn't search them. This is
    left out if it would thaw objects that the program froze.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if gc.get_freeze_count() < FROZEN_BY_PROGRAM:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
