"""Imports what needs torch, without holding the interpreter's lock for long.

Must not import torch at its top: it is there for those that haven't yet.
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
"""What `import torch` maps into the process, in its order and as it does."""

FROZEN_BY_PROGRAM = 1_000
"""From so many objects on the program has called `gc.freeze()`: it would freeze thousands, and
CPython 3.12 freezes some 400 itself as it starts."""


def map_torch() -> None:
    """Map torch's shared libraries into the process; call it in a thread, before the import.

    The interpreter does that with its lock held, and the initializers of these libraries take a
    tenth of a second and more. This call lets go of the lock. But the linker has one too, which a
    thread needs to start another, and for a library's first thread-local variable: a thread that
    does either meanwhile keeps the interpreter's lock until this call is over. So start no thread
    beside this call, and don't call into tokenizers, say.

    A library that isn't there, or can't be mapped, is for the import itself to complain of.
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
    """A module that imports torch; call it in a thread.

    Most of that is Python code, during which other threads run. The collector of garbage doesn't:
    it would take a fifth of the import, hold the lock for longer at a time than anything else
    there, and find nothing. Nor does it look for that among the new objects once it is on again:
    they are given to its oldest generation at once, unless that would thaw what the program froze.
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
