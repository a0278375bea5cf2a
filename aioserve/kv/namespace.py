"""Keys of cached KV: they decide whether a request may use what another computed.

Within an engine the prefix tree has a namespace for all prompts that may share KV. Between engines
a key includes everything that the numbers of KV depend on. Both consist of parts with a tag and a
length, so the value of one part can't pass for another part.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.paging.format import KVFormat

__all__ = ["KVContent", "alone_key", "cache_key", "namespace_key"]


class KVContent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the numbers of KV depend on, beside the tokens and the namespace. Two
    processes have equal contents exactly if one may read what the other wrote."""

    weights: bytes
    """Result of `aioserve.models.identity.weights_digest`: numbers and formats of the weights."""
    computation: bytes
    """Result of `aioserve.models.identity.computation_digest`: architecture, rotary embedding."""
    dtype: str
    """Dtype of activations."""
    activation_quantization: str
    """Numbers in which activations meet integer weights: "int8", or "none" for floats."""
    kv_format: KVFormat
    """Format of the KV pages. Keys contain its name."""
    page_size: int
    """Tokens in a page."""
    kernels: str
    """Kernels that compute it, as far as they decide the last bits: "native avx512_bf16", "cuda
    sm_90"."""


def namespace_key(*, adapter: str | None = None, salt: str | None = None) -> bytes:
    """Return the key for prompts of one `adapter` and one `salt`.

    `None` leaves a part out, which differs from the empty string. Without any part the key is
    `b""`. Keys are netstrings with a tag in front: `b"adapter3:abc,salt1:x,"`. Raises `TypeError`
    for a part that isn't a string.
    """
    return _text(b"adapter", adapter) + _text(b"salt", salt)


def alone_key(namespace: bytes, number: int) -> bytes:
    """Return a namespace for one sequence only, within that of its request. `number` is the
    sequence's."""
    return namespace + _part(b"alone", b"%d" % number)


def cache_key(content: KVContent, namespace: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
    """Return the key, 32 bytes, of the KV of these tokens, int32 [T], from the first position on.
    `namespace` comes from `namespace_key`. The key is the same in every process."""
    parts = [_part(b"aioserve kv", b"1")]
    for name in content.__struct_fields__:
        value = getattr(content, name)
        parts.append(
            _part(name.encode(), value if isinstance(value, bytes) else str(value).encode())
        )
    tokens = np.ascontiguousarray(token_ids, "<i4").tobytes()
    parts += [_part(b"namespace", namespace), _part(b"tokens", tokens)]
    return hashlib.sha256(b"".join(parts)).digest()


def _text(tag: bytes, value: str | None) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise TypeError(f"{tag.decode()} must be a string, got {type(value).__name__}")
    return _part(tag, value.encode("utf-8", "surrogatepass"))


def _part(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b," % (tag, len(data), data)
