"""What a backend's linear layers compute: known before torch is imported, so that weights are read
into the form that it wants meanwhile. Imports nothing of the package, so all may import it."""

from __future__ import annotations

import msgspec

__all__ = ["NATIVE", "PLAIN_FLOATS", "ComputedFormats"]


class ComputedFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of weights that a backend computes as they are held; all others become floats while
    they are read."""

    dtypes: tuple[str, ...]
    """Floats that it computes in."""
    packed: bool
    """Whether linear layers are held as `_native` packs them; else they are arrays."""
    integer_bits: tuple[int, ...] = ()
    """Bits of the integers with scales in groups that it multiplies, in ascending order."""


NATIVE = ComputedFormats(dtypes=("float32", "bfloat16"), packed=True, integer_bits=(4, 5, 6, 8))
PLAIN_FLOATS = ComputedFormats(dtypes=("float32", "bfloat16", "float16"), packed=False)
