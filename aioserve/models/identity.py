"""Identity of a model by content: digests that two processes or two machines agree on.

File names, the split of tensors over files, and modification times don't count. No torch here.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

from aioserve import _native
from aioserve.models.architecture import Architecture, Tensor
from aioserve.models.stored import StoredTensor, StoredWeights

__all__ = ["computation_digest", "weights_digest"]

_PIECE_BYTES = 1 << 22


def weights_digest(weights: StoredWeights, architecture: Architecture) -> bytes:
    """SHA-256 of the weights' stored numbers and of their formats.

    Reads all weights, on as many threads as `_native` has. For weights that are rounded while they
    are loaded, the digest covers the stored numbers and the target format. Raises `WeightsError`.
    """
    wanted = (*architecture.required, architecture.head)
    there = [tensor for tensor in dict.fromkeys(wanted) if tensor in weights]
    whole = hashlib.sha256(b"aioserve weights 1")
    with ThreadPoolExecutor(_native.cpu_info()["threads"], "aioserve-digest") as pool:
        for told in pool.map(lambda tensor: _hashed_bytes(weights, tensor), there):
            whole.update(told)
    return whole.digest()


def computation_digest(architecture: Architecture, max_model_len: int) -> bytes:
    """SHA-256 of the computation on the weights.

    `max_model_len` counts only if a rotary embedding depends on the longest context served."""
    whole = hashlib.sha256(b"aioserve computation 1")
    ropes = {layer.mixer.rope for layer in architecture.layers}
    if any(rope is not None and rope.depends_on_longest_context for rope in ropes):
        whole.update(b"%d" % max_model_len)
    for field in fields(Architecture):
        if field.name not in ("prefixes", "stacked", "ignored", "max_position_embeddings"):
            value = repr(getattr(architecture, field.name)).encode()
            whole.update(b"%s%d:%s," % (field.name.encode(), len(value), value))
    return whole.digest()


def _hashed_bytes(weights: StoredWeights, tensor: Tensor) -> bytes:
    stored = weights[tensor]
    parts = "; ".join(
        f"{name} {part.dtype} {list(part.shape)} {_digest(part)}"
        for name, part in sorted(stored.parts.items())
    )
    sizes = f"{stored.out_features} {stored.in_features} {stored.group_size} {stored.first_row}"
    told = f"{tensor.name} {stored.format.name} {sizes} {parts}".encode()
    return b"%d:%s," % (len(told), told)


def _digest(part: StoredTensor) -> str:
    found = hashlib.sha256()
    for at in range(0, part.num_bytes, _PIECE_BYTES):
        found.update(part.read_bytes(at, min(_PIECE_BYTES, part.num_bytes - at)).data)
    return found.hexdigest()
