"""Keys of prefix tree namespaces: prompts share KV only within one.

Two requests share a namespace exactly if all of their parts are equal. Each part carries a tag and
its length, so no value of one part can pass for another part.
"""

from __future__ import annotations

__all__ = ["namespace_key"]


def namespace_key(*, adapter: str | None = None, salt: str | None = None) -> bytes:
    """The key for prompts of one `adapter` and one `salt`.

    `None` leaves a part out, which differs from the empty string. Without any part the key is
    `b""`. Keys are netstrings with a tag in front: `b"adapter3:abc,salt1:x,"`. Raises `TypeError`
    for a part that is no string.
    """
    return _part(b"adapter", adapter) + _part(b"salt", salt)


def _part(tag: bytes, value: str | None) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise TypeError(f"{tag.decode()} must be a string, got {type(value).__name__}")
    data = value.encode("utf-8", "surrogatepass")
    return b"%b%d:%b," % (tag, len(data), data)
