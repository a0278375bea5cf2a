"""Plans as bytes, for a runner in another process. An array is encoded as its bytes."""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np

from aioserve.steps.plan import StepPlan

__all__ = ["decoded_plan", "encoded_plan"]


def encoded_plan(plan: StepPlan) -> bytes:
    """Encode a plan as MessagePack."""
    return _ENCODER.encode(plan)


def decoded_plan(encoded: bytes) -> StepPlan:
    """Decode the result of `encoded_plan`. Raises `msgspec.DecodeError` for other bytes."""
    return _DECODER.decode(encoded)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return value.tobytes()
    raise NotImplementedError(f"a plan has {type(value).__name__}, which isn't encoded")


def _array_of(wanted: Any, value: Any) -> Any:
    if get_origin(wanted) is np.ndarray:
        return np.frombuffer(value, np.int32)
    raise NotImplementedError(f"a plan has {wanted}, which isn't decoded")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_DECODER = msgspec.msgpack.Decoder(StepPlan, dec_hook=_array_of)
