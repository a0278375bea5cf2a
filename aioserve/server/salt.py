"""Whose cached prefixes a call shares: its own salt, and the one that its body asks for.

A body's salt never stands for itself: who knows another's salt doesn't come to share with it.
"""

from __future__ import annotations

import hashlib

__all__ = ["combined_salt"]

_TAG = b"aioserve cache_salt 1"


def combined_salt(own: str | None, asked: str | None) -> str | None:
    """The salt of a call whose key has the salt `own` and whose body has `asked`: 64 hexadecimal
    digits that are others for each pair, and `own` where the body has none."""
    if asked is None:
        return own
    parts = [b"" if own is None else b"\1" + own.encode(), asked.encode("utf-8", "surrogatepass")]
    digest = hashlib.sha256(_TAG)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
